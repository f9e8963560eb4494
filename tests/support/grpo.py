"""GRPO around the generator and the policy of a test."""

from collections.abc import Callable, Sequence
from typing import Any

import rlgraph as rg
from rlgraph.graph.nodes import Output


def zero_reward(responses: list[str]) -> list[float]:
    return [0.0 for _ in responses]


def grpo_graph(
    generator: rg.Generator,
    policy: rg.Policy,
    data: Sequence[dict[str, Any]] = ({"prompt": "1 + 1 ="},),
    *,
    name: str = "grpo",
    count: int = 4,
    seed: int = 0,
    group_size: int = 2,
    depth: int = 1,
    buffers: int = 1,
    reward: Callable[..., Any] = zero_reward,
    rewards: Callable[[Output], Output] | None = None,
    estimator: Any = None,
    loss: Any = None,
    old_log_probs: bool = False,
    outputs: Callable[[Output], Sequence[Output]] = lambda rollout: (),
    **options: Any,
) -> rg.Graph:
    """Declare a loop. A scorer `reward`, or a node `rewards`, rates responses; `options` are those of the rollout."""
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    rollout = generator.rollout(rg.prompts(list(data), count=count, seed=seed), weights, group_size=group_size, **options)
    rated = rewards(rollout) if rewards else rg.reward(reward, rollout)
    advantages = rg.advantages(rollout, rated, estimator=estimator or rg.GRPO())
    old = [policy.log_probs(rollout)] if old_log_probs else []
    step = policy.update(rollout, advantages, *old, loss=loss or rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph(name, step.metrics, *outputs(rollout))
