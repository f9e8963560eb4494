"""What vLLM is started with."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rlgraph.engines.api import Request
from rlgraph.engines.vllm.arguments import arguments, environment, kv_cache_of_many, mixed_sequences, mixed_sizes
from rlgraph.engines.vllm.engine import CoreRequests, StopTokens
from rlgraph.values.sampling import Sampling

GIB = 1 << 30


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"NCCL_NVLS_ENABLE": "1"}, None), ({"NCCL_NVLS_ENABLE": "0"}, "0")])
def test_where_nccl_must_not_multicast_neither_does_vllm(given: dict[str, str], expected: str | None) -> None:
    assert environment(True, given).get("VLLM_ALLREDUCE_USE_SYMM_MEM") == expected


def test_engines_of_a_gpu_divide_what_weights_and_a_step_leave_of_its_share() -> None:
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 1, 0.5) == 37 * GIB
    assert kv_cache_of_many(100 * GIB, 10 * GIB, 2, 0.5) == 12 * GIB


@pytest.mark.parametrize("most", [1, 16, 300, 1024])
def test_recorded_steps_have_room_for_prompts_beside_all_sequences_and_vllm_knows_the_largest(most: int) -> None:
    sizes = mixed_sizes(most, 4096)
    assert sizes[0] == 8
    assert most + 512 <= sizes[-1] <= 1.25 * (most + 512)
    assert all(a < b <= max(a + 8, 1.25 * a) for a, b in itertools.pairwise(sizes))
    found = arguments(on_cpu=False, context=4096, max_sequences=most, kv_cache_bytes=None, share=0.9, shared=False)
    assert max(found["compilation_config"]["cudagraph_capture_sizes"]) == sizes[-1]
    assert found["max_num_batched_tokens"] >= sizes[-1]


@pytest.mark.parametrize(("context", "most", "left_out"), [(320, 512, [896]), (512, 512, []), (320, 384, []), (69, 128, [224])])
def test_a_step_is_not_recorded_whose_last_sequence_would_be_longer_than_the_context(context: int, most: int, left_out: list[int]) -> None:
    """On an H200 the first of these read behind its memory, and the second and third did not."""
    sizes = mixed_sizes(most, context)
    assert sorted({*mixed_sizes(most, 4096)} - {*sizes}) == left_out
    for size in sizes:
        lengths = [size // mixed_sequences(size, most)] * mixed_sequences(size, most)
        lengths[-1] += size - sum(lengths)  # as InputBatch.make_dummy of vLLM 0.26 shares them out
        assert max(lengths) <= context


def test_an_engine_of_one_short_sequence_is_started() -> None:
    found = arguments(on_cpu=False, context=4, max_sequences=1, kv_cache_bytes=None, share=0.9, shared=False)
    assert found["compilation_config"]["cudagraph_capture_sizes"] == [1]


@pytest.mark.stage("jobs")
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_an_engine_sleeps_beside_programs_that_take_memory_of_its_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from rlgraph.engines.vllm.gpu_worker import GpuWorker

    def fails(words: str) -> None:
        def sleep(self: object, level: int = 1) -> None:
            raise AssertionError(words)

        monkeypatch.setattr(Worker, "sleep", sleep)

    fails("Memory usage increased after sleeping.")
    GpuWorker.sleep(object.__new__(GpuWorker))
    assert "another program took more meanwhile" in caplog.text
    fails("another one")
    with pytest.raises(AssertionError, match="another one"):
        GpuWorker.sleep(object.__new__(GpuWorker))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_stop_tokens_stay_fast_to_look_up_where_the_folder_of_a_model_names_ends() -> None:
    """vLLM then puts both into a list of its own, and looked each new token up in it."""

    class Processor:
        def process_inputs(self, name: str, prompt: object, params: Any, supported_tasks: object) -> Any:
            params.update_from_generation_config({"eos_token_id": [2, 7]}, None)
            assert type(params.stop_token_ids) is list
            return SimpleNamespace(sampling_params=params)

    llm = SimpleNamespace(input_processor=Processor(), get_supported_tasks=lambda: ())
    requests = CoreRequests(llm, ends=(2,))
    for number in range(2):
        made = requests.make(Request(str(number), [1], Sampling(stop_token_ids=(5, 9)), seed=number), salt="0")
        assert isinstance(made.sampling_params.stop_token_ids, StopTokens)
        assert {*made.sampling_params.stop_token_ids} == {2, 5, 7, 9}
