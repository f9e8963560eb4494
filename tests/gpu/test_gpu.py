"""What holds on GPUs: the same log-probs and steps as on a CPU, weights that arrive bit for bit, jobs that learn, peers that die."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.stage("gpu")

Alone = Callable[..., str]


@pytest.mark.gpu
def test_training_on_a_gpu_gives_the_log_probs_and_the_step_of_a_cpu(alone: Alone) -> None:
    assert "equal" in alone("train_here.py")


@pytest.mark.gpu
def test_kernels_score_tokens_as_the_plain_computation_does(alone: Alone) -> None:
    assert alone("scores_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_bfloat16_passes_packed_flat_are_those_of_float32(alone: Alone, family: str) -> None:
    assert alone("attention_here.py", family).splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compiled_layers_take_the_step_of_eager_ones(alone: Alone, family: str) -> None:
    found = alone("attention_here.py", family, "--compiled").splitlines()
    assert found[-2].startswith("compiled against eager")
    assert found[-1] == "equal"


@pytest.mark.gpu
def test_attention_is_the_same_by_the_kernels_of_either_package(alone: Alone) -> None:
    if (found := alone("flash4_here.py").splitlines()[-1]) == "not installed":
        pytest.skip("flash-attn-4 is not installed")
    assert found == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_oss", "deepseek_v3"])
def test_passes_that_share_prompts_are_those_of_float32_and_of_own_prompts(alone: Alone, family: str) -> None:
    assert alone("shared_prompts_here.py", family).splitlines()[-1] == "equal"


@pytest.mark.gpu
def test_bfloat16_passes_with_images_seen_in_both_directions_are_those_of_float32(alone: Alone) -> None:
    assert alone("image_blocks_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["internvl", "qwen2_5_vl", "qwen3_vl"])
def test_vllm_samples_prompts_with_images_as_the_trainer_scores_them(alone: Alone, family: str) -> None:
    assert alone("images_here.py", family).splitlines()[-1] == "equal"


@pytest.mark.gpu
def test_compiled_layers_share_prompts(alone: Alone) -> None:
    found = alone("shared_prompts_here.py", "llama", "--compiled").splitlines()
    assert found[-2].startswith("compiled")
    assert found[-1] == "equal"


@pytest.mark.gpu
def test_a_profile_on_a_gpu_has_its_kernels_and_the_history_of_its_memory(alone: Alone) -> None:
    assert "profiled" in alone("profile_here.py")


@pytest.mark.gpu
def test_any_cut_of_any_parameters_is_copied_from_peer_to_peer_bit_for_bit(alone: Alone) -> None:
    assert alone("cut_here.py") == "equal 16\n"


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("head", ["64", "128"])
def test_an_engine_repeats_itself_reads_prompts_right_and_takes_weights_as_its_loader_would(alone: Alone, head: str) -> None:
    assert "equal" in alone("generate_here.py", head)


@pytest.mark.gpu
@pytest.mark.skipif(not find_spec("sglang"), reason="SGLang is not installed")
@pytest.mark.parametrize("how", [("no",), ("yes",), ("yes", "shared")], ids=" ".join)
def test_sglang_repeats_itself_reads_prompts_right_takes_weights_as_its_loader_would_and_sleeps(alone: Alone, how: tuple[str, ...]) -> None:
    assert alone("sglang_here.py", *how).splitlines()[-1].startswith("equal")


@pytest.mark.gpu
@pytest.mark.vllm
def test_more_sequences_than_tokens_of_the_context_start_and_repeat(alone: Alone) -> None:
    assert alone("short_context_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.vllm
def test_versions_of_fp8_weights_have_the_bits_of_the_loader(alone: Alone) -> None:
    assert alone("fp8_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_jobs_with_a_kept_engine_are_those_of_a_new_one(alone: Alone, weights: str) -> None:
    assert alone("kept_here.py", weights).splitlines()[-1] == "equal"


@pytest.mark.multi_gpu
@pytest.mark.vllm
def test_jobs_with_a_kept_engine_on_a_gpu_of_its_own_are_those_of_a_new_one(alone: Alone) -> None:
    assert alone("kept_here.py", "apart").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.vllm
def test_an_engine_that_guesses_samples_what_one_without_guesses_does(alone: Alone) -> None:
    assert alone("drafts_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.vllm
def test_a_teacher_on_vllm_scores_as_the_models_own_forward_and_again_after_it_has_slept(alone: Alone) -> None:
    assert alone("teacher_here.py").splitlines()[-1] == "equal"


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.vllm
def test_generator_and_policy_share_one_gpu_in_turns(alone: Alone) -> None:
    assert alone("job_here.py", "colocated").splitlines()[-1] == "staleness [0, 0, 0]"


@pytest.mark.gpu
@pytest.mark.ray
@pytest.mark.vllm
def test_batches_and_losses_of_a_job_in_turns_are_those_of_one_process_on_a_cpu(alone: Alone) -> None:
    assert alone("oracle_here.py", "colocated").splitlines()[-1] == "equal"


@pytest.mark.multi_gpu
@pytest.mark.ray
@pytest.mark.vllm
def test_batches_and_losses_of_a_job_one_step_off_are_those_of_one_process_on_a_cpu(alone: Alone) -> None:
    assert alone("oracle_here.py", "one_step_off").splitlines()[-1] == "equal"


@pytest.mark.multi_gpu
@pytest.mark.ray
@pytest.mark.vllm
@pytest.mark.parametrize("buffers", ["one_step_off", "second_buffer"])
def test_one_step_off_runs_on_two_gpus_one_version_behind(alone: Alone, buffers: str) -> None:
    assert alone("job_here.py", buffers).splitlines()[-1] == "staleness [0, 1, 1]"


@pytest.mark.multi_gpu
@pytest.mark.ray
@pytest.mark.vllm
def test_an_engine_over_two_gpus_and_two_ranks_of_a_policy_share_them_in_turns(alone: Alone) -> None:
    assert alone("job_here.py", "colocated_tensor_parallel").splitlines()[-1] == "staleness [0, 0, 0]"


@pytest.mark.multi_gpu
@pytest.mark.vllm
@pytest.mark.parametrize("model", ["llama", "qwen3", "experts", "experts_apart"])
def test_each_rank_of_an_engine_over_two_gpus_takes_weights_as_its_loader_would(alone: Alone, model: str) -> None:
    assert alone("tensor_parallel_here.py", model).splitlines()[-1] == "equal"


@pytest.mark.multi_gpu
@pytest.mark.vllm
def test_the_ranks_of_an_engine_end_with_its_process(alone: Alone) -> None:
    assert alone("tensor_parallel_here.py", "kill").splitlines()[-1] == "gone 2"


@pytest.mark.multi_gpu
@pytest.mark.namespaces
def test_hosts_that_share_nothing_but_a_network_compute_the_bits_of_one_host(alone: Alone) -> None:
    assert alone("hosts_here.py").splitlines()[-1] == "equal"


@pytest.mark.multi_gpu
def test_weights_on_one_gpu_are_received_bit_for_bit_by_a_process_that_sees_another_alone(alone: Alone) -> None:
    assert alone("peer_here.py") == "equal\n"


@pytest.mark.multi_gpu
def test_a_trainer_that_is_killed_while_it_publishes_breaks_the_channel_at_once(alone: Alone) -> None:
    assert "ChannelBroken at version 5 channel 'weights', a reader, step 5: the writer" in alone("peer_here.py", "kill")


@pytest.mark.multi_gpu
def test_nccl_carries_messages_and_weights_bit_for_bit(alone: Alone) -> None:
    assert "equal" in alone("nccl_here.py")


@pytest.mark.multi_gpu
def test_a_writer_that_is_killed_while_nccl_carries_breaks_the_channel_at_once(alone: Alone) -> None:
    assert "ChannelBroken channel 'batches', a reader, step 5: the writer" in alone("nccl_here.py", "kill")


@pytest.mark.multi_gpu
def test_two_ranks_that_share_passes_train_as_one_does(alone: Alone) -> None:
    assert "equal" in alone("sharing_here.py")


@pytest.mark.multi_gpu
def test_two_ranks_that_share_compiled_layers_train_as_one_does(alone: Alone) -> None:
    assert "equal" in alone("sharing_here.py", "--compiled")


@pytest.mark.multi_gpu
@pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")
def test_two_ranks_of_megatron_core_train_as_one_of_fsdp_does(alone: Alone) -> None:
    assert "equal" in alone("sharing_here.py", "--megatron")
