"""Graphs of several loops whose policies train adapters of one folder in one pool."""

from collections.abc import Sequence
from typing import Any

import torch

import rlgraph as rg

NAMES = ("left", "right")
LORAS = {"left": rg.LoRA(rank=4, alpha=8.0), "right": rg.LoRA(rank=2, targets=("q_proj", "down_proj"), seed=5)}
QUESTIONS = {"left": ["1 + 1 =", "2 + 3 ="], "right": ["4 + 4 =", "2 + 7 ="]}


@rg.node(reads="responses", writes="rewards", by_group=True)
def small_tokens(batch: Any) -> dict[str, torch.Tensor]:
    return {"rewards": -batch["responses"].float().mean(-1) / 100}


def loops(model: str, names: Sequence[str] = NAMES, *, depth: int = 1, rollouts: str = "apart", critic: bool = False) -> rg.Graph:
    """A loop for each name, whose policies have one pool; `critic` has adapters of that folder too.

    Generators have pools "apart", share the policies' pool ("turns"), or are "one" for all loops.
    """
    train, metrics = rg.Pool("train", cpus=1), []
    given: dict[str, Any] = {"pool": train, "optimizer": rg.AdamW(lr=1e-2), "dtype": "float32"}
    settings: dict[str, Any] = {"engine": "transformers", "sampling": rg.Sampling(max_tokens=6), "dtype": "float32", "max_context": 64}
    shared = rg.Generator(model, pool=rg.Pool("rollout", cpus=1), **settings) if rollouts == "one" else None
    for name in names:
        own = train if rollouts == "turns" else rg.Pool(f"{name} rollout", cpus=1)
        generator = shared or rg.Generator(model, pool=own, **settings)
        policy = rg.Policy(model, adapter=LORAS[name], **given)
        weights = rg.feedback(f"{name} weights", depth=depth)
        prompts = rg.prompts([{"prompt": text} for text in QUESTIONS[name]], count=2, name=f"{name} prompts")
        rollout = generator.rollout(prompts, weights, group_size=2, name=f"{name} rollout")
        rewards = small_tokens(rollout, name=f"{name} rewards")
        ref = policy.base_log_probs(rollout, name=f"{name} base")
        if critic:
            judge = rg.Critic(model, adapter=LORAS[name], **given)
            values = judge.values(rollout, name=f"{name} values")
            advantages = rg.advantages(rollout, rewards, values, estimator=rg.GAE(), name=f"{name} advantages")
            metrics.append(judge.update(rollout, values, advantages, loss=rg.losses.ValueLoss(), name=f"{name} critic").metrics)
        else:
            advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO(), name=f"{name} advantages")
        step = policy.update(rollout, advantages, ref, loss=rg.ClippedLoss(kl_coef=0.1), name=f"{name} update")
        weights.close(step.weights)
        metrics.append(step.metrics)
    return rg.Graph("together", *metrics)
