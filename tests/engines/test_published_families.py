"""What a trainer publishes of each family, vLLM samples with and transformers reads: fused experts, nested folders, windows, biases."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.families import folder_of
from support.paths import PROGRAMS, PYTHONPATH
from support.tiny import VLLM_PROMPTS as PROMPTS
from support.trainer_engines import fsdp_engine

from rlgraph.channels.weights.shards import Assembly, WeightShard, unsharded_weights
from rlgraph.engines.forward import self_test
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.engines.hf.export import write_shards
from rlgraph.engines.hf.pretrained import parameter_shapes
from rlgraph.runtime.checkpoint.export import Source, boxes, write_export
from rlgraph.runtime.checkpoint.store import TrainedEntry
from rlgraph.values.optimizers import AdamW

pytestmark = pytest.mark.stage("families")

DENSE = ["mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2"]
EXPERTS = ["qwen3_moe", "mixtral", "olmoe"]
FAMILIES = [*DENSE, *EXPERTS, "gemma3, text part", "qwen2_5_vl, text part", "qwen3_vl, text part"]
NEAR = 2e-4


def batch_of(responses: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, PROMPTS))
    prompts = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[False] * (width - len(prompt)) + [True] * len(prompt) for prompt in PROMPTS])
    tokens = torch.tensor(responses)
    return {"prompts": prompts, "prompt_mask": mask, "responses": tokens, "response_mask": torch.ones_like(tokens).bool()}


def published(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """The whole weights as a generator gets them."""
    shards = list(engine.weight_shards())
    return {name: tensor.clone() for name, tensor in Assembly([shards]).assemble([[shard.tensor for shard in shards]]).items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, FsdpEngine, list[WeightShard]]]]:
    """A trainer of each family, one large step away from its folder."""
    from support.tiny import WeightedLikelihood

    parent, found = tmp_path_factory.mktemp("families"), {}
    with ExitStack() as at_end:
        logging.disable()
        at_end.callback(logging.disable, logging.NOTSET)
        for name in FAMILIES:
            folder, batch = folder_of(name, parent), self_test._batch()
            engine = fsdp_engine(PolicyHead(folder), optimizer=AdamW(lr=3e-2, grad_clip=1e9), dtype=torch.float32)
            at_end.callback(engine.close)
            batch["advantages"] = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(1))
            engine.update(batch, WeightedLikelihood())
            found[name] = folder, engine, list(unsharded_weights(published(engine)))
        logging.disable(logging.NOTSET)
        yield found


@pytest.mark.parametrize("name", FAMILIES)
def test_published_names_and_shapes_are_those_of_the_folder(name: str, trained: dict[str, Any]) -> None:
    folder, _, shards = trained[name]
    assert {shard.name: shard.global_shape for shard in shards} == parameter_shapes(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_an_export_as_the_trainer_scores(name: str, trained: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    folder, engine, shards = trained[name]
    source = Source(TrainedEntry("policy", str(folder), "log_probs", "fsdp"), 1, "")
    write_export(tmp_path / "out", source, "float32", [boxes(shards)], lambda path, layout: write_shards(path, layout, shards))
    auto: Any = AutoModelForImageTextToText if "text part" in name else AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    batch = self_test._batch()
    torch.testing.assert_close(self_test.score_single_rows(model.eval(), batch), engine.scores(batch), atol=NEAR, rtol=0)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_samples_with_what_a_trainer_published(trained: dict[str, Any], tmp_path: Path) -> None:
    pairs: list[str] = []
    for name, (folder, _, shards) in trained.items():
        save_file({shard.name: shard.tensor for shard in shards}, tmp_path / f"{name}.safetensors")
        pairs += [str(folder), str(tmp_path / f"{name}.safetensors")]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, str(PROGRAMS / "vllm_families.py"), str(tmp_path / "found.pt"), *pairs]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt")
    for name, (folder, engine, _) in trained.items():
        with closing(fsdp_engine(PolicyHead(folder), optimizer=AdamW(), dtype=torch.float32)) as of_folder:
            for scorer, responses in zip((of_folder, engine), found[name]["responses"], strict=True):
                expected = scorer.scores(batch_of([response["tokens"] for response in responses]))
                sampled = torch.tensor([response["log_probs"] for response in responses])
                torch.testing.assert_close(sampled, expected, atol=NEAR, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        assert found[name].get("replayed", "") == "", f"{name}: recorded copies do not load what vLLM's own loader does"
