"""The arguments and stand-ins of SGLang, without SGLang."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from rlgraph.engines.sglang import start

GPU_BYTES = 80 << 30
ROOT = Path(__file__).parents[2]


def test_the_kv_cache_of_a_cpu_holds_all_sequences_or_its_bytes_and_one_at_least() -> None:
    def tokens(sequences: int, kv_cache_bytes: int | None) -> int:
        found: int = start.on_cpu(1 << 10, 100, sequences, kv_cache_bytes)["max_total_tokens"]
        return found

    assert tokens(4, None) == 4 * 108
    assert tokens(1000, 1 << 20) == 1 << 10
    assert tokens(1000, 1 << 10) >= 100 + start.MARGIN


def test_a_share_of_a_gpu_is_of_all_its_memory_less_what_steps_and_arriving_versions_need() -> None:
    def for_model_and_cache(memory: float | None, shared: bool, free: float, apart: int) -> float:
        """Of the whole GPU; SGLang's own fraction is of what is free when it starts."""
        found: float = start.on_gpu(memory, shared, GPU_BYTES, int(free * GPU_BYTES), apart, 64)["mem_fraction_static"]
        return found * free

    assert for_model_and_cache(None, False, 1.0, 0) == pytest.approx(0.9, abs=1e-4)
    assert for_model_and_cache(0.5, False, 1.0, 8 << 30) == pytest.approx(0.5 - 8 / 80, abs=1e-4)
    assert for_model_and_cache(0.5, False, 0.6, 8 << 30) == pytest.approx(0.5 - 8 / 80, abs=1e-4)
    assert for_model_and_cache(None, True, 0.75, 0) == pytest.approx(0.45, abs=1e-4)
    assert for_model_and_cache(None, False, 0.5, 0) < 0.5


def test_the_sampler_of_more_sequences_and_longer_vocabularies_needs_more_of_a_gpu() -> None:
    assert start.step_bytes(1, 1) == pytest.approx(3 << 30, abs=100)
    assert start.step_bytes(256, 151_936) > (3 << 30) + 32 * 256 * 151_936


def test_steps_that_read_prompts_are_not_recorded_on_a_gpu_since_their_memory_could_not_be_freed() -> None:
    assert start.on_gpu(None, True, GPU_BYTES, GPU_BYTES, 0, 64)["disable_prefill_cuda_graph"]


def test_only_modules_with_the_models_architecture_are_imported(tmp_path: Path) -> None:
    (tmp_path / "llama.py").write_text("class LlamaForCausalLM(Module): ...\n")
    (tmp_path / "llama_reward.py").write_text("class LlamaForCausalLMScores(Module): ...\n")
    (tmp_path / "qwen2.py").write_text("class Qwen2ForCausalLM(Module): ...\n")
    assert start.other_models("LlamaForCausalLM", tmp_path) == "llama_reward,qwen2"
    assert start.other_models("NobodysForCausalLM", tmp_path) == ""


def test_the_stand_in_of_a_kernel_writes_each_requests_places() -> None:
    table, places = torch.zeros(3, 5, dtype=torch.int32), torch.tensor([7, 8, 9])
    start.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), places, 5)
    assert table.tolist() == [[9, 0, 0, 0, 0], [0] * 5, [0, 7, 8, 0, 0]]


def test_on_a_gpu_flashinfer_and_vllm_are_not_looked_for_where_flashinfer_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "modules", {name: module for name, module in sys.modules.items() if name != "vllm"})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("SGLANG_IS_FLASHINFER_AVAILABLE", "true")
    start.install()
    assert os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] == "false"
    assert sys.modules["vllm"] is None  # type: ignore[comparison-overlap]
    with pytest.raises(NotImplementedError, match=r"SGLang calls flashinfer\.sampling\.min_p_sampling_from_probs, which"):
        sys.modules["flashinfer.sampling"].min_p_sampling_from_probs()


@pytest.mark.parametrize(("machine", "extra"), [("cpu", "sglang"), ("gpu", "sglang"), ("cpu", "megatron")])
def test_a_lock_holds_the_version_that_the_package_names(machine: str, extra: str) -> None:
    named = re.search(rf'^{extra} = \["([\w-]+==[\d.]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert named is not None
    assert named[1] in (ROOT / "requirements" / f"sglang-{machine}.lock").read_text().splitlines()
