"""Jobs whose generator is SGLang: after each publish SGLang has the bits that the trainer exports, and both trainers give the same run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import forked_workers  # noqa: F401 # registers how its workers start
from support.sharing_loop import SAMPLING, grpo_graph
from support.tiny import tiny_qwen

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.driver.job import Job

pytestmark = pytest.mark.stage("sglang")
STEPS = 4  # three of which begin with weights that arrived
TP = {"tensor_parallel": 2}
CASES = {  # the model, and what the processes of its policy share
    "tp2 × pp2": ("llama", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2": ("qwen2", TP),
}
MERGED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True, eq=False)
class KeepingGenerator(rg.Generator):
    """Keeps what SGLang's model holds after each load of weights, as the files 0, 1, … of the folder `kept`."""

    kept: str = ""

    def load(self, context: Any) -> Any:
        engine = super().load(context)
        replace, numbers = engine.replace_weights, count()

        def replace_and_keep(*given: Any) -> None:
            replace(*given)
            model = engine._scheduler.tp_worker.model_runner.model
            tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            save_file(tensors, f"{self.kept}/{next(numbers)}.safetensors")

        engine.replace_weights = replace_and_keep
        return engine


@dataclass(frozen=True)
class Found:
    """What a job reported step by step, what the engine held after each load, and what the trainer exported after each step."""

    metrics: list[dict[str, float]]
    held: list[dict[str, torch.Tensor]]
    exported: list[dict[str, torch.Tensor]]


def run(model: Path, folder: Path, dtype: Any = "float32", **settings: Any) -> Found:
    folder.mkdir()
    pool, kept = rg.Pool("rollout"), str(folder)
    generator = KeepingGenerator(str(model), pool=pool, engine="sglang", sampling=SAMPLING, dtype=dtype, max_context=64, kept=kept)
    graph, metrics = grpo_graph(model, generator, **settings), []
    with Job(graph, rg.compile(graph, Cluster(cpus=2)), dispatch_name="forked", deadline_s=120.0) as job:
        for number in range(STEPS):  # one at a time: an export waits for all steps that are at work
            metrics += [step.metrics for step in job.steps(1)]
            job.export(folder / f"after {number}", dtype=dtype)
    held = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return Found(metrics, held, [load_file(folder / f"after {number}" / "model.safetensors") for number in range(STEPS)])


def as_sglang(exported: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put a folder's tensors together as SGLang keeps them: queries, keys and values in one tensor, gates and ups of an MLP in another."""
    parts: dict[str, list[torch.Tensor]] = {}
    for one in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ""):
        for name, tensor in exported.items():
            part = next((part for part in MERGED if f".{part}." in name), "")
            if part == one:
                parts.setdefault(name.replace(part, MERGED[part]) if part else name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A vocabulary that two ranks do not divide, whose embedding is the head too; biases; and a head of its own."""
    parent = tmp_path_factory.mktemp("models")
    llama, untied = (tiny_model(parent / f"tied {tied}", hidden=128, vocab=289, tied=tied) for tied in (True, False))
    return {"llama": llama, "untied": untied, "qwen2": tiny_qwen(parent, "qwen2")}


@pytest.fixture(scope="module")
def by_fsdp(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """What the same job finds with the trainer "fsdp" in one process: run once for each model."""
    return cache(lambda name: run(models[name], tmp_path_factory.mktemp("fsdp") / name))


def assert_held(found: Found) -> None:
    """Compare to the bit: the first version is loaded by SGLang's own loader, the others by the copies that it made."""
    assert len(found.held) == STEPS - 1, "each step but the first begins with a load"
    for held, exported in zip(found.held, found.exported, strict=False):
        expected = as_sglang(exported)
        assert sorted(held) == sorted(expected)
        for name, tensor in expected.items():
            rows = held[name][: len(tensor)]
            assert torch.equal(rows, tensor), f"{name}: {(rows != tensor).sum()} of {tensor.numel()} numbers differ"
            assert not held[name][len(tensor) :].any(), f"{name}: words that there are not"
    for before, after in pairwise(found.held):
        assert not any(torch.equal(before[name], after[name]) for name in before if after[name].dim() > 1), "training changes every matrix"


@pytest.mark.parametrize("case", CASES)
def test_sglang_has_what_megatron_exports_after_each_publish_and_the_job_learns_as_with_fsdp(
    case: str, models: dict[str, Path], by_fsdp: Callable[[str], Found], tmp_path: Path
) -> None:
    name, shared = CASES[case]
    expected = by_fsdp(name)
    found = run(models[name], tmp_path / "run", trainer="megatron", **shared)
    assert_held(expected)
    assert_held(found)
    assert max(step["gap"] for step in found.metrics) < 1e-5, "SGLang samples from what the trainer has"
    for one, two in zip(expected.metrics, found.metrics, strict=True):
        assert two["digest/tokens"] == one["digest/tokens"]
        for metric in ("actor/grad_norm", "actor/pg_loss", "odd"):
            assert two[metric] == pytest.approx(one[metric], rel=1e-4, abs=1e-6), metric
    for before, after in zip(expected.exported, found.exported, strict=True):
        assert list(after) == list(before)
        for parameter, tensor in after.items():
            torch.testing.assert_close(tensor, before[parameter], atol=1e-5, rtol=1e-5)


def test_sglang_in_bfloat16_has_megatrons_float32_weights_cast_as_the_export_casts_them(models: dict[str, Path], tmp_path: Path) -> None:
    found = run(models["untied"], tmp_path / "run", dtype="bfloat16", trainer="megatron", **TP)
    assert {tensor.dtype for tensor in found.held[0].values()} == {torch.bfloat16}
    assert_held(found)
