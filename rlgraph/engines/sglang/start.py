"""Start SGLang's scheduler inside this process, without its tokenizer, its detokenizer and its server."""

import dataclasses
import json
import logging
import os
import warnings
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines.sglang import server_arguments, stand_ins
from rlgraph.errors import DataError
from rlgraph.plan.model_shapes import ModelShape


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
        return _started(_arguments(path, context, dtype, seed, machine))


def _started(arguments: Mapping[str, Any]) -> tuple[Any, list[Path]]:
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
    sequences = server_arguments.most_sequences(not gpu, machine.max_sequences)
    arguments = server_arguments.arguments(path, context=context, dtype=dtype, seed=seed, sequences=sequences)
    if gpu:
        free, total = torch.cuda.mem_get_info()
        apart = machine.staged_bytes + server_arguments.step_bytes(sequences, (config.get("text_config") or config)["vocab_size"])
        arguments |= {**server_arguments.on_gpu(machine.memory, machine.shared, total, free, apart, sequences), **_gpu_attention()}
    else:
        _check_attention(path, config)
        shape = ModelShape.from_config(config)
        if shape is None:
            raise DataError(f"engine='sglang': the config of '{path}' does not give the sizes of its keys and values; use engine='vllm'")
        token_bytes = shape.kv_bytes_per_token(getattr(torch, dtype).itemsize)
        arguments |= server_arguments.on_cpu(token_bytes, context, sequences, machine.kv_cache_bytes)
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
            raise DataError(f"engine='sglang': '{path}' attends with {what}, which SGLang leaves out on a CPU; use engine='vllm'")


def _prepare_process(path: str | Path, threads: int | None) -> None:
    package = find_spec("sglang")
    if package is None or package.origin is None:
        raise DataError(
            "engine='sglang' needs the package sglang, which is not installed here; docs/engines.md says how, or use engine='vllm'"
        )
    config = json.loads((Path(path) / "config.json").read_text())
    models = Path(package.origin).parent / "srt" / "models"
    others = server_arguments.other_models((config.get("architectures") or [""])[0], models)
    server_arguments.prepare(server_arguments.ENVIRONMENT | ({"SGLANG_DISABLED_MODEL_ARCHS": others} if others else {}))
    logging.getLogger("sglang").setLevel(logging.ERROR)
    stand_ins.install()
    stand_ins.register_configs_twice()
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _seed_batches() -> None:
    """Have every batch carry the seeds of its requests, which SGLang does in its deterministic mode alone."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    make = SamplingBatchInfo.from_schedule_batch.__func__

    def seeded(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = make(cls, batch, vocab_size)
        seeds = torch.tensor(
            [req.sampling_params.sampling_seed for req in batch.reqs], dtype=torch.int64, pin_memory=torch.cuda.is_available()
        )
        info.sampling_seed = seeds.to(info.temperatures.device, non_blocking=True)
        return info

    SamplingBatchInfo.from_schedule_batch = classmethod(seeded)


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

    class Silent(weight_utils.tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": True})

    weight_utils.tqdm = Silent
