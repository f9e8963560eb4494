"""Adapters over a base of 4 bits, or that begin in a folder: generators sample from what the trainer trains, from the first step on."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import LENGTHS, WeightedLikelihood, batch_of, tiny_qwen
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.errors import GraphError
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

installed = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")
NF4 = rg.LoRA(rank=4, alpha=8.0, base="nf4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen(tmp_path_factory.mktemp("models"), "qwen3", vocab=320, head=16)


@pytest.fixture(scope="module")
def rounded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with the numbers that its matrices have in 4 bits."""
    import shutil

    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    folder = tmp_path_factory.mktemp("models") / "rounded"
    shutil.copytree(model, folder)
    weights = {name: tensor.float() for name, tensor in load_file(model / "model.safetensors").items()}  # the folder's are in bfloat16
    for name, tensor in weights.items():
        if "_proj" in name:
            weights[name] = dequantize_4bit(*quantize_4bit(tensor, blocksize=64, quant_type="nf4"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def graph_of(model: Path, adapter: rg.LoRA, depth: int = 1) -> rg.Graph:
    given: dict[str, Any] = {"engine": "transformers", "dtype": "float32", "max_context": 64, "sampling": rg.Sampling(max_tokens=6)}
    generator = rg.Generator(str(model), pool=rg.Pool("rollout", cpus=1), **given)
    adam = rg.AdamW(lr=1e-2)
    policy = rg.Policy(str(model), pool=rg.Pool("train", cpus=1), adapter=adapter, optimizer=adam, dtype="float32", self_test=False)
    weights = rg.feedback("weights", depth=depth)
    rollout = generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}, {"prompt": "2 + 3 ="}], count=2), weights, group_size=2)
    advantages, base = rg.advantages(rollout, small_tokens(rollout), estimator=rg.GRPO()), policy.base_log_probs(rollout)
    step = policy.update(rollout, advantages, base, loss=rg.ClippedLoss(kl_coef=0.1))
    weights.close(step.weights)
    return rg.Graph("four_bits", step.metrics)


@rg.node(reads="responses", writes="rewards", by_group=True)
def small_tokens(batch: Any) -> dict[str, torch.Tensor]:
    return {"rewards": -batch["responses"].float().mean(-1) / 100}


def ran(graph: rg.Graph, folder: Path, steps: int = 3) -> tuple[list[dict[str, float]], LocalJob]:
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    with LocalJob(graph, plan, Checkpoints(graph, plan, Recovery(folder, 2, 2))) as job:
        learnt = [{name: value for name, value in step.metrics.items() if name.startswith("actor/")} for step in job.steps(steps)]
        job.export(folder / f"merged {steps}", dtype="float32")
        job.export(folder / f"apart {steps}", dtype="float32", adapter="apart")
    return learnt, job


@installed
def test_a_run_over_4_bits_has_the_bits_of_one_over_the_rounded_model(model: Path, rounded: Path, tmp_path: Path) -> None:
    """Trainer, base log-probs, the generator from its first sample on, checkpoints and the merged export."""
    own, _ = ran(graph_of(model, NF4), tmp_path / "own")
    other, _ = ran(graph_of(rounded, rg.LoRA(rank=4, alpha=8.0)), tmp_path / "other")
    plain, _ = ran(graph_of(model, rg.LoRA(rank=4, alpha=8.0)), tmp_path / "plain")
    assert own == other != plain
    mine, theirs = (load_file(tmp_path / name / "merged 3" / "model.safetensors") for name in ("own", "other"))
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    first, _ = ran(graph_of(model, NF4), tmp_path / "parts", 2)
    again, _ = ran(graph_of(model, NF4), tmp_path / "parts", 3)
    assert first + again == own


@installed
def test_log_probs_are_those_of_the_librarys_own_modules(model: Path) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit
    from transformers import AutoModelForCausalLM

    engine = fsdp_engine(PolicyHead(model), optimizer=rg.AdamW(), dtype=torch.float32, adapter=NF4, flat=False)
    batch = batch_of([5], group=1)
    found = engine.scores(batch)[0]
    engine.close()
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()  # else its CPU kernel for inference packs them
    for name, module in [(n, m) for n, m in theirs.named_modules() if isinstance(m, torch.nn.Linear) and "_proj" in n]:
        four = Linear4bit(module.in_features, module.out_features, bias=False, quant_type="nf4", compress_statistics=False)
        four.weight = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=four)
        parent, _, own = name.rpartition(".")
        setattr(theirs.get_submodule(parent), own, four.to("cpu"))
    tokens = torch.cat([batch["prompts"][0][batch["prompt_mask"][0]], batch["responses"][0]])
    logits = theirs(input_ids=tokens[None]).logits[0, -6:-1]
    expected = logits.log_softmax(-1).gather(-1, batch["responses"][0][:, None])[:, 0]
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=0)


@installed
def test_the_matrices_are_not_kept(model: Path) -> None:
    engine = fsdp_engine(PolicyHead(model), optimizer=rg.AdamW(), dtype=torch.float32, adapter=NF4)
    engine.update(batch_of(LENGTHS), WeightedLikelihood())
    kept = [name for name, _ in engine._head.named_parameters() if "_proj.weight" in name]
    engine.close()
    assert not kept
    with pytest.raises(GraphError, match=r"world=2\): a base in 'nf4' is whole on one rank"):
        fsdp_engine(PolicyHead(model), optimizer=rg.AdamW(), world=2, adapter=NF4)


def test_a_generator_begins_with_the_adapter_of_a_folder(model: Path, tmp_path: Path) -> None:
    """A run that begins with a run's adapter samples with it in its first step."""
    ran(graph_of(model, rg.LoRA(rank=4, alpha=8.0), depth=0), tmp_path)
    lora = rg.LoRA.load(tmp_path / "apart 3")
    graph = graph_of(model, lora, depth=0)
    with rg.compile(graph, rg.Cluster(cpus=2)).run_here() as job:
        next(job.steps(1))
        held = dict(job.progress["generator"].worker.context.engine._model.named_parameters())
        merged = load_file(tmp_path / "merged 3" / "model.safetensors")
        assert all(torch.equal(held[name], tensor) for name, tensor in merged.items() if name in held)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel": 2}, "data_parallel=2.*whole on one rank"),
    ({"context_parallel": 2}, "context_parallel=2.*whole on one rank"),
    ({"compiled": True}, "compiled=True.*leave out compiled"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=str)
def test_what_a_base_of_4_bits_does_not_work_with_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        rg.Policy("tiny", pool=rg.Pool("train"), adapter=NF4, **given)


def test_the_plan_counts_its_bytes(model: Path) -> None:
    def weights(adapter: rg.LoRA) -> int:
        plan = rg.compile(on_gpus(model, adapter), rg.Cluster(gpus=2, gpu="H100"))
        return next(dict(each.parts)["weights"] for each in plan.memory if each.pool == "train" and not each.loading)

    matrices = sum(tensor.numel() for name, tensor in load_file(model / "model.safetensors").items() if "_proj" in name)
    assert weights(rg.LoRA(rank=4)) - weights(rg.LoRA(rank=4, base="nf4")) == pytest.approx((2 - 0.5 - 4 / 64) * matrices, abs=2)


def on_gpus(model: Path, adapter: rg.LoRA) -> rg.Graph:
    generator = rg.Generator(str(model), pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=8))
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=2), group_size=2)
    policy = rg.Policy(str(model), pool=rg.Pool("train", gpus=1), adapter=adapter)
    rewards = rg.reward(lambda responses: [float(len(text)) for text in responses], rollout)
    step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    return rg.Graph("memory", step.metrics)
