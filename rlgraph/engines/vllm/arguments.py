"""The arguments of vLLM's engine: those that rlgraph sets, and those that a user hands on with `engine_args={…}`."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlgraph.conversions import Wrong
from rlgraph.engines.registry import exactness
from rlgraph.errors import GraphError, choices, show_value
from rlgraph.settings import setting_type

# The arguments of vLLM: on a CPU a small eager engine, on a GPU one with recorded decode steps and most of the memory.

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # else FlashInfer is imported, which is not needed for dense models
}
GPU_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # CUDA does not live through a fork
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # noise is a function of seed and position, drawn for all requests in one kernel
}
PARALLEL = {
    "distributed_executor_backend": "mp",  # one process a GPU, all of them this one's; where Ray runs, vLLM would take Ray's
}
ROUTES = {  # on a GPU
    "worker_cls": "rlgraph.engines.vllm.gpu_worker.RoutesWorker",
}
KV_CACHE_BYTES = 1 << 30  # on a CPU
STEP_BYTES = 3 << 30  # on a GPU: recorded decode steps, activations, libraries
HOST_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU, the sizes of heads
MEMORY_ALONE, MEMORY_SHARED = 0.9, 0.45  # of a GPU: weights, keys and values, and what a step needs


def of_worker(*, exact: bool, routes: bool) -> Mapping[str, Any]:
    """The arguments of `vllm.EngineArgs` for a worker of a GPU that computes exactly, or whose routers write down what they choose."""
    return exactness().engine_arguments if exact else ROUTES if routes else {}


def most_sequences(on_cpu: bool, needed: int = 0) -> int:
    """The number of responses decoded at once: at most `needed` (0: not known), since every size of a decode step is recorded."""
    most = 256 if on_cpu else 1024
    return min(needed, most) if needed else most


def environment(gpu: bool, given: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to set before vLLM is imported, unless they are `given`."""
    variables = ENVIRONMENT | (GPU_ENVIRONMENT if gpu else {})
    # vLLM's own all-reduce multicasts over NVLink too, and does not look at NCCL's variable.
    return variables | ({"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"} if given.get("NCCL_NVLS_ENABLE") == "0" else {})


def of_model(path: str | Path, context: int, dtype: str, seed: int, tensor_parallel: int, *, random_weights: bool) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` that follow from the model and hold on every machine."""
    return {
        "model": str(path),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # not the folder's: only `Sampling` says how to sample
        "max_model_len": context,
        "dtype": dtype,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel,
        "enable_prefix_caching": True,
        "load_format": "dummy" if random_weights else "auto",
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(PARALLEL if tensor_parallel > 1 else {}),
    }


def of_images(most: int | None) -> Mapping[str, Any]:
    """The arguments of an engine that reads up to `most` images with a prompt; its processor needs the tokenizer."""
    # Without vLLM's cache of processed images: what it sends of an image that it sent before is a name, which new weights make unknown.
    given = {"limit_mm_per_prompt": {"image": most, "video": 0}, "skip_tokenizer_init": False, "mm_processor_cache_gb": 0}
    return {} if most is None else given


def arguments(
    *, on_cpu: bool, context: int, max_sequences: int | None, kv_cache_bytes: int | None, share: float, shared: bool
) -> Mapping[str, Any]:
    """The arguments of `vllm.EngineArgs` that depend on the machine; `share` is the share of a GPU's memory."""
    if on_cpu:
        return {
            "kv_cache_memory_bytes": kv_cache_bytes or KV_CACHE_BYTES,
            "max_num_seqs": max_sequences or most_sequences(on_cpu),
            "block_size": 32,  # the smallest that the CPU build takes; prompts share prefixes in whole blocks
            "enforce_eager": True,
            # In a split prompt vLLM rewinds the request's random generator, which one of a CPU cannot do.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, context),
            "async_scheduling": False,
        }
    most = max_sequences or most_sequences(on_cpu)
    return {
        "worker_cls": "rlgraph.engines.vllm.gpu_worker.GpuWorker",
        "kv_cache_memory_bytes": kv_cache_bytes,
        "gpu_memory_utilization": share,
        "max_num_seqs": most,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": max(16384, context),
        "async_scheduling": True,  # the next step is scheduled while the GPU is at this one
        "enable_sleep_mode": shared,
        "attention_backend": "FLASH_ATTN",
        # Steps that only decode; those that read prompts too are recorded by `mixed_cudagraph_patch`.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [*recorded_sizes(most), *mixed_sizes(most, context)[-1:]],
        },
    }


def scheduler(ahead: bool) -> str:
    """Name vLLM's scheduler as rlgraph has it, for engines that schedule the next step `ahead` and for others."""
    return f"rlgraph.engines.vllm.scheduler.{'AheadScheduler' if ahead else 'DecodeScheduler'}"


def share_of_memory(given: float | None, shared: bool) -> float:
    """The share of a GPU's memory that its engines take together."""
    return given or (MEMORY_SHARED if shared else MEMORY_ALONE)


def beside_weights(copies: int, weights: int, merging_bytes: int | None) -> int:
    """The bytes that an engine keeps beside its own weights: further versions of them, or what merging adapters takes.

    >>> beside_weights(2, 16, None), beside_weights(2, 16, 14)
    (16, 14)
    """
    return (copies - 1) * weights if merging_bytes is None else merging_bytes


def kv_cache_of_many(total: int, weights: int, engines: int, share: float) -> int:
    """Compute the KV cache of each of several engines on one GPU, in bytes.

    vLLM would measure the free memory, which is wrong while other processes start on the GPU; so it gets this number.
    """
    return max(int(total * share) // engines - weights - STEP_BYTES, KV_CACHE_BYTES)


def recorded_sizes(most: int) -> list[int]:
    """List the numbers of sequences whose decode step is recorded as a CUDA graph: dense where steps are short."""
    sizes = {1, 2, 4, *range(8, min(most, 256) + 1, 8), *range(256, min(most, 512) + 1, 16), *range(512, most + 1, 64), most}
    return sorted(size for size in sizes if size <= most)


def mixed_sizes(most: int, context: int) -> list[int]:
    """List the token counts of recorded steps that also read up to 512 tokens of prompts: 8 apart, or a quarter at most.

    vLLM 0.26 records a step as if its last sequence read what is left when the others read equally much. Sizes at which that is longer
    than `context` are left out: the kernels would read behind the sequence's blocks.
    """
    sizes = [8]
    while sizes[-1] < most + 512:
        sizes.append(sizes[-1] + max(8, 1 << (sizes[-1].bit_length() - 3)))
    return [size for size in sizes if sum(divmod(size, mixed_sequences(size, most))) <= context]


def mixed_sequences(tokens: int, most: int) -> int:
    """The number of sequences of a recorded step of so many tokens, of which some sequence reads two."""
    return min(tokens - 1, most)


# The arguments of vLLM that a user hands on with `Generator(engine_args={…})`: those that rlgraph sets itself are refused by name.

WEIGHTS = "published versions are written into the engine's own tensors, so these must be the model's"
DEVICES = "the plan gives each engine its devices; set the pool's gpus and Generator(tensor_parallel=)"
MODEL = "the engine and the trainer read one folder; change its files"
SAMPLING = "rg.Sampling alone says how tokens are drawn, and the log-probs of a rollout are those of it"
DRAFTS = "set Generator(drafts=rg.options.PromptLookup()): of vLLM's own a CPU was seen to accept tokens of probability 0"
OWN = "rlgraph drives the engine itself and sets it"

# What the user sets elsewhere, and what rlgraph relies on: by the argument's name, or the beginning of its name.
TAKEN = {
    "model": "it is the first argument of Generator",
    "dtype": "set Generator(dtype=)",
    "seed": "set Generator(seed=)",
    "max_model_len": "set Generator(max_context=)",
    "max_num_seqs": "set Generator(max_sequences=)",
    "tensor_parallel_size": "set Generator(tensor_parallel=)",
    "gpu_memory_utilization": "set Generator(memory=)",
    "kv_cache_memory_bytes": "set Generator(memory=)",
}
TAKEN_BEGINNINGS = {
    DEVICES: (
        "pipeline_parallel",
        "data_parallel",
        "prefill_context",
        "decode_context",
        "dcp_",
        "cp_",
        "nnodes",
        "node_rank",
        "master_",
        "device_ids",
        "distributed_",
        "numa_",
        "elastic",
        "enable_elastic",
        "ray_",
    ),
    WEIGHTS: (
        "quantization",
        "allow_deprecated_quantization",
        "load_format",
        "model_loader",
        "model_weights",
        "ignore_patterns",
        "pt_load",
        "cpu_offload",
        "offload_",
        "enable_lora",
        "max_lora",
        "lora_",
        "default_mm_loras",
        "fully_sharded_loras",
        "max_cpu_loras",
        "weight_transfer",
    ),
    MODEL: (
        "tokenizer",
        "hf_",
        "config_format",
        "model_class",
        "revision",
        "code_revision",
        "runner",
        "convert",
        "trust_remote_code",
        "download_dir",
    ),
    SAMPLING: (
        "logits_processors",
        "logprobs_mode",
        "generation_config",
        "override_generation",
        "return_sampling_mask",
        "watermark_config",
        "diffusion",
        "pooler",
    ),
    DRAFTS: ("speculative", "spec_", "per_request_spec"),
    OWN: (
        "skip_tokenizer",
        "worker_",
        "scheduler_cls",
        "enable_sleep_mode",
        "sleep_",
        "enable_cumem",
        "disable_log_stats",
        "use_tqdm",
        "_api",
        "served_model",
        "tokens_only",
        "enable_return_routed",
        "shutdown_timeout",
        "stream_interval",
    ),
}
NOT_ON_A_CPU = {
    "enable_chunked_prefill": "in a split prompt vLLM rewinds the request's random generator, which one of a CPU cannot do",
    "async_scheduling": "steps of a CPU are not scheduled ahead",
}
KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}


def check_arguments(given: Mapping[str, Any]) -> Mapping[str, str]:
    """Check arguments for vLLM before anything starts; return those that only a GPU takes, with the reason.

    Raises GraphError for one that vLLM does not know, one of another type, and one that rlgraph sets itself.
    """
    known = known_arguments()
    for name, value in given.items():
        here = f"Generator(engine_args={{{show_value(name)}: {show_value(value)}}}): "
        if reason := _reservation_reason(name):
            raise GraphError(f"{here}'{name}' cannot be given here: {reason}")
        if known and name not in known:
            raise GraphError(f"{here}vLLM has no argument '{name}'; {choices(name, known, 'those of vllm.EngineArgs are', most=8)}")
        _check_value(here, name, value, known.get(name, ""))
    return {name: reason for name, reason in NOT_ON_A_CPU.items() if given.get(name)}


@cache
def known_arguments() -> Mapping[str, str]:
    """Read the arguments of the vLLM that is installed, with their annotations, without importing it; empty if there is none."""
    found = importlib.util.find_spec("vllm")
    for folder in found.submodule_search_locations or () if found else ():
        source = Path(folder) / "engine" / "arg_utils.py"
        for part in ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else ():
            if isinstance(part, ast.ClassDef) and part.name == "EngineArgs":
                return {
                    line.target.id: ast.unparse(line.annotation)
                    for line in part.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                }
    return {}


def _reservation_reason(name: str) -> str:
    """Say why an argument is not the user's; empty if it is."""
    begins = (reason for reason, beginnings in TAKEN_BEGINNINGS.items() if name.startswith(beginnings))
    return TAKEN.get(name) or next(begins, "")


def _check_value(here: str, name: str, value: Any, annotation: str) -> None:
    """Check the type where vLLM's own annotation is a plain one, and that the value is data, which travels to the workers as it is."""
    plain = annotation.removesuffix(" | None")
    kind = setting_type(KINDS[plain] if plain == annotation else KINDS[plain] | None) if plain in KINDS else None
    try:
        if kind is not None:
            kind.take(name, value)
        json.dumps(value)
    except Wrong:
        raise GraphError(f"{here}'{name}' of vLLM is {kind.rule if kind else ''}") from None
    except (TypeError, ValueError):
        raise GraphError(f"{here}the value is data: numbers, text, True, False, None, and lists and mappings of these") from None
