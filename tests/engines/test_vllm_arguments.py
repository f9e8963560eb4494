"""What vLLM is started with."""

import itertools

import pytest

from rlgraph.engines.vllm.engine_arguments import arguments, environment, kv_cache_of_many, mixed_sizes

GIB = 1 << 30


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"NCCL_NVLS_ENABLE": "1"}, None), ({"NCCL_NVLS_ENABLE": "0"}, "0")])
def test_where_nccl_must_not_multicast_neither_does_vllm(given: dict[str, str], expected: str | None) -> None:
    assert environment(True, given).get("VLLM_ALLREDUCE_USE_SYMM_MEM") == expected


def test_engines_of_a_gpu_divide_what_weights_and_a_step_leave_of_its_share() -> None:
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 1, 0.5) == 37 * GIB
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 2, 0.5) == 12 * GIB


@pytest.mark.parametrize("most", [1, 16, 300, 1024])
def test_recorded_steps_have_room_for_prompts_beside_all_sequences_and_vllm_knows_the_largest(most: int) -> None:
    sizes = mixed_sizes(most)
    assert sizes[0] == 8
    assert most + 512 <= sizes[-1] <= 1.25 * (most + 512)
    assert all(a < b <= max(a + 8, 1.25 * a) for a, b in itertools.pairwise(sizes))
    found = arguments(on_cpu=False, context=64, max_sequences=most, kv_cache_bytes=None, share=0.9, shared=False)
    assert max(found["compilation_config"]["cudagraph_capture_sizes"]) == sizes[-1]
    assert found["max_num_batched_tokens"] >= sizes[-1]
