"""One update under torch.profiler: what the host does, what the GPU does, and how much of the time the GPU computes."""

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

ROWS = 25
Span = tuple[float, float]


def profiled_update(engine: Any, size: tuple[int, int], rank: int, seconds: Sequence[float]) -> None:
    """Take one more update, which rank 0 profiles and prints beside the `seconds` of those before; every rank calls it."""
    from benchmarks.lib.timed_updates import timed_updates

    if rank:
        timed_updates(engine, size, 1)
        return
    import torch

    cpu = time.process_time()
    with profiler() as found:
        (took,) = timed_updates(engine, size, 1)
    cpu = time.process_time() - cpu
    print(f"profiled update: {took:.3f} s, {cpu:.3f} s of CPU time; not profiled: {statistics.median(seconds):.3f} s", flush=True)
    rows = found.key_averages()
    print(rows.table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=70))
    if torch.cuda.is_available():
        print(rows.table(sort_by="self_device_time_total", row_limit=ROWS, max_name_column_width=70))
    print(summary(found.events(), took), flush=True)


def profiler() -> Any:
    """A profile of the host, and of the GPU where there is one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])])


def kernels_of(events: Iterable[Any]) -> list[tuple[str, Span]]:
    """The names and spans, in microseconds, of what ran on the GPU: kernels and copies."""
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]


def summary(events: Sequence[Any], took_s: float) -> str:
    """Say how many operations the host dispatched, how many kernels ran, and in which share of the time any did.

    An event is one of `torch.profiler.profile.events()`; "collectives alone" is the share in which no other kernel ran.
    """
    calls = sum(event.name.startswith("aten::") for event in events if event.device_type.name == "CPU")
    kernels = kernels_of(events)
    all_s = covered(span for _, span in kernels) / 1e6
    others_s = covered(span for name, span in kernels if not name.startswith("nccl")) / 1e6
    of_collectives = sum(name.startswith("nccl") for name, _ in kernels)
    if not kernels:
        return f"aten operations: {calls}"
    return (
        f"aten operations: {calls}; kernels and copies on the GPU: {len(kernels)}, of which collectives {of_collectives}; GPU busy "
        f"{all_s:.3f} s ({all_s / took_s:.1%}), collectives alone {all_s - others_s:.3f} s ({(all_s - others_s) / took_s:.1%})"
    )


def covered(spans: Iterable[Span]) -> float:
    """The length of the union of spans.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4
    """
    total: float = 0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total
