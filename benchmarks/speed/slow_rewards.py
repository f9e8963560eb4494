"""A slow reward that works on the parts of a batch while the rest is decoded, against one that waits for the whole batch.

    python benchmarks/speed/slow_rewards.py [--json PATH] [--rounds N]

Engines are simulated: they wait. Everything else runs for real on Ray. The reward takes a third of the time of generating, the
update nearly all of it, so that only what hides the reward reaches the bound max(generate, update) at depth 1, or
generate + update at depth 0. All settings in one run, each several times in turn; medians, with the 10th and 90th percentile.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support import fakes

import rlgraph as rg
from benchmarks.lib.alternating import Setting, alternate
from rlgraph.columns import Columns

GENERATE_S, REWARD_S, UPDATE_S = 1.2, 0.4, 1.1
COUNT = 16


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def slow_score(batch: Columns) -> Any:
    time.sleep(REWARD_S * len(batch["group_ids"]) / COUNT)
    return fakes.score.function(batch)


def plan(depth: int, chunks: int) -> rg.Plan:
    graph = fakes.vector_loop(depth, generate_s=GENERATE_S, train_s=UPDATE_S, middle=slow_score, count=COUNT, chunks=chunks)
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": GENERATE_S, "slow_score": REWARD_S, "update": UPDATE_S})
    return rg.compile(graph, rg.Cluster(cpus=2), costs)


def setting(depth: int, chunks: int) -> Setting:
    bound = max(GENERATE_S, UPDATE_S) if depth else GENERATE_S + UPDATE_S
    predicted_s = plan(depth, chunks).prediction.period_s
    return Setting(f"depth {depth}, chunks {chunks}", lambda: plan(depth, chunks), predicted_s, ("of_bound", bound))


if __name__ == "__main__":
    stages = {"generate": GENERATE_S, "reward": REWARD_S, "update": UPDATE_S}
    alternate(__doc__ or "", [setting(depth, chunks) for depth in (1, 0) for chunks in (1, 2, 4)], stages)
