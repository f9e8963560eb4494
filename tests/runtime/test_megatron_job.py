"""A job whose trainer is Megatron-Core: the generator samples from its weights, and it goes on from a checkpoint of the trainer "fsdp"."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import forked_workers  # noqa: F401 # registers how its workers start
from support.digests import ITEMS, odd_tokens
from support.sharing_loop import grpo_graph, log_prob_gap

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

pytestmark = pytest.mark.stage("plugins")

installed = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
MEGATRON = {"trainer": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}
OF_ROWS = {"trainer": "megatron", "tensor_parallel": 2, "context_parallel": 2}


@installed
def test_a_job_goes_on_with_the_other_trainer_and_its_weights_reach_the_generator_and_the_export(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", hidden=128)

    def run(steps: int, checkpoints: str, export: str | None = None, **settings: Any) -> list[Any]:
        graph = grpo_graph(model, **settings)
        plan = rg.compile(graph, Cluster(cpus=2))
        with Job(graph, plan, dispatch_name="forked", deadline_s=120.0, recovery=Recovery(tmp_path / checkpoints, 2, 2)) as job:
            found = [step.metrics for step in job.steps(steps)]
            if export is not None:
                job.export(tmp_path / export, dtype="float32")
        return found

    expected = run(4, "alone", "exported alone")
    there = run(2, "there") + run(4, "there", "exported there", **MEGATRON)
    back = run(2, "back", **OF_ROWS) + run(4, "back", "exported back")
    before = load_file(tmp_path / "exported alone" / "model.safetensors")
    for found, name in ((there, "exported there"), (back, "exported back")):
        assert len(found) == 4
        assert max(step["gap"] for step in found) < 1e-5, "the generator samples from what the trainer has"
        for one, two in zip(expected, found, strict=True):
            assert two["digest/tokens"] == one["digest/tokens"]
            assert two["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
        after = load_file(tmp_path / name / "model.safetensors")
        assert list(after) == list(before)
        for parameter, tensor in after.items():
            torch.testing.assert_close(tensor, before[parameter], atol=1e-5, rtol=1e-5)


def referred(model: Path, trained: dict[str, Any], reference: dict[str, Any]) -> rg.Graph:
    """GRPO with a KL term, by log-probs of the folder, and old log-probs by a reference that follows the weights."""
    train, weights = rg.Pool("train"), rg.feedback("weights", depth=0)
    sampling = rg.Sampling(max_tokens=6, temperature=0.9)
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    policy = rg.Policy(str(model), pool=train, optimizer=rg.AdamW(lr=1e-3, eps=1e-3), dtype="float32", **trained)
    frozen = rg.Reference(str(model), pool=train, dtype="float32", **reference)
    follower = rg.Reference(str(model), pool=train, dtype="float32", **reference)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4)
    ref, old = frozen.log_probs(rollout), follower.old_log_probs(rollout, weights=weights)
    advantages = rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, old, ref, loss=rg.ClippedLoss(kl_coef=0.1))
    weights.close(step.weights)
    return rg.Graph("referred", step.metrics, log_prob_gap(rollout, old), means(rollout, old, ref))


@rg.node(reads="old_log_probs ref_log_probs response_mask", writes="distance")
def means(batch: Columns) -> tuple[Columns, dict[str, float]]:
    """Measure the mean log-probs of both models."""
    old, ref, mask = (batch[name] for name in ("old_log_probs", "ref_log_probs", "response_mask"))
    assert isinstance(old, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    return {"distance": old[:, 0]}, {"old": float(old[mask].mean()), "ref": float(ref[mask].mean())}  # type: ignore[index]


@installed
def test_references_give_what_those_of_fsdp_do_beside_a_policy_of_another_split_in_their_pool(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", hidden=128, vocab=289)

    def run(trained: dict[str, Any], reference: dict[str, Any]) -> list[Any]:
        graph = referred(model, trained, reference)
        with Job(graph, rg.compile(graph, Cluster(cpus=2)), dispatch_name="forked", deadline_s=120.0) as job:
            return [step.metrics for step in job.steps(3)]

    expected = run({"data_parallel": 1}, {"data_parallel": 1})
    shared = {"trainer": "megatron", "data_parallel": 1}
    found = run(shared | {"tensor_parallel": 2}, shared | {"pipeline_parallel": 2})
    assert max(step["gap"] for step in found) < 1e-5, "what follows has the weights that the generator samples from"
    assert len({step["ref"] - step["old"] for step in found}) == 3, "the policy moves away from the reference"
    for one, two in zip(expected, found, strict=True):
        assert two["digest/tokens"] == one["digest/tokens"]
        for name in ("old", "ref", "actor/grad_norm", "actor/kl_loss"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel": 2}, "'fsdp' has no such setting; leave it out, or use trainer='megatron'"),
        ({"trainer": "megatron", "expert_parallel": 4, "data_parallel": 2}, "2 processes have the same layers, of which 4 share experts"),
        (
            {"trainer": "megatron", "expert_parallel": 3, "data_parallel": 1, "context_parallel": 2},
            r"context_parallel=2, expert_parallel=3\): 2 processes have the same layers, of which 3 share experts",
        ),
        ({"trainer": "megatron", "offload": "moments"}, "'megatron' has no such setting"),
        ({"trainer": "megatron", "compiled": True}, "'megatron' has no such setting"),
        ({"trainer": "megatron", "adapter": rg.LoRA(rank=4)}, "'megatron' has no such setting"),
    ],
)
def test_settings_that_a_trainer_does_not_take_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        rg.Policy("m", pool=rg.Pool("train"), **settings)
