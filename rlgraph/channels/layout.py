"""How columns lie in a slot: a msgpack header, which holds the text, then the tensors as aligned raw bytes.

Columns on a GPU lie in memory of that GPU instead: the header holds the handle under which a reader of the same host maps it,
or, between hosts, its bytes are carried into memory of the reader's GPU.
"""

import math
import re
from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

import msgspec
import torch

from rlgraph.channels.device import Handle, Mapped
from rlgraph.channels.link import UNREADABLE
from rlgraph.columns import Column, Columns

ALIGNMENT = 64  # a cache line, and enough for any dtype
PLAIN = re.compile(r"bool|u?int(8|16|32|64)|b?float\w+|complex\w+")  # other dtypes are no raw bytes: quantized ones, bits, sub-bytes
DTYPES = {
    name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype) and PLAIN.fullmatch(name) and "x2" not in name
}


class Malformed(ValueError):
    """A header that no writer makes."""


class TensorColumn(msgspec.Struct, tag="tensor", array_like=True):
    """Where a tensor lies: `offset` in bytes from the end of the aligned header, or from the start of the device memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    on_device: bool


class TextColumn(msgspec.Struct, tag="text", array_like=True):
    name: str
    rows: list[str]


_Header: TypeAlias = list[TensorColumn | TextColumn | Handle]
_decoder = msgspec.msgpack.Decoder(_Header)
_MOST = 1 << 48  # elements


@dataclass(frozen=True)
class _Place:
    tensor: torch.Tensor
    dtype: torch.dtype
    offset: int


class Layout:
    """The place of every column of one message. Floating-point columns become `dtype`; `device_size` bytes lie on a device:
    where there are any, `seal` is called with their memory before anything else.

    Those are the columns on devices of type `apart`; all others are copied to host memory.
    """

    def __init__(self, columns: Columns, dtype: torch.dtype | None, *, apart: str | None = "cuda") -> None:
        self._entries: _Header = []
        self._host: list[_Place] = []
        self._device: list[_Place] = []
        ends = {False: 0, True: 0}
        for name, column in columns.items():
            if not isinstance(column, torch.Tensor):
                self._entries.append(TextColumn(name, column))
                continue
            stored = dtype if dtype is not None and column.is_floating_point() else column.dtype
            on_device = column.device.type == apart
            place = _Place(column.detach(), stored, ends[on_device])
            self._entries.append(TensorColumn(name, str(stored).removeprefix("torch."), tuple(column.shape), place.offset, on_device))
            (self._device if on_device else self._host).append(place)
            ends[on_device] = _aligned(place.offset + column.numel() * stored.itemsize)
        self.device_size = ends[True]
        self._host_size = ends[False]
        if not self.device_size:
            self.seal(None, None)

    @property
    def device(self) -> torch.device:
        """The device that the columns of `device_size` lie on."""
        return self._device[0].tensor.device

    def seal(self, memory: torch.Tensor | None, handle: Handle | None) -> None:
        """Fix the header; `header` and `size` are its bytes and those of the slot in host memory."""
        self._memory = memory
        self._header = msgspec.msgpack.encode([*self._entries, *([] if handle is None else [handle])])
        self.header = len(self._header)
        self.size = _aligned(self.header) + self._host_size

    def write(self, slot: mmap) -> None:
        """Copy the header and every column into the slot, each tensor once, cast and made contiguous on the way."""
        slot[: self.header] = self._header
        start = _aligned(self.header)
        for place in self._host:
            _view(slot, place.dtype, place.tensor.shape, start + place.offset).copy_(place.tensor)
        if self._memory is not None:
            views = [device_view(self._memory, p.dtype, p.tensor.shape, p.offset) for p in self._device]
            with torch.no_grad():
                torch._foreach_copy_(views, [p.tensor for p in self._device])
            if self._memory.is_cuda:
                torch.cuda.current_stream(self.device).synchronize()  # a reader may copy as soon as it is told


def read(slot: mmap, header: int, size: int, mapped: Mapped, carried: torch.Tensor | None = None) -> dict[str, Column]:
    """Return the columns that were written with a header of so many bytes; tensors are views of the slot, or of what was `carried`.

    Raises Malformed for a header whose columns do not lie within the `size` bytes of the message.
    """
    try:
        entries = _decoder.decode(memoryview(slot)[:header])
    except UNREADABLE as error:
        raise Malformed(f"its header cannot be read ({error})") from error
    memory = next((_mapped(entry, mapped) for entry in entries if isinstance(entry, Handle)), carried)
    start = _aligned(header)
    columns: dict[str, Column] = {}
    for entry in entries:
        if isinstance(entry, TextColumn):
            columns[entry.name] = entry.rows
        elif isinstance(entry, TensorColumn):
            on_device = entry.on_device and memory is not None
            _check(entry, memory.numel() if on_device and memory is not None else size - start)
            dtype, shape = DTYPES[entry.dtype], torch.Size(entry.shape)
            if on_device and memory is not None:
                columns[entry.name] = device_view(memory, dtype, shape, entry.offset)
            else:
                columns[entry.name] = _view(slot, dtype, shape, start + entry.offset)
    return columns


def _mapped(handle: Handle, mapped: Mapped) -> torch.Tensor:
    try:
        return mapped.open(handle)
    except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
        raise Malformed(f"its memory on a GPU cannot be mapped ({error})") from error


def _check(entry: TensorColumn, room: int) -> None:
    if entry.dtype not in DTYPES:
        raise Malformed(f"column '{entry.name}' has the unknown dtype '{entry.dtype}'")
    if any(length < 0 for length in entry.shape) or math.prod(max(length, 1) for length in entry.shape) >= _MOST:
        raise Malformed(f"column '{entry.name}' has the impossible shape {list(entry.shape)}")
    end = entry.offset + math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
    if entry.offset < 0 or entry.offset % ALIGNMENT or (end > room and math.prod(entry.shape)):
        raise Malformed(f"column '{entry.name}' lies at bytes {entry.offset} to {end}, the message has {max(room, 0)}")


def device_view(memory: torch.Tensor, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    """Return the tensor that lies `offset` bytes into a flat memory."""
    return memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _view(slot: mmap, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    count = shape.numel()
    with torch.inference_mode(False):  # views serve autograd whatever mode the caller is in
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
