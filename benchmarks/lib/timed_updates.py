"""Timed updates of one model on several ranks, each a process with a GPU of its own; and the share of the peak that they reach."""

import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PEAK = 989e12  # dense bfloat16 of an H100 or H200 in its SXM form
SMOKE = 2, 32  # sequences and their length on a CPU
MODELS = Path(tempfile.gettempdir()) / "rlgraph-shapes"  # folders of random weights
WARM_UP = 2  # updates that are not counted


def begin_rank(rank: int) -> str:
    """See one GPU alone, with one thread, as a worker does; call it before torch is imported. Returns the kind of device."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": str(rank), "OMP_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)

    return "cuda" if torch.cuda.is_available() else "cpu"


def made_engine(
    shape: str,
    rank: int,
    world: int,
    rendezvous: str,
    device: str,
    *,
    fused: bool,
    trainer: str = "fsdp",
    **settings: Any,
) -> Any:
    """A trainer of random weights of this shape on this rank; Megatron-Core reads them from a folder, which the first rank makes."""
    import torch
    import torch.distributed as dist

    from benchmarks.lib.shapes import causal_model, random_model
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.fsdp.sharding import backends
    from rlgraph.values.trainer import TrainerSettings, setting_names

    if world > 1:
        dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=world)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    own = {name: settings.pop(name) for name in setting_names() if name in settings}
    given: dict[str, Any] = {"rank": rank, "world": world, "device": device, "dtype": dtype, **settings}
    if trainer == "megatron":
        from rlgraph.engines.megatron.engine import MegatronEngine

        if rank == 0:
            random_model(shape, MODELS)
        if world > 1:
            dist.barrier()
        return MegatronEngine(PolicyHead(random_model(shape, MODELS), fused=fused), TrainerSettings(fused_head=fused, **own), **given)
    torch.manual_seed(0)
    with torch.device(device):
        model = causal_model(shape).eval()
    return FsdpEngine(PolicyHead(model, fused=fused), TrainerSettings(**own), **given)


def random_batch(size: tuple[int, int]) -> dict[str, Any]:
    """Make a batch of random tokens, `size` of sequences and their length: a quarter is the prompt. It is the same every time."""
    import torch

    from benchmarks.lib.shapes import VOCAB

    (sequences, length), draw = size, torch.Generator().manual_seed(0)
    prompt, response = length // 4, length + 1 - length // 4
    mask = torch.ones(sequences, response, dtype=torch.bool)
    return {
        "prompts": torch.randint(VOCAB, (sequences, prompt), generator=draw),
        "prompt_mask": torch.ones(sequences, prompt, dtype=torch.bool),
        "responses": torch.randint(VOCAB, (sequences, response), generator=draw),
        "response_mask": mask,
        "advantages": torch.randn(sequences, 1, generator=draw).expand(-1, response).contiguous(),
        "old_log_probs": torch.full(mask.shape, -12.0),
    }


def timed_updates(engine: Any, size: tuple[int, int], steps: int) -> list[float]:
    """Update by one batch of random tokens, `size` of sequences and their length, so often. Returns seconds of each update."""
    import torch

    import rlgraph as rg

    finished: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    batch, seconds = random_batch(size), []
    for _ in range(steps):
        finished()
        start = time.perf_counter()
        engine.update(batch, rg.ClippedLoss())
        finished()
        seconds.append(time.perf_counter() - start)
    return seconds


def end_rank(seconds: Sequence[float], rank: int, world: int, results: Any) -> None:
    """Give the first rank's seconds and bytes, and end this process together with the other ranks."""
    import torch
    import torch.distributed as dist

    if rank == 0:
        results.put((list(seconds), torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0))
    if world > 1:
        dist.barrier()
    results.close()
    results.join_thread()  # what is put is on its way only when the queue's thread has sent it
    os._exit(0)


def of_ranks(world: int, target: Callable[..., None], given: tuple[Any, ...], timeout_s: float) -> Any:
    """Run `target(*given, rank, world, rendezvous, results)` on each rank. Returns what the first one put, by `end_rank` or itself.

    Raises RuntimeError as soon as a rank fails, and at the end of the seconds.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=target, args=(*given, rank, world, f"file://{folder}/group", results)) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            return _first_result(results, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.join(10 if not any(one.exitcode for one in processes) else 0)
                process.kill()


def _first_result(results: Any, processes: Sequence[Any], end: float) -> Any:
    """Wait for what the first rank puts, as long as no rank has failed."""
    while True:
        try:
            found = results.get(timeout=0.5)
        except queue.Empty:
            if failed := [process.exitcode for process in processes if process.exitcode]:
                raise RuntimeError(f"a rank ended with exit code {failed[0]}; what it printed is above") from None
            if time.monotonic() > end:
                raise RuntimeError("the ranks took longer than they were given") from None
        else:
            return found


def row(shape: str, size: tuple[int, int], world: int, peak: float, found: tuple[list[float], int]) -> dict[str, Any]:
    """What a run is reported by: seconds of an update, tokens a second, the share of the peak, bytes on a GPU.

    FLOP a token: 6 for each parameter but the embedding, which is a look-up (a tied one counts once, as the head), and the experts that it
    does not take; and 12 · layers · heads · head size · half the length for causal attention (PaLM, appendix B). Recomputed activations
    don't count.
    """
    from benchmarks.lib.shapes import MIXTURES, SHAPES, multiplied

    (seconds, memory), (sequences, length) = found, size
    _, layers, heads, *_ = MIXTURES[shape] if shape in MIXTURES else SHAPES[shape]
    tokens = sequences * length
    flop = tokens * (6 * multiplied(shape) + 12 * layers * heads * 128 * length / 2)
    timed = seconds[WARM_UP:]
    median = statistics.median(timed)
    return {
        "ranks": world,
        "steps": len(timed),
        "step_s": median,
        "spread_s": [min(timed), max(timed)],
        "tokens_per_s": tokens / median,
        "mfu": flop / median / peak / world,
        "peak_bytes": memory,
    }
