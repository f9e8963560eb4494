"""Steps in which every sequence decodes one token are scheduled as vLLM schedules them."""

import json
from pathlib import Path

from support import forked_programs
from support.paths import PROGRAMS

SEEDS = 12


def test_each_step_holds_the_requests_blocks_and_tokens_of_vllms_own(tied: Path, tmp_path: Path) -> None:
    """Over random arrivals, lengths, stop tokens, drops, pauses, resets and preemptions; with steps scheduled ahead and without."""
    ran = forked_programs.run(str(PROGRAMS / "decode_scheduler.py"), str(tied), str(SEEDS), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {row["scheduler"] for row in found} == {"DecodeScheduler", "AheadScheduler"}
    assert len(found) == 2 * SEEDS
    for row in found:
        assert row["first difference"] is None, (row, ran.stderr)
        assert row["as many"], row
        assert row["same"], row
    steps, short, preempted = (sum(row[of] for row in found) for of in ("steps", "short", "preempted"))
    assert short > 0.7 * steps, (short, steps)
    assert preempted > 20, preempted
