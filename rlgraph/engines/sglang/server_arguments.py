"""The arguments of SGLang: on a CPU a small engine without overlap, on a GPU one that schedules a step while the GPU is at another."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # Requests end at rlgraph's own context; SGLang ends them a few tokens earlier, so its context is longer than the model's.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
MARGIN = 8  # tokens that SGLang's context is longer
KV_CACHE_BYTES = 1 << 30  # on a CPU
STEP_BYTES = 3 << 30  # on a GPU: recorded decode steps, activations, libraries
SAMPLER_BYTES = 48  # for each sequence and word
MOST_OF_FREE = 0.98
MEMORY_ALONE, MEMORY_SHARED = 0.9, 0.45  # of a GPU: weights, keys and values, and what a step needs
NEVER_S = 10 * 365 * 24 * 3600.0  # SGLang's watchdog ends a process that takes no step for so long; tools may take longer than its own


def most_sequences(on_cpu: bool, needed: int | None) -> int:
    """The number of responses decoded at once: at most `needed` (None: not known)."""
    return min(needed or 1 << 30, 256 if on_cpu else 1024)


def arguments(path: str | Path, *, context: int, dtype: str, seed: int, sequences: int) -> dict[str, Any]:
    """The arguments of `sglang.srt.server_args.ServerArgs` that hold on every machine."""
    return {
        "model_path": str(path),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "random_seed": seed,
        "context_length": context + MARGIN,
        "max_running_requests": sequences,
        # A part of a prompt read under old weights would be kept at a swap.
        "chunked_prefill_size": -1,
        "max_prefill_tokens": max(16384, context + MARGIN),
        "schedule_policy": "fcfs",  # requests join in the order submitted
        "sampling_backend": "pytorch",  # `SeededSampler` takes its place
        "grammar_backend": "none",
        "log_level": "error",
        "watchdog_timeout": NEVER_S,
        "skip_server_warmup": True,
    }


def on_cpu(kv_token_bytes: int, context: int, sequences: int, kv_cache_bytes: int | None) -> Mapping[str, Any]:
    """The arguments for a CPU: room for all sequences, or for as many as the KV cache holds, and for one at least."""
    room = (kv_cache_bytes or KV_CACHE_BYTES) // kv_token_bytes
    return {
        "device": "cpu",
        "attention_backend": "torch_native",
        "max_total_tokens": max(min(room, sequences * (context + MARGIN)), context + 2 * MARGIN),
        "disable_overlap_schedule": True,
        "disable_custom_all_reduce": True,
        "mem_fraction_static": 0.5,
    }


def on_gpu(memory: float | None, shared: bool, total_bytes: int, free_bytes: int, apart_bytes: int, sequences: int) -> Mapping[str, Any]:
    """The arguments for a GPU of `total_bytes`, of which `free_bytes` are free and `apart_bytes` are not for weights, keys and values.

    The share is of the whole GPU, as everywhere in rlgraph; SGLang's own is of what is free.
    """
    share = memory or (MEMORY_SHARED if shared else MEMORY_ALONE)
    return {
        "device": "cuda",
        "mem_fraction_static": round(min((share * total_bytes - apart_bytes) / free_bytes, MOST_OF_FREE), 4),
        "cuda_graph_max_bs_decode": sequences,
        "disable_prefill_cuda_graph": True,  # it holds memory that SGLang cannot free
        "enable_memory_saver": shared,
        "enable_weights_cpu_backup": shared,
    }


def step_bytes(sequences: int, vocab_size: int) -> int:
    """The memory that a step needs on a GPU besides weights, keys and values: most of it is the sampler's, in float64."""
    return STEP_BYTES + SAMPLER_BYTES * sequences * vocab_size


def other_models(architecture: str, models: Path) -> str:
    """Name the modules of SGLang's models without this architecture, for `SGLANG_DISABLED_MODEL_ARCHS`: importing all takes seconds.

    Nothing is left out if no module has the architecture, so that SGLang says itself that it is not supported.
    """
    files = [file for file in sorted(models.glob("*.py")) if file.stem != "__init__"]
    has = [file.stem for file in files if f"class {architecture}(" in file.read_text(encoding="utf-8")]
    return ",".join(file.stem for file in files if file.stem not in has) if has else ""


def prepare(variables: Mapping[str, str]) -> None:
    """Set environment variables that are not set yet. Call it before SGLang is imported."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
