"""The layout of exported weights, known before any is written: which rank writes its boxes to which bytes of which file."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import msgspec
import torch

from rlgraph.channels.weights.shards import WeightShard

# The layout of exported weights: which safetensors file holds a parameter, and at which byte, before any weight is written.
#
# Every rank writes its own boxes to these places, so no rank needs what another one holds.

Numbers: TypeAlias = tuple[int, ...]
ExportDtype: TypeAlias = Literal["bfloat16", "float32"]
AdapterForm: TypeAlias = Literal["merged", "apart"]  # of an export of a model that trained an adapter
DTYPES: Mapping[str, tuple[str, torch.dtype]] = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
MOST_FILE_BYTES = 5_000_000_000  # as hubs ask for; a larger parameter gets a file of its own
ALIGNMENT = 8  # of the first tensor, as in files that safetensors writes
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

assert set(DTYPES) == set(get_args(ExportDtype))


class ShardBox(msgspec.Struct, frozen=True, array_like=True):
    """A box of a parameter that a rank holds, without its tensor."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    size: tuple[int, ...]


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """The place of a parameter: it begins at byte `begin` of file number `file`. `source` is the trainer's name of it."""

    name: str
    source: str
    shape: Numbers
    file: int
    begin: int


class ExportFile(msgspec.Struct, frozen=True, array_like=True):
    """A safetensors file: its name, its header with the 8 bytes of length in front, and its size."""

    name: str
    header: bytes
    bytes: int


class ExportLayout(msgspec.Struct, frozen=True, array_like=True):
    """All files of an export and the places of its parameters, in `dtype`. It travels to the ranks that write.

    >>> layout = plan_files({"norm.weight": ("norm.weight", (4,)), "head.weight": ("head.weight", (2, 4))}, "bfloat16")
    >>> [(slot.name, slot.begin - layout.slots[0].begin) for slot in layout.slots]
    [('head.weight', 0), ('norm.weight', 16)]
    """

    dtype: ExportDtype
    files: list[ExportFile]
    slots: list[Slot]

    @property
    def bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.bytes for file in self.files)

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(prod(slot.shape) for slot in self.slots)

    def index(self) -> str:
        """Write the index of the files, as JSON."""
        total = self.bytes - sum(len(file.header) for file in self.files)
        places = {slot.name: self.files[slot.file].name for slot in self.slots}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def plan_files(
    parameters: Mapping[str, tuple[str, Numbers]], dtype: ExportDtype, most_bytes: int = MOST_FILE_BYTES, single: str = SINGLE
) -> ExportLayout:
    """Plan the files of parameters, given by their exported names as (trainer's name, shape): layer 2 before layer 10.

    A file alone has the name `single`; several are numbered, as `model-00001-of-00002.safetensors`.
    """
    width = DTYPES[dtype][1].itemsize
    groups: list[list[str]] = []
    size = most_bytes + 1
    for name in sorted(parameters, key=_natural):
        own = prod(parameters[name][1]) * width
        if size + own > most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += own
    files, slots = [], []
    for number, names in enumerate(groups):
        title = single if len(groups) == 1 else f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        header, ends = _header({name: parameters[name][1] for name in names}, dtype)
        begins = [0, *ends[:-1]]
        slots += [Slot(name, *parameters[name], number, len(header) + begin) for name, begin in zip(names, begins, strict=True)]
        files.append(ExportFile(title, header, len(header) + ends[-1]))
    return ExportLayout(dtype, files, slots)


def _header(shapes: Mapping[str, Numbers], dtype: ExportDtype) -> tuple[bytes, Sequence[int]]:
    """Write the header of a file, and where each of its tensors ends behind it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends: list[int] = []
    for name, shape in shapes.items():
        begin = ends[-1] if ends else 0
        ends.append(begin + prod(shape) * DTYPES[dtype][1].itemsize)
        entries[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [begin, ends[-1]]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


# Write the boxes of parameters that one rank holds to their places in the files of an export.

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
