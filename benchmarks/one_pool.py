"""One pool for rollout and update, and a slow reward on the host: depth 0 against depth 1, predicted and measured.

    python benchmarks/one_pool.py [--json PATH] [--rounds N]

Engines are simulated: they wait. Everything else runs for real on Ray. At depth 0 the pool stands still while the reward is at work.
At depth 1 rollout k + 1 comes before update k, so the reward of batch k hides behind it. Both settings in turn, several times; medians,
with the 10th and 90th percentile. The first steps of each run warm up and are left out.
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

GENERATE_S, REWARD_S, UPDATE_S = 0.6, 0.5, 0.4
STEPS, WARM_UP, ROUNDS = 10, 3, 2
SECONDS = {"prompts": 0.0, "rollout": GENERATE_S, "slow_score": REWARD_S, "update": UPDATE_S}


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def slow_score(batch: Columns) -> Any:
    time.sleep(REWARD_S)
    return fakes.score.function(batch)


def plan(depth: int) -> rg.Plan:
    pool = rg.Pool("shared")
    graph = fakes.vector_loop(depth, pools=(pool, pool), generate_s=GENERATE_S, train_s=UPDATE_S, middle=slow_score)
    return rg.compile(graph, rg.Cluster(cpus=1), rg.Costs(SECONDS))


def measured(depth: int) -> list[float]:
    with plan(depth).launch() as job:
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
        "rounds": rounds,
        "steps_a_round": STEPS,
    }
    times: dict[int, list[float]] = {0: [], 1: []}
    ours = start_ray()
    for _ in range(rounds):
        for depth, found in times.items():
            found += measured(depth)
    if ours:
        ray.shutdown()
    figures["machine"]["load_after"] = round(os.getloadavg()[0], 1)
    print(f"{'depth':>5} {'predicted':>10} {'median':>9} {'p10':>9} {'p90':>9}")
    for depth, found in times.items():
        cuts, median = statistics.quantiles(found, n=10), statistics.median(found)
        predicted = plan(depth).prediction.step_s
        figures[f"depth {depth}"] = {
            "predicted_s": predicted, "median_s": median, "p10_s": cuts[0], "p90_s": cuts[-1], "measured_to_predicted": median / predicted,
        }  # fmt: skip
        print(f"{depth:5} {predicted:8.3f} s {median:7.3f} s {cuts[0]:7.3f} s {cuts[-1]:7.3f} s")
    if path:
        path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
