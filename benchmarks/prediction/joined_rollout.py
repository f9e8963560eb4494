"""Predictions for vLLM runs with joined batches and weights, from the committed runs that decoded batch by batch.

    python benchmarks/prediction/joined_rollout.py [--json PATH]

`benchmarks/speed/rollout.py` measured six settings on one engine. From each file this script takes the lengths, which are drawn again, and
the seconds and the weight loading of "batch by batch" at depth 1 without an update. They set the decode law. Its ratio of a step to a
sequence is that of `rlgraph/plan/estimates.py` on an H200; on a CPU, where nothing separates the two, both extremes are given. All
other settings and updates are simulated. The runs are older than this script, and it uses no other number of them.
"""

import json
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.lib.command import command_line, write
from benchmarks.speed import rollout
from rlgraph.plan import estimates
from rlgraph.plan.cost_functions import Decode
from rlgraph.plan.forecast import Machine

RESULTS = Path(__file__).parents[1] / "results"
FIRST = "depth 1, update 0.0 of a step"
READ_TOKEN_S = 0.7e-6  # 135M parameters, 2 operations each, 40 % of an H200's peak
HOST_STEP = estimates.DECODE_STEP_S.value / estimates.DECODE_SEQUENCE_S.value
STEP_TO_SEQUENCE = {"rollout_h200.json": (HOST_STEP,), "rollout_cpu.json": (math.inf, 0.0)}


def played(decode: Decode, rule: Any, update_s: float, load_s: float, size: rollout.Size) -> float:
    """Seconds of a batch in the run of `rollout.run`, played."""
    ready: dict[int, float] = {}
    drawn = np.array([rollout.lengths(step, size) for step in range(rollout.WARM_UP + size.batches + rule.depth + 1)], dtype=float)
    machine = Machine(rule, decode, drawn, rollout.PROMPT, load_s, lambda version: ready.get(version, math.inf))
    start_s = 0.0
    for step in range(rollout.WARM_UP + size.batches):
        at = max([machine.now] + [ready[version] for version in range(machine.version + 1, rule.needs(step) + 1)])
        machine.fire(step, at + machine.load(step))
        ready[step + 1] = max(machine.now, ready.get(step, 0.0)) + update_s
        if step == rollout.WARM_UP - 1:
            start_s = machine.now
    return (machine.now - start_s) / size.batches


def law(ratio: float, seconds: float, load_s: float, size: rollout.Size) -> Decode:
    """The law with a step of `ratio` sequences that takes as long as was measured batch by batch."""
    unit = Decode(sequence_s=1.0) if ratio == 0 else Decode(step_s=1.0, sequence_s=1 / ratio)
    scale = (seconds - load_s) / played(unit, rollout.ways(1)[rollout.BATCHWISE], 0.0, 0.0, size)
    return Decode(step_s=unit.step_s * scale, sequence_s=unit.sequence_s * scale, prefill_s=READ_TOKEN_S)


def compared(measured: Mapping[str, Any], ratio: float) -> list[dict[str, Any]]:
    lengths, timed = measured["lengths"], measured["timed"]
    size = rollout.Size(lengths["rows"], timed["batches"], timed["rounds"], lengths["longest"] // rollout.CAP)
    base = measured[FIRST][rollout.BATCHWISE]
    decode = law(ratio, base["step_s"], base["load_s"], size)
    found = []
    for depth, share in ((1, 0.0), (1, 0.3), (2, 0.3)):
        setting = f"depth {depth}, update {share:.1f} of a step"
        for way, rule in rollout.ways(depth).items():
            seconds, predicted = measured[setting][way]["step_s"], played(decode, rule, share * base["step_s"], base["load_s"], size)
            if (setting, way) != (FIRST, rollout.BATCHWISE):
                row = {"setting": setting, "way": way, "predicted_s": predicted, "measured_s": seconds}
                found.append(row | {"error": predicted / seconds - 1})
    return found


def main() -> None:
    parser = command_line(__doc__)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for file, ratios in STEP_TO_SEQUENCE.items():
        measured = json.loads((RESULTS / file).read_text())
        for ratio in ratios:
            rows = compared(measured, ratio)
            errors = [abs(row["error"]) for row in rows]
            kind = {math.inf: ", steps alone", 0.0: ", sequences alone"}.get(ratio, "")
            figures[file + kind] = {
                "machine": measured["machine"],
                "median_error": statistics.median(errors),
                "worst_error": max(errors),
                "ways": rows,
            }
            print(f"{file}{kind}: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
            for row in rows:
                print(f"  {row['setting']:32} {row['way']:22} {row['predicted_s']:.3f} {row['measured_s']:.3f} {row['error']:+.1%}")
    write(arguments.json, figures)


if __name__ == "__main__":
    main()
