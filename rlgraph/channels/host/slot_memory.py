"""The slots of a channel: their memory, how a peer maps it, and where each column of a message is in it.

A slot's host memory is an unnamed segment behind a file handle, freed when the last process that maps it ends. It contains a msgpack header
with the text columns, then the tensors as aligned raw bytes. Columns on a GPU are in GPU memory: the header holds the handle with which a
reader on the same host maps it; between hosts the bytes are sent to memory of the reader's GPU. A reader copies from a GPU's mapped memory
with the copy engines, over NVLink: no kernel of either side waits for the other, and neither needs to see the other's device.
"""

import fcntl
import math
import mmap
import os
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import torch

from rlgraph.channels.host.connection import UNREADABLE, ProtocolError
from rlgraph.columns import Column, Columns

ALIGNMENT = 64  # a cache line, and enough for any dtype
PLAIN = re.compile(r"bool|u?int(8|16|32|64)|b?float\w+|complex\w+")  # other dtypes are not raw bytes: quantized ones, bits, sub-bytes
DTYPES = {
    name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype) and PLAIN.fullmatch(name) and "x2" not in name
}


def new_segment(channel: str, size: int) -> tuple[int, mmap.mmap]:
    """Allocate a segment of at least `size` bytes and return its handle. Pages that are never touched use no memory."""
    capacity = max(mmap.PAGESIZE, 1 << (size - 1).bit_length())
    name = f"rlgraph {channel}".replace("\0", " ").encode()[:200].decode(errors="ignore")  # within the limits of the system
    handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, capacity)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return handle, mmap.mmap(handle, capacity)
    except BaseException:
        os.close(handle)
        raise


def segment_of(channel: str, segment: mmap.mmap | None, size: int) -> tuple[int | None, mmap.mmap]:
    """Reuse a slot's memory if it holds `size` bytes, otherwise allocate new memory and return its handle too."""
    return (None, segment) if segment is not None and len(segment) >= size else new_segment(channel, size)


def map_segment(handle: int, size: int) -> mmap.mmap:
    """Map memory that a peer sent, and close its handle.

    Raises ProtocolError for memory that is smaller than announced or can shrink: touching it would kill this process.
    """
    try:
        if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(handle).st_size < size:
            raise ProtocolError(f"memory that does not hold the {size} bytes announced")
        return mmap.mmap(handle, size)
    except (ValueError, OverflowError) as error:
        raise ProtocolError(f"memory that cannot be mapped: {error}") from error
    finally:
        os.close(handle)


class Handle(msgspec.Struct, tag="device", array_like=True):
    """Device memory as exported by its owner: `size` bytes, and the data that CUDA needs to map them."""

    size: int
    memory: bytes
    allocation_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_needed: bool


@dataclass(frozen=True)
class Segment:
    """Memory of this host, as bytes, and the file handle with which others map it."""

    bytes: torch.Tensor
    handle: int

    @property
    def size(self) -> int:
        return self.bytes.numel()

    @classmethod
    def new(cls, channel: str, size: int) -> "Segment":
        handle, memory = new_segment(channel, size)
        return cls(torch.frombuffer(memory, dtype=torch.uint8), handle)


class DeviceMemory:
    """Memory of this process on a GPU, with the handle with which others map it."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.handle = handle_of(self.bytes)


# Memory of other processes that is mapped here, by address, while its `MappedMemory` exists.
_foreign_segments: dict[int, tuple[weakref.ref[torch.Tensor], Handle]] = {}


def handle_of(tensor: torch.Tensor) -> Handle:
    """Export the GPU memory of a tensor. For memory of another process, return its owner's handle."""
    storage = tensor.untyped_storage()
    memory, handle = _foreign_segments.get(storage.data_ptr(), (None, None))
    if memory is not None and handle is not None and memory() is not None:  # otherwise this process has reused the address
        return handle
    _, exported, allocation, offset, counter, counter_offset, event, needed = storage._share_cuda_()
    return Handle(storage.nbytes(), exported, allocation, offset, counter, counter_offset, event, needed)


@dataclass
class MappedMemory:
    """The device memories of a peer that this process has mapped, by handle."""

    memories: dict[tuple[bytes, int], torch.Tensor] = field(default_factory=dict)

    def open(self, handle: Handle) -> torch.Tensor:
        """Map the peer's memory, as bytes to copy from."""
        key = (handle.memory, handle.offset)
        if key not in self.memories:
            here = torch.cuda.current_device()  # the mapping belongs to this device, wherever the memory is
            storage = torch.UntypedStorage._new_shared_cuda(
                here,
                handle.memory,
                handle.allocation_bytes,
                handle.offset,
                handle.counter,
                handle.counter_offset,
                handle.event,
                handle.event_needed,
            )
            self.memories[key] = torch.empty(0, dtype=torch.uint8, device=f"cuda:{here}").set_(storage)[: handle.size]
            _foreign_segments[storage.data_ptr()] = (weakref.ref(self.memories[key]), handle)
        return self.memories[key]


class Malformed(ValueError):
    """A header that no writer can have written."""


class TensorColumn(msgspec.Struct, tag="tensor", array_like=True):
    """The place of a tensor: `offset` in bytes from the end of the aligned header, or from the start of the device memory."""

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
    name: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int


Signature: TypeAlias = tuple[torch.dtype | None, list[tuple[str, torch.Size, torch.dtype, torch.device]]]


def signature(columns: Columns, dtype: torch.dtype | None) -> Signature | None:
    """Compute the key of a message's layout; None if it has text, which is part of the header."""
    tensors = [(name, c.shape, c.dtype, c.device) for name, c in columns.items() if isinstance(c, torch.Tensor)]
    return (dtype, tensors) if len(tensors) == len(columns) else None


class MessageLayout:
    """The place of every column of a message. Floating-point columns are cast to `dtype`.

    Columns on devices of type `apart` use `device_size` bytes on their device, all others are in host memory. All messages with the same
    `signature` share a layout.
    """

    def __init__(self, columns: Columns, dtype: torch.dtype | None, *, apart: str | None = "cuda") -> None:
        self.signature = signature(columns, dtype)
        self.device = torch.device("cpu")
        self.elsewhere = any(isinstance(column, torch.Tensor) and column.device.type != "cpu" for column in columns.values())
        self.host: list[_Place] = []
        self.apart: list[_Place] = []
        self._entries: _Header = []
        ends = {False: 0, True: 0}
        for name, column in columns.items():
            if not isinstance(column, torch.Tensor):
                self._entries.append(TextColumn(name, column))
                continue
            stored = dtype if dtype is not None and column.is_floating_point() else column.dtype
            on_device = column.device.type == apart
            place = _Place(name, stored, column.shape, ends[on_device])
            self._entries.append(TensorColumn(name, str(stored).removeprefix("torch."), tuple(column.shape), place.offset, on_device))
            (self.apart if on_device else self.host).append(place)
            ends[on_device] = _align_size(place.offset + column.numel() * stored.itemsize)
            if on_device:
                self.device = column.device
        # Columns without an element also need device memory, since it determines their device.
        self.host_size, self.device_size = ends[False], ends[True] or (ALIGNMENT if self.apart else 0)
        self.tensors = len(self.host) + len(self.apart)

    def header(self, handle: Handle | None) -> bytes:
        """Encode the header of a slot whose GPU memory has this handle."""
        return msgspec.msgpack.encode([*self._entries, *([] if handle is None else [handle])])


class WriteView:
    """The memory of one slot, arranged for writing: messages of this layout are only copied into it. `memory` is its memory on a GPU."""

    def __init__(self, layout: MessageLayout, header: bytes, segment: mmap.mmap, memory: torch.Tensor | None) -> None:
        self.layout, self.header = layout, len(header)
        self.size = size_of(layout, header)
        segment[: self.header] = header
        start = _align_size(self.header)
        self._views = {p.name: _view(segment, p.dtype, p.shape, start + p.offset) for p in layout.host}
        if memory is not None:
            self._views |= {p.name: device_view(memory, p.dtype, p.shape, p.offset) for p in layout.apart}
        self._buckets: tuple[int | None, list[Bucket]] = (0, [])

    def write(self, columns: Columns, bucket_bytes: int | None = None) -> Iterator[int]:
        """Copy every tensor into the slot, bucket by bucket, cast and made contiguous on the way.

        Yields the number of tensors written so far, in the order of the columns, after each bucket.
        """
        if self._buckets[0] != bucket_bytes:
            views = [(name, self._views[name]) for name, column in columns.items() if isinstance(column, torch.Tensor)]
            self._buckets = (bucket_bytes, _in_buckets(views, bucket_bytes))
        under_way: list[tuple[int, torch.cuda.Event]] = []
        for bucket in self._buckets[1]:
            event = bucket.copy(columns)
            if event is not None:
                under_way.append((bucket.end, event))
            else:
                yield bucket.end
        for end, event in under_way:
            event.synchronize()
            yield end

    def write_parts(self, columns: Columns, part_bytes: int) -> Iterator[tuple[int, int]]:
        """Copy every tensor into the slot, all in host memory, and a large tensor in parts.

        Yields after each part the number of bytes and of tensors in the slot that are written.
        """
        if self._buckets[0] != part_bytes:
            self._buckets = (part_bytes, _in_buckets([(place.name, self._views[place.name]) for place in self.layout.host], part_bytes))
        begin, ends = _align_size(self.header), [place.offset + self._views[place.name].nbytes for place in self.layout.host]
        for bucket in self._buckets[1]:
            view, source = bucket.views[0][1], columns[bucket.views[0][0]]
            assert isinstance(source, torch.Tensor)
            count = part_bytes // view.itemsize
            if len(bucket.views) == 1 and view.numel() > count and source.is_contiguous() and source.dtype == view.dtype:
                flat, data = view.view(-1), source.detach().view(-1)
                for at in range(0, view.numel(), count):
                    flat[at : at + count].copy_(data[at : at + count])
                    if (left := view.numel() - at - count) > 0:
                        yield begin + ends[bucket.end - 1] - left * view.itemsize, bucket.end - 1
            else:
                bucket.copy(columns)
            if bucket is not self._buckets[1][-1]:
                yield begin + ends[bucket.end - 1], bucket.end
        yield self.size, self.layout.tensors


@dataclass(frozen=True)
class Bucket:
    """Tensors on one kind of device that are copied together; after them the first `end` tensors are written."""

    end: int
    views: list[tuple[str, torch.Tensor]]

    def copy(self, columns: Columns) -> torch.cuda.Event | None:
        """Start the copies; return the event that completes them on a GPU, None if they are done."""
        with torch.no_grad():
            torch._foreach_copy_([view for _, view in self.views], [columns[name] for name, _ in self.views])  # type: ignore[misc] # all are tensors
        device = self.views[0][1].device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _in_buckets(views: Sequence[tuple[str, torch.Tensor]], bucket_bytes: int | None) -> list[Bucket]:
    """Group the views into buckets of at least `bucket_bytes`; None makes one bucket for each device."""
    buckets: list[Bucket] = []
    first, size = 0, 0
    for end, (_, view) in enumerate(views, 1):
        size += view.nbytes
        full = bucket_bytes is not None and size >= bucket_bytes
        if full or end == len(views) or views[end][1].device != view.device:
            buckets.append(Bucket(end, list(views[first:end])))
            first, size = end, 0
    return buckets


def size_of(layout: MessageLayout, header: bytes) -> int:
    """The bytes of a slot in host memory: its header and the columns in host memory."""
    return _align_size(len(header)) + layout.host_size


@dataclass(frozen=True)
class ReadView:
    """The columns read from a slot. A later message with the same header and memory reuses the views."""

    header: bytes
    size: int
    segment: mmap.mmap
    carried: torch.Tensor | None
    columns: dict[str, Column]

    def matches(self, header: bytes, size: int, segment: mmap.mmap, carried: torch.Tensor | None) -> bool:
        """Whether a message has the same place and layout as the last one."""
        return self.segment is segment and self.carried is carried and self.size == size and self.header == header


def read(slot: mmap.mmap, header: int, size: int, memories: MappedMemory, carried: torch.Tensor | None = None) -> dict[str, Column]:
    """Read the columns behind a header of `header` bytes; tensors are views of the slot, or of the `carried` memory.

    Raises Malformed if a column leaves the `size` bytes of the message.
    """
    try:
        entries = _decoder.decode(memoryview(slot)[:header])
    except UNREADABLE as error:
        raise Malformed(f"its header cannot be read ({error})") from error
    memory = next((map_memory(entry, memories) for entry in entries if isinstance(entry, Handle)), carried)
    start = _align_size(header)
    columns: dict[str, Column] = {}
    for entry in entries:
        if isinstance(entry, TextColumn):
            columns[entry.name] = entry.rows
        elif isinstance(entry, TensorColumn):
            if not entry.on_device:
                _check(entry, size - start)
                columns[entry.name] = _view(slot, DTYPES[entry.dtype], torch.Size(entry.shape), start + entry.offset)
            elif memory is not None:
                _check(entry, memory.numel())
                columns[entry.name] = device_view(memory, DTYPES[entry.dtype], torch.Size(entry.shape), entry.offset)
            else:
                raise Malformed(f"column '{entry.name}' lies on a GPU, and no memory of one came with the message")
    return columns


def map_memory(handle: Handle, memories: MappedMemory) -> torch.Tensor:
    try:
        return memories.open(handle)
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
    """View a tensor that begins `offset` bytes into a flat memory."""
    with torch.inference_mode(False):  # a slot keeps its views, in any mode of the caller
        return memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _view(slot: mmap.mmap, dtype: torch.dtype, shape: torch.Size, offset: int) -> torch.Tensor:
    count = shape.numel()
    with torch.inference_mode(False):  # autograd must accept the views, in any mode of the caller
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(slot, dtype=dtype, count=count, offset=offset).view(shape)


def _align_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
