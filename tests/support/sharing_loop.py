"""A loop whose trainer's ranks share passes: what tests of them launch."""

from pathlib import Path
from typing import Any

import torch
from support.digests import ITEMS, odd_tokens

import rlgraph as rg
from rlgraph.columns import Columns


@rg.node(reads="rollout_log_probs old_log_probs response_mask", writes="kept")
def log_prob_gap(batch: Columns) -> tuple[Columns, dict[str, float]]:
    """Measure how far the log-probs of generator and trainer are apart."""
    ours, theirs, mask = (batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    assert isinstance(ours, torch.Tensor)
    return {"kept": ours[:, 0]}, {"gap": ((ours - theirs) * mask).abs().max().item()}


SAMPLING = rg.Sampling(max_tokens=6, temperature=0.9)


def grpo_graph(model: Path, generator: rg.Generator | None = None, **settings: Any) -> rg.Graph:
    """GRPO on the model by a policy with these settings, and by the `generator` (None: one of the engine "transformers")."""
    if generator is None:
        generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=SAMPLING, dtype="float32")
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3, eps=1e-3), dtype="float32", **settings)
    weights = rg.feedback("weights", depth=0)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    log_probs = policy.log_probs(rollout)
    advantages = rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, log_probs, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("shared", step.metrics, log_prob_gap(rollout, log_probs))
