"""How columns lie in a slot: a msgpack header, which holds the text, then the tensors as aligned raw bytes.

Columns on a GPU lie in memory of that GPU instead, and the header holds the handle under which a reader maps it.
"""

from dataclasses import dataclass
from mmap import mmap
from typing import TypeAlias

import msgspec
import torch

from rlgraph.channels.device import DeviceMemory, Handle, Mapped
from rlgraph.columns import Column, Columns

ALIGNMENT = 64  # a cache line, and enough for any dtype


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


@dataclass(frozen=True)
class _Place:
    tensor: torch.Tensor
    dtype: torch.dtype
    offset: int


class Layout:
    """The place of every column of one message. Floating-point columns become `dtype`; `device_size` bytes lie on a GPU."""

    def __init__(self, columns: Columns, dtype: torch.dtype | None) -> None:
        self._entries: _Header = []
        self._host: list[_Place] = []
        self._device: list[_Place] = []
        ends = {False: 0, True: 0}
        for name, column in columns.items():
            if not isinstance(column, torch.Tensor):
                self._entries.append(TextColumn(name, column))
                continue
            stored = dtype if dtype is not None and column.is_floating_point() else column.dtype
            place = _Place(column.detach(), stored, ends[column.is_cuda])
            self._entries.append(TensorColumn(name, str(stored).removeprefix("torch."), tuple(column.shape), place.offset, column.is_cuda))
            (self._device if column.is_cuda else self._host).append(place)
            ends[column.is_cuda] = _aligned(place.offset + column.numel() * stored.itemsize)
        self.device_size = ends[True]
        self._host_size = ends[False]
        self.seal(None)

    @property
    def device(self) -> torch.device:
        """The GPU that the columns of `device_size` lie on."""
        return self._device[0].tensor.device

    def seal(self, memory: DeviceMemory | None) -> None:
        """Fix the header; `header` and `size` are its bytes and those of the slot in host memory."""
        self._memory = memory
        self._header = msgspec.msgpack.encode([*self._entries, *([] if memory is None else [memory.handle])])
        self.header = len(self._header)
        self.size = _aligned(self.header) + self._host_size

    def write(self, slot: mmap) -> None:
        """Copy the header and every column into the slot, each tensor once, cast and made contiguous on the way."""
        slot[: self.header] = self._header
        start = _aligned(self.header)
        for place in self._host:
            _view(slot, place.dtype, place.tensor.shape, start + place.offset).copy_(place.tensor)
        if self._memory is not None:
            views = [device_view(self._memory.bytes, p.dtype, p.tensor.shape, p.offset) for p in self._device]
            with torch.no_grad():
                torch._foreach_copy_(views, [p.tensor for p in self._device])
            torch.cuda.current_stream(self.device).synchronize()  # a reader may copy as soon as it is told


def read(slot: mmap, header: int, mapped: Mapped) -> dict[str, Column]:
    """Return the columns that were written with a header of so many bytes; tensors are views of the slot."""
    entries = _decoder.decode(memoryview(slot)[:header])
    memory = next((mapped.open(entry) for entry in entries if isinstance(entry, Handle)), None)
    start = _aligned(header)
    columns: dict[str, Column] = {}
    for entry in entries:
        if isinstance(entry, TextColumn):
            columns[entry.name] = entry.rows
        elif isinstance(entry, TensorColumn):
            dtype, shape = getattr(torch, entry.dtype), torch.Size(entry.shape)
            if entry.on_device and memory is not None:
                columns[entry.name] = device_view(memory, dtype, shape, entry.offset)
            else:
                columns[entry.name] = _view(slot, dtype, shape, start + entry.offset)
    return columns


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
