"""The arguments and stand-ins of SGLang, without SGLang."""

from pathlib import Path

import pytest
import torch

from rlgraph.engines.sglang import server_arguments, stand_ins

GPU_BYTES = 80 << 30


def test_the_kv_cache_of_a_cpu_holds_all_sequences_or_its_bytes_and_one_at_least() -> None:
    def tokens(sequences: int, kv_cache_bytes: int | None) -> int:
        found: int = server_arguments.on_cpu(1 << 10, 100, sequences, kv_cache_bytes)["max_total_tokens"]
        return found

    assert tokens(4, None) == 4 * 108
    assert tokens(1000, 1 << 20) == 1 << 10
    assert tokens(1000, 1 << 10) >= 100 + server_arguments.MARGIN


def test_versions_that_arrive_and_steps_take_their_part_of_a_gpu() -> None:
    def share(memory: float | None, shared: bool, staged: int) -> float:
        found: float = server_arguments.on_gpu(memory, shared, GPU_BYTES, staged, 64)["mem_fraction_static"]
        return found

    assert share(None, False, 0) == pytest.approx(0.9 - 3 / 80, abs=1e-4)
    assert share(0.5, False, 8 << 30) == pytest.approx(0.5 - 11 / 80, abs=1e-4)
    assert share(None, True, 0) == pytest.approx(0.45 - 3 / 80, abs=1e-4)


def test_only_modules_with_the_models_architecture_are_imported(tmp_path: Path) -> None:
    (tmp_path / "llama.py").write_text("class LlamaForCausalLM(Module): ...\n")
    (tmp_path / "llama_reward.py").write_text("class LlamaForCausalLMScores(Module): ...\n")
    (tmp_path / "qwen2.py").write_text("class Qwen2ForCausalLM(Module): ...\n")
    assert server_arguments.other_models("LlamaForCausalLM", tmp_path) == "llama_reward,qwen2"
    assert server_arguments.other_models("NobodysForCausalLM", tmp_path) == ""


def test_the_stand_in_of_a_kernel_writes_each_requests_places() -> None:
    table, places = torch.zeros(3, 5, dtype=torch.int32), torch.tensor([7, 8, 9])
    stand_ins.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 1]), places, 5)
    assert table.tolist() == [[9, 0, 0, 0, 0], [0] * 5, [0, 7, 8, 0, 0]]
