"""What a job makes of faults: over a hundred of them, each kind in each stage, with the time until the error or the recovery.

    python benchmarks/injected_faults.py [--json PATH] [--only KIND]

Workers are forked processes without Ray, which start in milliseconds; driver, channels, watchdog and weights are a job's own. Every
fault must end in an error that names the node or its worker, and a channel, or (a slow node) in a warning and a finished run. Seconds
are from the fault in the worker to the error in the driver's hands, its workers ended.
"""

import argparse
import json
import logging
import os
import re
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fakes
import faults
import forked
from rich.progress import track

from rlgraph.errors import RlgraphError

DEADLINE_S = 3.0
STEPS = 8


class Warnings(logging.Handler):
    """Keeps what the watchdog says."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def run(fault: faults.Fault, warnings: Warnings) -> dict[str, Any]:
    """Return how a job with the fault ended, and whether that is how it should."""
    warnings.said.clear()
    ended, pids = "finished", []
    job = forked.job(faults.graph(fault), DEADLINE_S)
    try:
        with job:
            pids = list(job.pids.values())
            list(job.steps(STEPS))
    except RlgraphError as error:
        ended = f"{type(error).__name__}: {error}"
    now = time.monotonic()
    clock = Path(fault.clock)
    seconds = now - float(clock.read_text()) if clock.exists() else None
    for path in re.findall(r"stacks of all workers are in (\S+\.txt)", ended):
        os.unlink(path)
    names = any(f"'{name}'" in ended for name in (fault.node, fault.worker))
    right = (
        f"in worker '{fault.worker}'" in str(warnings.said)
        if fault.kind == "slow" and ended == "finished"
        else names and "channel" in ended
    )
    limit = DEADLINE_S + 1 if fault.kind in faults.HANGS or fault.kind == "full channel" else 5.0
    return {
        "kind": fault.kind,
        "stage": fault.stage,
        "step": fault.step,
        "ended": ended.splitlines()[0][:160],
        "named": bool(right),
        "seconds": seconds,
        "in time": ended == "finished" or (seconds is not None and seconds <= limit),
        "left": [pid for pid in pids if forked.alive(pid)],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well")
    arguments.add_argument("--only", help="faults of this kind alone")
    given = arguments.parse_args()
    warnings = Warnings()
    logging.getLogger("rlgraph.watchdog").addHandler(warnings)
    with forked.job(fakes.vector_loop(1)) as warm:  # the server that workers are forked from imports torch once
        list(warm.steps(2))
    with tempfile.TemporaryDirectory() as folder:
        chosen = [fault for fault in faults.cases(folder) if given.only in (None, fault.kind)]
        found = [run(fault, warnings) for fault in track(chosen, "injecting faults")]
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in found:
        by_kind[row["kind"]].append(row["seconds"] if row["seconds"] is not None else float("nan"))
    for kind, seconds in by_kind.items():
        print(f"{kind:24} {len(seconds):3} faults, median {statistics.median(seconds):5.2f} s, longest {max(seconds):5.2f} s")
    wrong = [row for row in found if not row["named"] or not row["in time"] or row["left"]]
    print(f"{len(found)} faults, {len(found) - len(wrong)} as they should be; load average {os.getloadavg()[0]:.1f}")
    for row in wrong:
        print(row)
    if given.json:
        summary = {"deadline_s": DEADLINE_S, "faults": len(found), "as they should be": len(found) - len(wrong), "load": os.getloadavg()}
        given.json.write_text(json.dumps({**summary, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
