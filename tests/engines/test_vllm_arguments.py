"""What vLLM is started with."""

import pytest

from rlgraph.engines.vllm_arguments import environment, kv_cache_of_many

GIB = 1 << 30


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"NCCL_NVLS_ENABLE": "1"}, None), ({"NCCL_NVLS_ENABLE": "0"}, "0")])
def test_where_nccl_must_not_multicast_neither_does_vllm(given: dict[str, str], expected: str | None) -> None:
    assert environment(True, given).get("VLLM_ALLREDUCE_USE_SYMM_MEM") == expected


def test_engines_of_a_gpu_divide_what_weights_and_a_step_leave_of_its_share() -> None:
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 1, 0.5) == 37 * GIB
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 2, 0.5) == 12 * GIB
