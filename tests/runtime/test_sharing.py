"""A job whose trainer's ranks share matrices: the generator samples from their weights, and an export holds them."""

from pathlib import Path

import forked
import pytest
import torch
from digests import ITEMS, odd_tokens
from safetensors.torch import load_file

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.engines.hf_models.pretrained import tiny_model


@rg.node(reads="rollout_log_probs old_log_probs response_mask", writes="kept")
def gap(batch: Columns) -> tuple[Columns, dict[str, float]]:
    """Measure how far the log-probs of generator and trainer are apart."""
    ours, theirs, mask = (batch[name] for name in ("old_log_probs", "rollout_log_probs", "response_mask"))
    assert isinstance(ours, torch.Tensor)
    return {"kept": ours[:, 0]}, {"gap": ((ours - theirs) * mask).abs().max().item()}


def graph_of(model: Path, **ranks: int) -> rg.Graph:
    sampling = rg.Sampling(max_tokens=6, temperature=0.9)
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3, eps=1e-3), dtype="float32", **ranks)
    weights = rg.feedback("weights", depth=0)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    log_probs = policy.log_probs(rollout)
    advantages = rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, log_probs, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("shared", step.metrics, gap(rollout, log_probs))


def test_weights_of_ranks_that_share_matrices_reach_the_generator_and_the_export(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", hidden=128)
    with forked.job(graph_of(model)) as alone:
        expected = [step.metrics for step in alone.steps(3)]
        alone.export(tmp_path / "alone", dtype="float32")
    with forked.job(graph_of(model, tensor_parallel=2)) as job:
        found = [step.metrics for step in job.steps(3)]
        job.export(tmp_path / "shared", dtype="float32")
    assert max(step["gap"] for step in found) < 1e-5, "the generator samples from what the trainer has"
    for one, two in zip(expected, found, strict=True):
        assert two["digest/tokens"] == one["digest/tokens"]
        assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("alone", "shared"))
    assert list(after) == list(before)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, before[name], atol=5e-6, rtol=5e-6)
