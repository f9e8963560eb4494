"""A slow reward that works on the parts of a batch while the rest is decoded, against one that waits for the whole batch.

    python benchmarks/slow_rewards.py [--json PATH] [--rounds N]

Engines are simulated: they wait. Everything else runs for real on Ray. The reward takes a third of the time of generating, the
update nearly all of it, so that only what hides the reward reaches the bound max(generate, update) at depth 1, or
generate + update at depth 0. All settings in one run, each several times in turn; medians, with the 10th and 90th percentile.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import fakes
import ray

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.runtime.driver.ray_dispatch import start_ray

GENERATE_S, REWARD_S, UPDATE_S = 1.2, 0.4, 1.1
COUNT, STEPS, WARM_UP, ROUNDS = 16, 10, 3, 2


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def slow_score(batch: Columns) -> Any:
    time.sleep(REWARD_S * len(batch["group_ids"]) / COUNT)
    return fakes.score.function(batch)


def plan(depth: int, chunks: int) -> rg.Plan:
    graph = fakes.vector_loop(depth, generate_s=GENERATE_S, train_s=UPDATE_S, middle=slow_score, count=COUNT, chunks=chunks)
    costs = rg.Costs({"prompts": 0.0, "rollout": GENERATE_S, "slow_score": REWARD_S, "update": UPDATE_S})
    return rg.compile(graph, rg.Cluster(cpus=2), costs)


def measured(depth: int, chunks: int) -> list[float]:
    with plan(depth, chunks).launch() as job:
        return [step.seconds for step in job.steps(WARM_UP + STEPS)][WARM_UP:]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well")
    arguments.add_argument("--rounds", type=int, default=ROUNDS, help="how often each setting is run")
    path, rounds = arguments.parse_args().json, arguments.parse_args().rounds
    figures: dict[str, Any] = {
        "machine": {"cores": rg.local_cluster().cpus, "load_before": round(os.getloadavg()[0], 1), "python": platform.python_version()},
        "versions": {"ray": ray.__version__},
        "seconds": {"generate": GENERATE_S, "reward": REWARD_S, "update": UPDATE_S},
    }
    settings = [(depth, chunks) for depth in (1, 0) for chunks in (1, 2, 4)]
    times: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    ours = start_ray()
    for _ in range(rounds):
        for setting in settings:
            times[setting] += measured(*setting)
    if ours:
        ray.shutdown()
    print(f"{'depth':>5} {'chunks':>6} {'predicted':>10} {'median':>9} {'p10':>9} {'p90':>9}  of the bound")
    for (depth, chunks), found in times.items():
        bound = max(GENERATE_S, UPDATE_S) if depth else GENERATE_S + UPDATE_S
        cuts, median = statistics.quantiles(found, n=10), statistics.median(found)
        predicted = plan(depth, chunks).prediction.period_s
        figures["rounds"] = rounds
        figures[f"depth {depth}, chunks {chunks}"] = {
            "predicted_s": predicted, "median_s": median, "p10_s": cuts[0], "p90_s": cuts[-1], "of_bound": median / bound,
        }  # fmt: skip
        print(f"{depth:5} {chunks:6} {predicted:8.3f} s {median:7.3f} s {cuts[0]:7.3f} s {cuts[-1]:7.3f} s  {median / bound:.3f}")
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
