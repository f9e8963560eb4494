"""Write the boxes of parameters that one rank holds to their places in the files of an export."""

import os
from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path

import torch

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.hf_export.layout import DTYPES, ExportLayout, Slot

CHUNK_BYTES = 1 << 25  # cast and copied to the host at once: all the memory that writing takes


def write_shards(
    folder: Path, layout: ExportLayout, shards: Iterable[WeightShard], on_bytes: Callable[[int], None] = lambda count: None
) -> int:
    """Write boxes to the files of an export, which have their sizes already; return the bytes written, all of them on the disk.

    A box that another rank writes as well (`replica` above 0) is left to that rank, and so is a parameter that the layout leaves out.
    `on_bytes` is called after each chunk. Raises OSError where the disk does not take them.
    """
    slots = {slot.source: slot for slot in layout.slots}
    opened: dict[int, int] = {}
    written = 0
    try:
        for shard in shards:
            slot = slots.get(shard.name)
            if shard.replica or slot is None or not shard.tensor.numel():
                continue
            if slot.file not in opened:
                opened[slot.file] = os.open(folder / layout.files[slot.file].name, os.O_WRONLY | os.O_CLOEXEC)
            for at, data in _chunks(shard, slot, DTYPES[layout.dtype][1]):
                _write_all(opened[slot.file], data, at)
                written += len(data)
                on_bytes(written)
        for handle in opened.values():
            os.fsync(handle)
    finally:
        for handle in opened.values():
            os.close(handle)
    return written


def _chunks(shard: WeightShard, slot: Slot, dtype: torch.dtype) -> Iterator[tuple[int, memoryview]]:
    """Yield the bytes of a box, in runs that are contiguous in the file, each with its offset there."""
    spans, run = _runs(shard)
    rows = shard.tensor.detach().reshape(len(spans), run)
    width = dtype.itemsize
    many = max(CHUNK_BYTES // (run * width), 1)  # short runs are cast together
    part = max(CHUNK_BYTES // width, 1)  # a long one in parts
    for first in range(0, len(rows), many):
        for begin in range(0, run, part):
            block = rows[first : first + many, begin : begin + part].to(dtype).cpu().contiguous()
            data = block.view(torch.uint8).numpy().data.cast("B")
            size = block.shape[1] * width
            for number in range(len(block)):
                yield slot.begin + (spans[first + number] + begin) * width, data[number * size : (number + 1) * size]


def _runs(shard: WeightShard) -> tuple[list[int], int]:
    """Cut a box into runs of elements that lie together in the whole parameter: the offset of each there, and their length.

    >>> _runs(WeightShard("w", (4, 3), (2, 0), torch.zeros(2, 3)))  # whole rows are one run
    ([6], 6)
    >>> _runs(WeightShard("w", (2, 4), (0, 2), torch.zeros(2, 2)))
    ([2, 6], 2)
    """
    shape, whole = tuple(shard.tensor.shape), tuple(shard.global_shape)
    cut = len(shape)  # every dim from here on is held whole
    while cut and shape[cut - 1] == whole[cut - 1]:
        cut -= 1
    outer = max(cut - 1, 0)
    strides = [prod(whole[dim + 1 :]) for dim in range(len(whole))]
    spans = [sum(offset * stride for offset, stride in zip(shard.offsets, strides, strict=True))]
    for dim in range(outer):
        spans = [span + place * strides[dim] for span in spans for place in range(shape[dim])]
    return spans, prod(shape[outer:])


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done
