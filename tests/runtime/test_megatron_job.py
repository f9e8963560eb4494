"""A job whose trainer is Megatron-Core: the generator samples from its weights, and it goes on from a checkpoint of the trainer "fsdp"."""

import importlib.util
from pathlib import Path
from typing import Any

import forked  # noqa: F401 # registers how its workers start
import pytest
import torch
from safetensors.torch import load_file
from sharing_loop import graph_of

import rlgraph as rg
from rlgraph.compiler.cluster import Cluster
from rlgraph.engines.hf_models.pretrained import tiny_model
from rlgraph.errors import GraphError
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

installed = pytest.mark.skipif(not importlib.util.find_spec("megatron"), reason="megatron-core is not installed")
MEGATRON = {"trainer": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2}


@installed
def test_a_job_goes_on_with_the_other_trainer_and_its_weights_reach_the_generator_and_the_export(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model", hidden=128)

    def run(steps: int, checkpoints: str, export: str | None = None, **settings: Any) -> list[Any]:
        graph = graph_of(model, **settings)
        plan = rg.compile(graph, Cluster(cpus=2))
        with Job(graph, plan, dispatch_name="forked", deadline_s=120.0, recovery=Recovery(tmp_path / checkpoints, 2, 2)) as job:
            found = [step.metrics for step in job.steps(steps)]
            if export is not None:
                job.export(tmp_path / export, dtype="float32")
        return found

    expected = run(4, "alone", "exported alone")
    there = run(2, "there") + run(4, "there", "exported there", **MEGATRON)
    back = run(2, "back", **MEGATRON) + run(4, "back", "exported back")
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel": 2}, "'fsdp' has no such setting; leave it out, or use trainer='megatron'"),
        ({"expert_parallel": 2}, "'fsdp' has no such setting; leave it out, or use trainer='megatron'"),
        ({"trainer": "megatron", "expert_parallel": 4, "data_parallel": 2}, "2 processes have the same layers, of which 4 share experts"),
        ({"trainer": "megatron", "context_parallel": 2}, "'megatron' has no such setting; leave it out, or use trainer='fsdp'"),
        ({"trainer": "megatron", "recompute": True}, "'megatron' has no such setting"),
        ({"trainer": "megatron", "adapter": rg.LoRA(rank=4)}, "'megatron' has no such setting"),
    ],
)
def test_settings_that_a_trainer_does_not_take_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match=said):
        rg.Policy("m", pool=rg.Pool("train"), **settings)
