"""One pool for rollout and update, and a slow reward on the host: depth 0 against depth 1, predicted and measured.

    python benchmarks/speed/one_pool.py [--json PATH] [--rounds N]

Engines are simulated: they wait. Everything else runs for real on Ray. At depth 0 the pool stands still while the reward is at work.
At depth 1 rollout k + 1 comes before update k, so the reward of batch k hides behind it. Both settings in turn, several times; medians,
with the 10th and 90th percentile. The first steps of each run warm up and are left out.
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

GENERATE_S, REWARD_S, UPDATE_S = 0.6, 0.5, 0.4
SECONDS = {"prompts": 0.0, "rollout": GENERATE_S, "slow_score": REWARD_S, "update": UPDATE_S}


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def slow_score(batch: Columns) -> Any:
    time.sleep(REWARD_S)
    return fakes.score.function(batch)


def plan(depth: int) -> rg.Plan:
    pool = rg.Pool("shared")
    graph = fakes.vector_loop(depth, pools=(pool, pool), generate_s=GENERATE_S, train_s=UPDATE_S, middle=slow_score)
    return rg.compile(graph, rg.Cluster(cpus=1), rg.planning.Costs(SECONDS))


def setting(depth: int) -> Setting:
    predicted_s = plan(depth).prediction.step_s
    return Setting(f"depth {depth}", lambda: plan(depth), predicted_s, ("measured_to_predicted", predicted_s))


if __name__ == "__main__":
    stages = {"generate": GENERATE_S, "reward": REWARD_S, "update": UPDATE_S}
    alternate(__doc__ or "", [setting(0), setting(1)], stages)
