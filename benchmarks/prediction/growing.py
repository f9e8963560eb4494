"""A run whose responses grow from 500 to 8,000 tokens, on 64 and 1,024 GPUs: the best split that stays, against splits that follow.

    python benchmarks/prediction/growing.py [--json PATH]
    python benchmarks/prediction/growing.py --smoke

Nothing is measured: each step time is that of a plan, estimated from shapes as in `scale.py`. A run has as many steps between two looks
as `Replan.every`; a look knows the lengths of the steps before it, so a split is always one look late. Each change costs `CHANGE_S`.
"""

import itertools
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

import rlgraph as rg
from benchmarks.lib.command import command_line, write
from benchmarks.prediction.scale_graphs import Case

EVERY, LOOKS, CHANGE_S, GAIN = 50, 12, 120.0, 0.1
FIRST, LAST = 500.0, 8000.0  # mean tokens of a response
CASES = (
    Case("8B", 64, "NVIDIA H100", 128, 8, 16384, FIRST, prompt_tokens=1024.0),
    Case("32B", 1024, "NVIDIA H100", 512, 16, 16384, FIRST, prompt_tokens=1024.0, width=4, sharing=4),
)
Split = tuple[int, int]  # GPUs that generate, and that train


def priced(case: Case, models: Path) -> rg.Plan:
    graph = case.graph(models)
    return rg.compile(graph, case.cluster, case.costs(graph))


def split_of(plan: rg.Plan) -> Split:
    gpus = {pool.name: len(pool.gpus) for pool in plan.pools}
    return gpus["rollout"], gpus["train"]


def run(case: Case, looks: int, models: Path) -> dict[str, Any]:
    """Play a run of so many looks: the seconds of a step in each, under the best fixed split and under splits that follow."""
    tokens = [float(mean) for mean in np.geomspace(FIRST, LAST, looks)]
    at = [replace(case, mean_tokens=mean) for mean in tokens]
    best = [split_of(priced(each, models)) for each in at]

    def step_s(index: int, split: Split) -> float:
        return priced(replace(at[index], rollout=split[0], train=split[1]), models).prediction.step_s

    times: Mapping[Split, list[float]] = {split: [step_s(index, split) for index in range(looks)] for split in dict.fromkeys(best)}
    fixed = min(times, key=lambda split: sum(times[split]))
    followed, now = list[Split](), best[0]
    for index in range(looks):
        if index and times[best[index - 1]][index - 1] < (1 - GAIN) * times[now][index - 1]:
            now = best[index - 1]
        followed.append(now)
    changes = sum(a != b for a, b in itertools.pairwise(followed))
    seconds = [times[split][index] for index, split in enumerate(followed)]
    total = {"fixed": EVERY * sum(times[fixed]), "replanned": EVERY * sum(seconds) + changes * CHANGE_S}
    return {
        "model": case.model, "gpus": case.gpus, "mean_tokens": tokens, "fixed": fixed, "fixed_step_s": times[fixed], "followed": followed,
        "followed_step_s": seconds, "best_step_s": [min(each[index] for each in times.values()) for index in range(looks)],
        "changes": changes, "total_s": total, "replanned_over_fixed": total["replanned"] / total["fixed"],
    }  # fmt: skip


def main() -> None:
    given = command_line(__doc__, smoke="three looks on 64 GPUs").parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as models:
        for case in CASES[:1] if given.smoke else CASES:
            row = run(case, 3 if given.smoke else LOOKS, Path(models))
            rows.append(row)
            splits = " -> ".join(f"{generate} + {train}" for generate, train in dict.fromkeys(row["followed"]))
            print(
                f"{case.model} on {case.gpus} GPUs, fixed {row['fixed']}, followed {splits}: {row['replanned_over_fixed']:.3f}", flush=True
            )
            write(given.json, {"every": EVERY, "change_s": CHANGE_S, "gain": GAIN, "runs": rows})


if __name__ == "__main__":
    main()
