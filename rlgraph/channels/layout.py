"""How columns lie in a slot: a msgpack header, which holds the text, then the tensors as aligned raw bytes."""

from mmap import mmap
from typing import TypeAlias

import msgspec
import torch

from rlgraph.columns import Column, Columns

ALIGNMENT = 64  # a cache line, and enough for any dtype


class TensorColumn(msgspec.Struct, tag="tensor", array_like=True):
    """Where a tensor lies: `offset` in bytes from the end of the aligned header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class TextColumn(msgspec.Struct, tag="text", array_like=True):
    name: str
    rows: list[str]


_Header: TypeAlias = list[TensorColumn | TextColumn]
_decoder = msgspec.msgpack.Decoder(_Header)


class Layout:
    """The place of every column of one message. `header` and `size` are bytes; floating-point columns become `dtype`."""

    def __init__(self, columns: Columns, dtype: torch.dtype | None) -> None:
        entries: _Header = []
        self._tensors: list[tuple[torch.Tensor, torch.dtype, int]] = []
        offset = 0
        for name, column in columns.items():
            if isinstance(column, torch.Tensor):
                stored = dtype if dtype is not None and column.is_floating_point() else column.dtype
                entries.append(TensorColumn(name, str(stored).removeprefix("torch."), tuple(column.shape), offset))
                self._tensors.append((column.detach(), stored, offset))
                offset = _aligned(offset + column.numel() * stored.itemsize)
            else:
                entries.append(TextColumn(name, column))
        self._header = msgspec.msgpack.encode(entries)
        self.header = len(self._header)
        self.size = _aligned(self.header) + offset

    def write(self, slot: mmap) -> None:
        """Copy the header and every column into the slot, each tensor once, cast and made contiguous on the way."""
        slot[: self.header] = self._header
        start = _aligned(self.header)
        for tensor, stored, offset in self._tensors:
            _view(slot, stored, tensor.shape, start + offset).copy_(tensor)


def read(slot: mmap, header: int) -> dict[str, Column]:
    """Return the columns that were written with a header of so many bytes; tensors are views of the slot."""
    start = _aligned(header)
    return {
        entry.name: entry.rows
        if isinstance(entry, TextColumn)
        else _view(slot, getattr(torch, entry.dtype), torch.Size(entry.shape), start + entry.offset)
        for entry in _decoder.decode(memoryview(slot)[:header])
    }


def _view(slot: mmap, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    count = shape.numel()
    with torch.inference_mode(False):  # views serve autograd whatever mode the caller is in
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset).view(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
