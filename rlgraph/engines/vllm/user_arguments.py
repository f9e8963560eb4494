"""The arguments of vLLM that a user hands on with `Generator(engine_args={…})`: those that rlgraph sets itself are refused by name."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rlgraph.errors import GraphError, choices, shown
from rlgraph.settings import AnyOf, Flag, Real, SettingType, Text, Whole, Wrong

WEIGHTS = "published versions are written into the engine's own tensors, so these must be the model's"
DEVICES = "the plan gives each engine its devices; set the pool's gpus and Generator(tensor_parallel=)"
MODEL = "the engine and the trainer read one folder; change its files"
SAMPLING = "rg.Sampling alone says how tokens are drawn, and the log-probs of a rollout are those of it"
DRAFTS = "set Generator(drafts=rg.PromptLookup()): of vLLM's own a CPU was seen to accept tokens of probability 0"
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
KINDS: dict[str, SettingType] = {"bool": Flag(), "int": Whole(), "float": Real(), "str": Text()}


def check_arguments(given: Mapping[str, Any]) -> Mapping[str, str]:
    """Check arguments for vLLM before anything starts; return those that only a GPU takes, with the reason.

    Raises GraphError for one that vLLM does not know, one of another type, and one that rlgraph sets itself.
    """
    known = known_arguments()
    for name, value in given.items():
        here = f"Generator(engine_args={{{shown(name)}: {shown(value)}}}): "
        if reason := _taken(name):
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
                fields = [line for line in part.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)]
                return {line.target.id: ast.unparse(line.annotation) for line in fields}  # type: ignore[union-attr]
    return {}


def _taken(name: str) -> str:
    """Say why an argument is not the user's; empty if it is."""
    begins = (reason for reason, beginnings in TAKEN_BEGINNINGS.items() if name.startswith(beginnings))
    return TAKEN.get(name) or next(begins, "")


def _check_value(here: str, name: str, value: Any, annotation: str) -> None:
    """Check the type where vLLM's own annotation is a plain one, and that the value is data, which travels to the workers as it is."""
    plain = annotation.removesuffix(" | None")
    kind = AnyOf((KINDS[plain],), none=plain != annotation) if plain in KINDS else None
    try:
        if kind is not None:
            kind.take(name, value)
        json.dumps(value)
    except Wrong:
        raise GraphError(f"{here}'{name}' of vLLM is {kind.rule if kind else ''}") from None
    except (TypeError, ValueError):
        raise GraphError(f"{here}the value is data: numbers, text, True, False, None, and lists and mappings of these") from None
