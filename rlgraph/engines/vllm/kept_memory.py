"""The memory of an engine's weights that no new version writes: its host copies, with which the engine sleeps until a version is loaded.

An engine that is to load weights before it decodes again need not save those that the load replaces. What no load writes, as an adapter's
frozen embeddings or the zeros of a padded vocabulary, is copied to the host once, and from there after each sleep.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Copy = Callable[[int, int, int], None]  # to an address, from an address, so many bytes
TAG = "weights"  # of vLLM's allocator


@dataclass(frozen=True, order=True)
class Span:
    """Bytes of device memory, from an address on."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def not_written(blocks: Iterable[Span], written: Iterable[Span]) -> list[Span]:
    """List the blocks that do not lie wholly in what is written.

    >>> not_written([Span(0, 8), Span(8, 8)], [Span(4, 4), Span(0, 4), Span(12, 4)])
    [Span(start=8, size=8)]
    """
    runs: list[Span] = []
    for span in sorted(written):
        if runs and span.start <= runs[-1].end:
            runs[-1] = Span(runs[-1].start, max(span.end, runs[-1].end) - runs[-1].start)
        else:
            runs.append(span)
    starts = [run.start for run in runs]

    def whole(block: Span) -> bool:
        at = bisect_right(starts, block.start) - 1
        return at >= 0 and block.end <= runs[at].end

    return [block for block in blocks if not whole(block)]


def written_by(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """List the bytes that copies into these tensors write; one with gaps counts as not written."""
    return [Span(tensor.data_ptr(), tensor.numel() * tensor.itemsize) for tensor in tensors if tensor.is_contiguous()]


def blocks_of(segments: Mapping[int, int], snapshot: Sequence[Mapping[str, Any]]) -> list[Span]:
    """List the blocks in use of segments, given as bytes by address, by torch's snapshot of memory; one that it lacks is a block."""
    known = {segment["address"]: segment["blocks"] for segment in snapshot if segment["address"] in segments}
    used = [
        Span(block["address"], block["requested_size"]) for blocks in known.values() for block in blocks if block["state"] != "inactive"
    ]
    return used + [Span(address, size) for address, size in segments.items() if address not in known]


def copy(to: int, source: int, size: int) -> None:
    """Copy between host and device memory, as vLLM's allocator does when it sleeps."""
    from vllm.device_allocator.cumem import libcudart

    libcudart.cudaMemcpy(to, source, size)


@dataclass
class KeptMemory:
    """Host copies of device memory that nothing writes while they are kept.

    Each load writes the weights `replaced`. While the engine sleeps until a load, it is `lacking` them. `pinned_bytes` of the host were
    taken by a sleep that saved all.
    """

    copied: Copy = copy
    pinned: bool = True
    replaced: frozenset[str] = frozenset()
    lacking: frozenset[str] = frozenset()
    pinned_bytes: int = 0
    _host: dict[Span, torch.Tensor] = field(default_factory=dict)

    def keep(self, spans: Iterable[Span]) -> int:
        """Keep these spans alone, copying those that are not kept yet; return their bytes."""
        self._host = {span: self._host[span] if span in self._host else self._saved(span) for span in spans}
        return sum(span.size for span in self._host)

    def _saved(self, span: Span) -> torch.Tensor:
        host = torch.empty(span.size, dtype=torch.uint8, pin_memory=self.pinned)
        self.copied(host.data_ptr(), span.start, span.size)
        return host

    def restore(self) -> None:
        """Copy all that is kept back to where it was."""
        for span, host in self._host.items():
            self.copied(span.start, host.data_ptr(), span.size)

    def clear(self) -> None:
        """Forget the copies: somebody has written what they are of."""
        self._host = {}


def of_weights() -> list[Span]:
    """List the blocks of this process that vLLM's allocator took for weights."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = CuMemAllocator.get_instance().pointer_to_data.items()
    return blocks_of({address: int(data.handle[1]) for address, data in held if data.tag == TAG}, torch.cuda.memory_snapshot())


def to_keep(parameters: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> list[Span] | None:
    """List the blocks of weights that copies into `written` do not fill; None if not all parameters are found in such blocks."""
    blocks = of_weights()
    return None if not_written(written_by(parameters), blocks) else not_written(blocks, written_by(written))
