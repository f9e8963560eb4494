"""A graph with settings to tune, and costs for it."""

from collections.abc import Sequence

import rlgraph as rg
from rlgraph.plan.cost_functions import Decode, NodeCost, Setting
from rlgraph.plan.lengths import Lengths

ONE = Setting(1, 1, 32)
TAIL = Lengths((0.0, 0.5, 0.9, 1.0), (100.0, 800.0, 3000.0, 8000.0), prompt_tokens=200.0)


def exact(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [0.0 for _ in responses]


def build(depth: int = 1, buffers: int = 1, tensor_parallel: int = 1, colocated: bool = False) -> rg.Graph:
    together = rg.Pool("shared")
    rollout_pool, train_pool = (together, together) if colocated else (rg.Pool("rollout", share=None), rg.Pool("train", share=None))
    generator = rg.Generator("m", pool=rollout_pool, tensor_parallel=tensor_parallel)
    policy = rg.Policy("m", pool=train_pool)
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], count=8)
    rollout = generator.rollout(prompts, weights, group_size=4)
    advantages = rg.advantages(rollout, rg.reward(exact, prompts, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)


def costs(train_s: float, step_s: float = 0.01, start_s: float = 0.0) -> rg.planning.Costs:
    decode = NodeCost(decode=Decode(step_s, 1e-4, start_s=start_s), measured=ONE)
    nodes = {"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "rollout": decode, "update": NodeCost(parallel_s=train_s, measured=ONE)}
    return rg.planning.Costs(nodes, lengths=TAIL, swap_s=0.5, publish_s=0.1)
