"""Start SGLang's scheduler inside this process, without its tokenizer, detokenizer and server, and with a sampler of rlgraph.

With `SeededSampler` a token depends on the seed of its request and its position, not on the batch. SGLang draws by seed only in its
deterministic mode, which excludes most attention backends, and its log-probs leave out top-p and top-k.
"""

import dataclasses
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
import warnings
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from rlgraph.errors import DataError
from rlgraph.plan.model_shapes import ModelShape

# Stand-ins for packages that SGLang imports and dense models have no use for, so that it loads without them.
#
# On a CPU they take the place of its kernels too, of which the package index has no build for CPUs. Attention is then PyTorch's own, and of
# the kernels one is needed.

# The kernels that SGLang imports by name on a CPU, besides the one below: for speculative decoding and moved caches.
UNUSED = (
    "copy_all_layer_kv_cache_cpu",
    "assign_extend_cache_locs_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)
# What it imports of FlashInfer on a GPU even where that is not available: for weights of eight bits, and for its own sampler.
FLASHINFER = {
    "flashinfer": ("bmm_fp8",),
    "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
    "flashinfer.fused_moe": ("fused_topk_deepseek",),
    "flashinfer.prefill": ("cudnn_batch_prefill_with_kv_cache",),
}


def install() -> None:
    """Put a stand-in in place of each package that is absent. Call it before SGLang is imported."""
    if _absent("IPython"):
        _module("IPython")
        _module("IPython.display", HTML=object, display=print)
    if torch.cuda.is_available():
        sys.modules.setdefault("vllm", None)  # type: ignore[arg-type]  # which SGLang imports where it is, for seconds and to no use
        if _absent("flashinfer"):
            os.environ["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
            for module, names in FLASHINFER.items():
                _module(module, **{name: _refuse_use(f"{module}.{name}") for name in names})
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _triton()
    if _absent("torchvision"):
        importlib.import_module("transformers.utils.import_utils")  # finds out first that there is no torchvision
        _module("torchvision")
        _module("torchvision.io", decode_jpeg=None)
        modes = types.SimpleNamespace(BICUBIC=3, BILINEAR=2, NEAREST=0)
        _module("torchvision.transforms", InterpolationMode=modes)
        _module("torchvision.transforms.functional", InterpolationMode=modes)
    if _absent("sgl_kernel"):
        kernels = {name: _refuse_use(f"sgl_kernel.{name}") for name in UNUSED}
        _module("sgl_kernel", assign_req_to_token_pool_cpu=assign_req_to_token_pool_cpu, **kernels)


def allow_registered_configs() -> None:
    """Let SGLang register configurations that transformers has by now too."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    register = CONFIG_MAPPING.register
    CONFIG_MAPPING.register = lambda key, value, exist_ok=False: register(key, value, exist_ok=True)


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Write the `places` of new keys and values into the table `[requests, context]`, for each request from its start to its end."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def _triton() -> None:
    """Install SGLang's own stand-in of triton, after the parts of PyTorch that it would break."""
    if not _absent("triton"):
        return
    for name in ("_inductor.runtime.triton_heuristics", "_inductor.codegen.triton", "_inductor.select_algorithm", "_dynamo"):
        importlib.import_module(f"torch.{name}")
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    spec = importlib.util.spec_from_file_location("_sglang_triton", f"{package.submodule_search_locations[0]}/_triton_stub.py")
    assert spec is not None
    assert spec.loader is not None
    stand_in = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stand_in)
    stand_in.install()


def _absent(name: str) -> bool:
    return name not in sys.modules and importlib.util.find_spec(name) is None


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(names)
    sys.modules[name] = module


def _refuse_use(name: str) -> Any:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"SGLang calls {name}, which is not installed here")

    return refuse


# The arguments of SGLang: on a CPU a small engine without overlap, on a GPU one that schedules a step while the GPU is at another.

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


def common_arguments(path: str | Path, *, context: int, dtype: str, seed: int, sequences: int) -> dict[str, Any]:
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


@dataclasses.dataclass(frozen=True)
class MachineLimits:
    """What the engine may use of its machine; see `SglangEngine`. `staged_bytes` of a GPU are for versions that arrive."""

    threads: int | None
    max_sequences: int | None
    kv_cache_bytes: int | None
    memory: float | None
    shared: bool
    staged_bytes: int
    overlap: bool | None


class NoReader:
    """Takes the messages for processes that there are not."""

    def send_output(self, output: Any, request: Any = None) -> None:
        """Forget a message."""


def scheduler(path: str | Path, context: int, dtype: str, seed: int, machine: MachineLimits) -> tuple[Any, list[Path]]:
    """Make the scheduler with the model, and name the files of its sockets.

    Raises DataError if sglang is not installed, or for a model whose keys and values it cannot count.
    """
    _prepare_process(path, machine.threads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # kernels for devices that this machine lacks
        return _start_scheduler(_arguments(path, context, dtype, seed, machine))


def _start_scheduler(arguments: Mapping[str, Any]) -> tuple[Any, list[Path]]:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_loader import weight_utils
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    _seed_batches()
    _silence(weight_utils)
    given = ServerArgs(**arguments)
    if given.enable_memory_saver:
        _free_without_preload()
    ports = PortArgs.init_new(given)
    publish(given, role="scheduler")
    made: Any = Scheduler(given, ports, 0, 0, 0, 0, 0, 0, None)
    _drop_load_file(made)
    made.output_streamer.send_to_detokenizer = NoReader()
    made.ipc_channels = dataclasses.replace(made.ipc_channels, send_to_tokenizer=NoReader())
    # What its own loop sets before the first step. On the stream of weights that arrive, so that steps wait for them.
    made.schedule_stream = made.device_module.current_stream()
    made._war_barrier_enabled = torch.cuda.is_available()
    made.result_queue = deque()
    names = [value for value in dataclasses.asdict(ports).values() if isinstance(value, str) and value.startswith("ipc://")]
    return made, [Path(name.removeprefix("ipc://")) for name in names]


def _arguments(path: str | Path, context: int, dtype: str, seed: int, machine: MachineLimits) -> dict[str, Any]:
    gpu = torch.cuda.is_available()
    config = json.loads((Path(path) / "config.json").read_text())
    sequences = most_sequences(not gpu, machine.max_sequences)
    arguments = common_arguments(path, context=context, dtype=dtype, seed=seed, sequences=sequences)
    if gpu:
        free, total = torch.cuda.mem_get_info()
        apart = machine.staged_bytes + step_bytes(sequences, (config.get("text_config") or config)["vocab_size"])
        arguments |= {**on_gpu(machine.memory, machine.shared, total, free, apart, sequences), **_gpu_attention()}
    else:
        _check_attention(path, config)
        shape = ModelShape.from_config(config)
        if shape is None:
            raise DataError(f"engine='sglang': the config of '{path}' lacks the sizes of its keys and values; use engine='vllm'")
        token_bytes = shape.kv_bytes_per_token(getattr(torch, dtype).itemsize)
        arguments |= on_cpu(token_bytes, context, sequences, machine.kv_cache_bytes)
    return arguments | ({} if machine.overlap is None else {"disable_overlap_schedule": not machine.overlap})


def _gpu_attention() -> dict[str, Any]:
    """Take attention in Triton where FlashAttention 3, which SGLang takes on Hopper, was left out of its kernels."""
    package = find_spec("sgl_kernel")
    folders = package.submodule_search_locations if package is not None else None
    built = any(any(Path(folder).glob("flash_ops*")) for folder in folders or ())
    return {} if built else {"attention_backend": "triton"}


def _check_attention(path: str | Path, config: Mapping[str, Any]) -> None:
    """Refuse models whose attention SGLang's plain one would compute wrongly."""
    windows = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    for what, there in {"sliding windows": windows, "soft caps of scores": config.get("attn_logit_softcapping") is not None}.items():
        if there:
            raise DataError(f"engine='sglang': '{path}' has attention with {what}, which SGLang ignores on a CPU; use engine='vllm'")


def _prepare_process(path: str | Path, threads: int | None) -> None:
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise DataError("engine='sglang' needs the package sglang, which is not installed; see docs/engines.md, or use engine='vllm'")
    config = json.loads((Path(path) / "config.json").read_text())
    models = Path(package.origin).parent / "srt" / "models"
    others = other_models((config.get("architectures") or [""])[0], models)
    prepare(ENVIRONMENT | ({"SGLANG_DISABLED_MODEL_ARCHS": others} if others else {}))
    logging.getLogger("sglang").setLevel(logging.ERROR)
    install()
    allow_registered_configs()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _seed_batches() -> None:
    """Have every batch carry the seeds of its requests, which SGLang does in its deterministic mode alone."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch.__func__

    def make_with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = make(cls, batch, vocab_size)
        seeds = torch.tensor(
            [req.sampling_params.sampling_seed for req in batch.reqs], dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        info.sampling_seed = seeds.to(info.temperatures.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(make_with_seeds)


def _drop_load_file(scheduler: Any) -> None:
    """Remove the file in /dev/shm that tells a server how busy the scheduler is.

    No server reads it here, SGLang never removes it, and it is written in the steps. Now rather than at the end: a worker may be killed.
    """
    writer, scheduler.load_snapshot_writer = scheduler.load_snapshot_writer, None
    if writer is not None:
        writer.close()
        if hasattr(writer, "path"):  # by SGLANG_LOAD_SNAPSHOT_USE_ZMQ it is a socket
            Path(writer.path).unlink(missing_ok=True)


def _free_without_preload() -> None:
    """Have torch_memory_saver free what PyTorch allocates for it: its other way needs a library that is loaded when the process starts.

    Recorded steps then keep their memory, which is small beside weights, keys and values.
    """
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"


def _silence(weight_utils: Any) -> None:
    """Leave the terminal to the user: no bars while files load."""

    class Silent(weight_utils.tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    weight_utils.tqdm = Silent


# The sampler that takes the place of SGLang's: a token depends on its request's seed and its position, not on the batch.

GREEDY = -1  # in place of a seed
# SplitMix64 (Steele, Lea and Flood, 2014), its constants as signed numbers.
GOLDEN, MIX_A, MIX_B = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class SeededSampler:
    """Samples each row by its seed, and keeps the log-probs of each step in `drawn`, on the host, until they are taken."""

    def __init__(self) -> None:
        self.drawn: deque[torch.Tensor] = deque()

    def __call__(
        self, output: Any, info: Any, return_logprob: bool, top_logprobs_nums: Any, token_ids_logprobs: Any, positions: torch.Tensor
    ) -> torch.Tensor:
        logits, warm = output.next_token_logits, info.temperatures.view(-1)
        filters = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling  # known on the host
        limits = info.min_ps, info.top_ps, info.top_ks
        tokens, log_probs = sample(logits, warm, *limits, info.sampling_seed, positions, filters=filters)
        # On a GPU the copy is under way when this returns; SGLang waits for the tokens, which leave after it.
        host = torch.empty(log_probs.shape, dtype=torch.float32, pin_memory=log_probs.is_cuda)
        self.drawn.append(host.copy_(log_probs, non_blocking=True))
        return tokens.to(torch.int32)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    min_ps: torch.Tensor,
    top_ps: torch.Tensor,
    top_ks: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    filters: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token `[B]` for each row of `logits [B, V]`, and return its log-prob `[B]` under the distribution it is drawn from.

    Temperature, min-p, top-p, top-k, seed and position are `[B]`. Greedy rows have the seed -1, and log-probs of temperature 1.
    Without `filters` every row keeps all tokens.

    >>> logits = torch.tensor([[0.0, 9.0, 1.0]]).repeat(2, 1)
    >>> one, zero = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    >>> sample(logits, one, zero, one, zero + 1, torch.tensor([GREEDY, 5]), zero + 7)[0].tolist()
    [1, 1]
    """
    greedy = seeds == GREEDY
    warm = torch.where(greedy, 1.0, temperatures)[:, None]
    logits = logits.float() / warm
    if filters:
        logits = _filter_logits(logits, torch.where(greedy, 0.0, min_ps), torch.where(greedy, 1.0, top_ps), torch.where(greedy, 0, top_ks))
    log_probs = logits.log_softmax(-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    drawn = torch.minimum(uniform(seeds, positions)[:, None] * total, below)
    tokens = torch.searchsorted(cumulative, drawn, right=True)[:, 0]
    tokens = torch.where(greedy, log_probs.argmax(-1), tokens)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _filter_logits(logits: torch.Tensor, min_ps: torch.Tensor, top_ps: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """Set the logits of tokens that min-p, top-k, then top-p leave out to minus infinity; a top-k of 0 or the vocabulary keeps all."""
    vocab = logits.shape[-1]
    logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + min_ps.log()[:, None], -torch.inf)
    count = torch.where((top_ks > 0) & (top_ks < vocab), top_ks, vocab).long()
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    least = ordered.gather(-1, count[:, None] - 1)
    ordered = ordered.masked_fill(ordered < least, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the likeliest token has nothing before it and always stays
    out = (before >= top_ps[:, None]) & (top_ps[:, None] < 1) | ordered.isinf()
    return logits.masked_fill(torch.zeros_like(out).scatter_(-1, order, out), -torch.inf)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Compute a number in [0, 1) `[B]`, float64, for each seed and position: one output of SplitMix64 seeded by another.

    >>> numbers = uniform(torch.tensor([3, 3, 4]), torch.tensor([0, 1, 0]))
    >>> len(set(numbers.tolist()))
    3
    """
    mixed = _mix_bits(_mix_bits(seeds.long() * GOLDEN) + (positions.long() + 1) * GOLDEN)
    return _shift_right(mixed, 11).double() / float(1 << 53)


def _mix_bits(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * MIX_A
    x = (x ^ _shift_right(x, 27)) * MIX_B
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
