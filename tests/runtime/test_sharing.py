"""A job whose trainer's ranks share matrices or experts: the generator samples from their weights, and an export holds them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import forked_workers
from support.sharing_loop import grpo_graph
from support.tiny import tiny_mixture

from rlgraph.engines.hf.pretrained import tiny_model

pytestmark = pytest.mark.stage("jobs")


@pytest.mark.parametrize("shared", ["tensor_parallel", "expert_parallel"])
def test_weights_of_ranks_that_share_a_model_reach_the_generator_and_the_export(shared: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny_model(folder, hidden=128) if shared == "tensor_parallel" else tiny_mixture(folder)
    with forked_workers.job(grpo_graph(model)) as alone:
        expected = [step.metrics for step in alone.steps(3)]
        alone.export(tmp_path / "alone", dtype="float32")
    with forked_workers.job(grpo_graph(model, **{shared: 2})) as job:
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
