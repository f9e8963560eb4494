"""Runs that train an adapter: only it is published and saved, generators have the bits of the merged model, and exports are both forms."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.paths import PROGRAMS, PYTHONPATH

import rlgraph as rg
from rlgraph.engines.lora import BaseWeights, read_adapter
from rlgraph.errors import ExportError, GraphError
from rlgraph.graph.nodes import Output
from rlgraph.plan.model_shapes import AdapterSize, ModelShape
from rlgraph.plan.plan import Plan
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

LORA = rg.LoRA(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from support.tiny import tiny_llama

    return str(tiny_llama(tmp_path_factory.mktemp("models")))


@rg.node(reads="responses", writes="rewards", by_group=True)
def small_tokens(batch: Any) -> dict[str, torch.Tensor]:
    return {"rewards": -batch["responses"].float().mean(-1) / 100}


def loop(
    model: str, *, depth: int = 1, adapter: rg.LoRA | None = LORA, reference: bool = False, dtype: Any = "float32", **given: Any
) -> rg.Graph:
    generator = rg.Generator(
        given.pop("other", model),
        pool=rg.Pool("rollout", cpus=1),
        engine=given.pop("engine", "transformers"),
        sampling=rg.Sampling(max_tokens=6),
        dtype=dtype,
        max_context=64,
    )
    train = rg.Pool("train", cpus=1)
    policy = rg.Policy(model, pool=train, adapter=adapter, optimizer=rg.AdamW(lr=1e-2), dtype="float32", **given)
    weights = rg.feedback("weights", depth=depth)
    rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}, {"prompt": "2 + 3 ="}], count=2), weights, group_size=2)
    advantages = rg.advantages(rollout, small_tokens(rollout), estimator=rg.GRPO())
    ref = rg.Reference(model, pool=train, dtype="float32").log_probs(rollout) if reference else policy.base_log_probs(rollout)
    step = policy.update(rollout, advantages, ref, loss=rg.ClippedLoss(kl_coef=0.1))
    weights.close(step.weights)
    return rg.Graph("adapters", step.metrics)


def plan(graph: rg.Graph, **given: Any) -> Plan:
    return rg.compile(graph, rg.Cluster(**{"cpus": 2} | given))


def job_of(graph: rg.Graph, folder: Path) -> LocalJob:
    planned = plan(graph)
    return LocalJob(graph, planned, Checkpoints(graph, planned, Recovery(folder, 2, 2)))


def engine(job: LocalJob, worker: str) -> Any:
    return job.progress[worker].worker.context.engine


def learnt(steps: Any) -> list[dict[str, float]]:
    return [{name: value for name, value in step.metrics.items() if name.startswith("actor/")} for step in steps]


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four steps with exports, and the same from a checkpoint after two of them."""
    folder = tmp_path_factory.mktemp("run")
    with job_of(loop(model), folder / "whole") as job:
        found: dict[str, Any] = {"folder": folder, "metrics": learnt(job.steps(4))}
        found["bytes"] = job.progress["policy"].worker.weights.published_bytes()
        found["merged"] = job.export(folder / "merged", dtype="float32")
        found["apart"] = job.export(folder / "apart", dtype="float32", adapter="apart")
        trained = {name: tensor.clone() for name, tensor in engine(job, "policy").weights().items()}
        found["adapter"] = trained
    with job_of(loop(model), folder / "parts") as job:
        found["first"] = learnt(job.steps(2))
    with job_of(loop(model), folder / "parts") as job:
        found["second"] = learnt(job.steps(4))  # of which the checkpoint has two
        found["resumed"] = {name: tensor.clone() for name, tensor in engine(job, "policy").weights().items()}
    return found


def test_a_run_goes_on_from_its_checkpoint_with_the_same_bits(run: dict[str, Any]) -> None:
    assert run["first"] + run["second"] == run["metrics"]
    assert all(torch.equal(run["resumed"][name], tensor) for name, tensor in run["adapter"].items())


def test_checkpoints_and_versions_hold_the_adapter_alone(run: dict[str, Any], model: str) -> None:
    own = sum(tensor.numel() for tensor in run["adapter"].values())
    assert own * 4 <= run["bytes"] < own * 4 + 8192
    saved = sum(file.stat().st_size for file in (run["folder"] / "whole" / "step-00000002" / "policy").glob("*.distcp"))
    assert own * 12 <= saved < own * 12 + 200_000


def test_both_exports_and_those_of_a_checkpoint_are_the_trained_adapter(run: dict[str, Any], model: str, tmp_path: Path) -> None:
    apart = read_adapter(run["folder"] / "apart")
    assert apart.keys() == run["adapter"].keys()
    assert all(torch.equal(apart[name], tensor) for name, tensor in run["adapter"].items())
    expected = BaseWeights(model).with_adapter(run["adapter"], LORA.scale, torch.float32)
    merged = load_file(run["folder"] / "merged" / "model.safetensors")
    assert merged.keys() == set(expected)
    assert all(torch.equal(merged[name], expected[name]) for name in expected)
    assert run["merged"].parameters == sum(tensor.numel() for tensor in merged.values())
    rg.runs.export(run["folder"] / "whole", tmp_path / "apart", "float32", adapter="apart")
    rg.runs.export(run["folder"] / "whole", tmp_path / "merged", "float32")
    for form, file in (("apart", "adapter_model.safetensors"), ("merged", "model.safetensors"), ("apart", "adapter_config.json")):
        assert (tmp_path / form / file).read_bytes() == (run["folder"] / form / file).read_bytes()
    assert json.loads((tmp_path / "apart" / "adapter_config.json").read_text())["base_model_name_or_path"] == model
    assert not [file for file in (tmp_path / "merged").iterdir() if "adapter" in file.name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generator_has_the_bits_of_the_merged_checkpoint(model: str, tmp_path: Path, dtype: Any) -> None:
    from transformers import AutoModelForCausalLM

    with plan(loop(model, depth=0, dtype=dtype)).run_here() as job:
        for number, _ in enumerate(itertools.islice(job.steps(3), 3)):
            engine(job, "generator")
            job.export(tmp_path / str(number), dtype=dtype)
        held = {name: tensor.clone() for name, tensor in engine(job, "generator")._model.named_parameters()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "1", dtype=getattr(torch, dtype))  # what the third step sampled with
    changed = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    assert all(torch.equal(held[name], tensor) for name, tensor in loaded.named_parameters())
    assert any(not torch.equal(held[name], tensor) for name, tensor in changed.named_parameters())


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_vllm_samples_from_the_merged_checkpoint(model: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{PYTHONPATH}"}
    command = [sys.executable, str(PROGRAMS / "adapter_process.py"), model, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["from merged"] < 1e-4
    assert found["from base"] > 1e-2


def test_the_base_is_the_reference_to_the_bit(model: str) -> None:
    with plan(loop(model)).run_here() as job:
        own = learnt(job.steps(3))
    with plan(loop(model, reference=True)).run_here() as job:
        assert learnt(job.steps(3)) == own
    assert own[-1]["actor/kl_loss"] > 0


def test_the_plan_says_what_it_sends(model: str, run: dict[str, Any]) -> None:
    made = plan(loop(model))
    (edge,) = made.loops
    assert edge.adapter is not None
    assert edge.adapter.bytes == 4 * sum(tensor.numel() for tensor in run["adapter"].values())
    assert "carries an adapter of rank 4 of 0.03 MB a version" in str(made)
    assert Plan.from_json(made.to_json()).loops == made.loops
    assert plan(loop(model, adapter=None, reference=True)).loops[0].adapter is None


def test_the_size_of_an_adapter_is_that_of_its_matrices(run: dict[str, Any], model: str) -> None:
    shape = ModelShape.from_config(json.loads((Path(model) / "config.json").read_text()))
    assert shape is not None
    assert AdapterSize.of(shape, 4, "all-linear").parameters == sum(tensor.numel() for tensor in run["adapter"].values())


REFUSED: dict[str, tuple[Any, str]] = {
    "shared matrices": (lambda m: loop(m, tensor_parallel=2), "ranks that share matrices"),
    "muon": (lambda m: rg.Policy(m, pool=rg.Pool("p"), adapter=LORA, optimizer=rg.optim.Muon()), "whole matrices"),
    "load balance": (lambda m: loop(m, load_balance=0.1), "routers of experts are frozen"),
    "another folder": (lambda m: loop(m, other="elsewhere"), "pass the same path"),
    "an engine without tests": (lambda m: loop(m, engine="sglang"), "its engine is not tested with adapters"),
    "no adapter": (lambda m: loop(m, adapter=None), "no adapter to leave out"),
    "a reward model": (lambda m: rg.RewardModel(m, pool=rg.Pool("p"), adapter=LORA), "adapter"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_an_adapter_does_not_work_with_is_refused_where_it_is_declared(model: str, case: str) -> None:
    build, words = REFUSED[case]
    with pytest.raises((GraphError, TypeError), match=words):
        build(model)


def test_a_reference_cannot_follow_an_adapter(model: str) -> None:
    generator = rg.Generator(model, pool=rg.Pool("rollout"))
    policy = rg.Policy(model, pool=rg.Pool("train"), adapter=LORA)
    weights = rg.feedback("weights", depth=1)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=1), weights)
    old: Output = rg.Reference(model, pool=rg.Pool("old")).old_log_probs(rollout, weights=weights)
    step = policy.update(rollout, rg.advantages(rollout, small_tokens(rollout), estimator=rg.RLOO()), old, loss=rg.ClippedLoss())
    weights.close(step.weights)
    with pytest.raises(GraphError, match="only a generator merges one"):
        rg.Graph("followed", step.metrics)


@pytest.mark.parametrize(
    ("lora", "words"), [(rg.LoRA(rank=4, targets=("query",)), "target 'query'"), (rg.LoRA(rank=4, folder="{}"), "rg.LoRA.load")]
)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_starts(run: dict[str, Any], model: str, lora: rg.LoRA, words: str) -> None:
    lora = rg.LoRA(rank=3, folder=str(run["folder"] / "apart")) if lora.folder else lora
    node = next(node for node in loop(model, adapter=lora).nodes if node.name == "update")
    with pytest.raises(GraphError, match=words):
        node.operation.check(node)


def test_a_family_without_tests_is_refused_by_name(tmp_path: Path) -> None:
    from support.families import folder_of

    folder = str(folder_of("gemma2", tmp_path))
    node = next(node for node in loop(folder).nodes if node.name == "update")
    with pytest.raises(GraphError, match="this model is a 'gemma2'"):
        node.operation.check(node)


def test_an_export_apart_needs_an_adapter(model: str, tmp_path: Path) -> None:
    with plan(loop(model, adapter=None, reference=True)).run_here() as job, pytest.raises(ExportError, match="trained no adapter"):
        job.export(tmp_path / "apart", adapter="apart")
