"""Predicted and measured step time of a loop with a critic, whose update nobody waits for but the next batch's slot.

    python benchmarks/speed/critic.py [--json PATH] [--steps N]

Stages wait: they sleep for as long as their costs say. Everything else runs for real on Ray. Each prediction is made from these
costs alone before its run; what the runtime adds (hand-overs, copies) is not in it. Medians, with the 10th and 90th percentile.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import ray
from support import fakes

import rlgraph as rg
from rlgraph.runtime.driver.ray_cluster import start_ray

WARM_UP = 4


@dataclass(frozen=True)
class Setting:
    """Seconds of the stages, the depth, and whether the critic has a pool of its own."""

    depth: int
    rollout_s: float
    update_s: float
    critic_s: float
    apart: bool

    def plan(self) -> rg.Plan:
        critic, pool = fakes.TrainCritic(self.critic_s), rg.Pool("values") if self.apart else None
        graph = fakes.vector_loop(self.depth, generate_s=self.rollout_s, train_s=self.update_s, critic=critic, critic_pool=pool)
        seconds = {"prompts": 0.0, "rollout": self.rollout_s, "score": 0.0, "update": self.update_s, "critic_update": self.critic_s}
        return rg.compile(graph, rg.Cluster(cpus=3), rg.Costs(seconds))


SETTINGS = [
    Setting(0, 0.8, 0.2, 0.6, apart=False),
    Setting(0, 0.8, 0.2, 0.6, apart=True),
    Setting(1, 0.8, 0.2, 0.5, apart=False),
    Setting(0, 0.4, 0.2, 0.9, apart=True),
    Setting(1, 0.4, 0.2, 0.9, apart=True),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", type=Path, help="write the figures here as well")
    arguments.add_argument("--steps", type=int, default=16, help="of each setting, after those that fill the pipeline")
    given = arguments.parse_args()
    machine: dict[str, Any] = {"cores": rg.local_cluster().cpus, "load_before": os.getloadavg()[0], "python": platform.python_version()}
    ours, rows = start_ray(), []
    for setting in SETTINGS:
        plan = setting.plan()
        with plan.launch() as job:
            seconds = [step.seconds for step in job.steps(WARM_UP + given.steps)][WARM_UP:]
        low, *_, high = statistics.quantiles(seconds, n=10)
        median = statistics.median(seconds)
        rows.append({**vars(setting), "predicted_s": plan.prediction.step_s, "measured_s": median, "p10_s": low, "p90_s": high})
        print(f"{setting}: predicted {plan.prediction.step_s:.3f} s, measured {median:.3f} s ({low:.3f} to {high:.3f})", flush=True)
    if ours:
        ray.shutdown()
    if given.json:
        figures = {"machine": {**machine, "load_after": os.getloadavg()[0]}, "versions": {"ray": ray.__version__}, "settings": rows}
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
