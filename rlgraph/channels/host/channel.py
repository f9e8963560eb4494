"""Channels between processes: control messages on a socket, columns in unnamed shared memory.

A slot is a memfd segment of the writer, whose handle is sent over the socket. The memory is freed when the last process that maps it
ends, however it ends. Columns on a GPU stay in GPU memory; a reader on any GPU of the host maps them. A channel that also listens at a
port may have readers on other hosts: a relay on each side sends control messages and bytes over TCP. NCCL sends columns on a GPU if it
is the channel's carrier. A reader may pass messages on to readers on its host or on the next one (`open_onward`).
"""

import functools
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

import torch

from rlgraph.channels.api import End, Meter, Site, Statistics, Stop, Taken, Transport, check_channel, check_columns
from rlgraph.channels.host import connection as places
from rlgraph.channels.host import protocol, slot_memory
from rlgraph.channels.host.acceptor import Acceptor
from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.channels.host.encryption import check_encryption
from rlgraph.channels.host.protocol import CarrierName, ControlMessage, Disconnected, Failed, Free, Full, Goodbye, More, Portion
from rlgraph.channels.host.slot_memory import DeviceMemory, Handle, MappedMemory, map_segment, segment_of
from rlgraph.channels.remote.inward import from_writer
from rlgraph.channels.remote.transfer import DEVICES, DeviceBuffers
from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelError, show_value

# The common part of both ends of a host channel.


class HostEnd:
    """Closes and fails an end, and counts. Another thread may call `close` and `fail`."""

    def __init__(self, name: str, role: str, slots: int) -> None:
        self.end = End(name, role)
        self._meter = Meter(slots)
        self._segments: dict[int, mmap.mmap] = {}
        self._stop: Stop | None = None
        self._open = True
        self._lock = threading.Lock()

    def close(self) -> None:
        self._end_with(Goodbye(), Stop("this end"))

    def fail(self, reason: str) -> None:
        self._end_with(Failed(reason[: protocol.MAX_REASON]), Stop("this end", f"failed: {reason}"))

    def statistics(self) -> Statistics:
        return self._meter.statistics()

    def _end_with(self, last: Goodbye | Failed, stop: Stop) -> None:
        with self._lock:
            if self._open:
                self._open, self._stop = False, stop
                self._leave(last)
                self._segments.clear()

    def _leave(self, last: Goodbye | Failed) -> None:
        """Send a last message to the peers, and release everything except the segments."""
        raise NotImplementedError


PART_BYTES = 4 << 20  # large enough that the overhead per part is small


def open_writer(transport: Transport, site: Site) -> "HostWriter":
    addresses = _addresses(transport, site)
    far = not all(map(places.is_path, addresses))  # otherwise readers map the writer's memory, on any device
    carrier = transport.carrier if far else None
    return HostWriter(site.channel, site.slots, site.readers, site.authkey, addresses, carrier, encrypt=site.encrypt and far)


def open_onward(transport: Transport, site: Site) -> Acceptor:
    """Listen for the readers to which a reader will pass messages on; `HostReader` accepts the result."""
    welcome, shared = protocol.Welcome(site.slots, transport.carrier), site.local_readers > 0
    buffers = None if transport.carrier is None else DeviceBuffers.on_current_device(site.channel, transport.carrier, shared=shared)
    addresses = _addresses(transport, site)
    return Acceptor(site.channel, addresses, site.authkey, site.readers, welcome, buffers, encrypt=site.encrypt)


def open_reader(transport: Transport, site: Site) -> "HostReader":
    return HostReader(site.channel, site.authkey, site.address, site.timeout_s, cast(Acceptor | None, site.onward), encrypt=site.encrypt)


def _addresses(transport: Transport, site: Site) -> list[str]:
    """A path for readers on this host, and a port for readers on other hosts."""
    if transport.reach != "hosts":
        return [site.address]
    far = site.local_readers < site.readers
    return [*([site.address] if site.local_readers else []), *([f"{site.host}:0"] if far else [])]


class HostWriter(HostEnd):
    """The writer. It listens at `address` for `readers` readers that know `authkey`.

    An address is a path in a folder of the job for readers on this host, or `host:port` for readers on any host (port 0 chooses a free
    one, which `address` has). Between hosts `carrier="nccl"` sends columns on a GPU from GPU to GPU ("gloo" does the same for host
    memory); without a carrier they go through the memory of both hosts. `encrypt` encrypts traffic to other hosts with TLS.

    The constructor returns at once; the first `put` waits for the readers. Raises ChannelError for an impossible number of slots or
    readers, or an impossible address.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        readers: int,
        authkey: bytes,
        address: str | Sequence[str],
        carrier: CarrierName | None = None,
        *,
        encrypt: bool = False,
    ) -> None:
        check_channel(name, slots, readers)
        addresses = [address] if isinstance(address, str) else address
        self._local = all(places.is_path(one) for one in addresses)  # a relay passes on only whole messages
        for one in addresses:
            places.check_address(name, one, carrier if self._local else None)
        if encrypt and not self._local:
            check_encryption(name, carrier)
        super().__init__(name, "the writer", slots)
        self._readers = readers
        self._free = list(range(slots))
        self._unread: dict[int, list[Connection]] = {}  # for each slot, the readers that have not released it
        self._layout: slot_memory.MessageLayout | None = None  # of the last message
        self._write_views: dict[int, slot_memory.WriteView] = {}  # for each slot, its memory laid out for the last message
        self._device: dict[int, DeviceMemory] = {}  # for each slot, its memory on a GPU that readers of this host map
        shared = any(places.is_path(one) for one in addresses)
        self._buffers = None if carrier is None else DeviceBuffers.on_current_device(name, carrier, shared=shared)
        self._apart = DEVICES[carrier] if carrier is not None else "cuda" if self._local else None
        self._acceptor = Acceptor(name, addresses, authkey, readers, protocol.Welcome(slots, carrier), self._buffers, encrypt=encrypt)
        self.address = self._acceptor.address

    def put(
        self, step: int, columns: Columns, timeout_s: float, *, dtype: torch.dtype | None = None, bucket_bytes: int | None = None
    ) -> None:
        check_columns(self.end, step, columns)
        if self._layout is None or self._layout.signature is None or self._layout.signature != slot_memory.signature(columns, dtype):
            self._layout = slot_memory.MessageLayout(columns, dtype, apart=self._apart)
        self._await(step, timeout_s)
        with self._lock:
            if self._stop is not None:
                raise self.end.stop_error(step, self._stop)
            slot = self._free[-1]  # the most recently used one, whose pages are in the cache
            size = self._send(step, slot, self._layout, columns, self._bucket_bytes(bucket_bytes, self._layout))
            self._free.pop()
            self._unread[slot] = list(self._acceptor.connections)
            self._meter.message(size, self._meter.slots - len(self._free))

    def _send(self, step: int, slot: int, wanted: slot_memory.MessageLayout, columns: Columns, bucket_bytes: int | None) -> int:
        """Fill the slot and notify the readers, with `bucket_bytes` after each bucket; return the message's bytes."""
        view, handle = self._write_views.get(slot), None
        if view is None or view.layout is not wanted:
            view, segment, handle = self._lay(slot, wanted)
        else:
            segment = self._segments[slot]
        try:
            carried = 0 if self._buffers is None else wanted.device_size
            coming = 0 if bucket_bytes is None else wanted.tensors
            full = Full(step, slot, view.header, view.size, 0 if handle is None else len(segment), carried, coming)
            if coming:
                self._tell(full, handle)
            if bucket_bytes is not None and not self._local:
                before = 0
                for size, tensors in view.write_parts(columns, bucket_bytes):
                    self._tell(Portion(slot, size, tensors), more=tensors > before)
                    before = tensors
            else:
                for tensors in view.write(columns, bucket_bytes):
                    if coming:
                        self._tell(More(slot, tensors))
            if not coming:
                self._tell(full, handle)
        finally:
            if handle is not None:
                os.close(handle)
        self._segments[slot], self._write_views[slot] = segment, view
        return view.size + wanted.device_size

    def _bucket_bytes(self, wanted: int | None, of: slot_memory.MessageLayout) -> int | None:
        """The size of buckets such that the control messages of all slots fit into the socket's buffer; None for a single bucket.

        Between hosts it is the size of the parts: one is sent while the next is copied. Only columns in host memory can be sent so.
        """
        size, slots = of.host_size + of.device_size, self._meter.slots
        if not self._local:
            return None if of.elsewhere else protocol.part_bytes(of.host_size, slots, PART_BYTES)
        return None if wanted is None else protocol.bytes_that_fit(size, slots, wanted)

    def _tell(self, message: Full | More | Portion, handle: int | None = None, *, more: bool = False) -> None:
        if isinstance(message, Portion):
            protocol.tell_part(self._acceptor.connections, message, more=more)
        elif isinstance(message, Full):
            news = None if self._buffers is None else self._buffers.news.pop(message.slot, None)
            protocol.tell_full(self._acceptor.connections, message, handle, news)
        else:
            protocol.tell(self._acceptor.connections, message)

    def _lay(self, slot: int, wanted: slot_memory.MessageLayout) -> tuple[slot_memory.WriteView, mmap.mmap, int | None]:
        """Arrange the message in the slot's memory; return the view, the memory, and the memory's handle if it is new."""
        self._write_views.pop(slot, None)
        memory, exported = self._room(slot, wanted) if wanted.device_size else (None, None)
        header = wanted.header(exported)
        size = slot_memory.size_of(wanted, header)
        handle, segment = segment_of(self.end.channel, self._segments.get(slot), size)
        return slot_memory.WriteView(wanted, header, segment, memory), segment, handle

    def _room(self, slot: int, wanted: slot_memory.MessageLayout) -> tuple[torch.Tensor, Handle | None]:
        """The slot's memory on the layout's device, and the handle with which readers on this host map it."""
        if self._buffers is not None:
            new = functools.partial(torch.empty, dtype=torch.uint8, device=wanted.device)
            return self._buffers.of_slot(slot, wanted.device_size, new), None
        if slot not in self._device or self._device[slot].handle.size < wanted.device_size:
            self._device[slot] = DeviceMemory(wanted.device_size, wanted.device)
        return self._device[slot].bytes, self._device[slot].handle

    def _await(self, step: int, timeout_s: float) -> None:
        """Wait for a free slot and all readers, or until the channel has stopped."""
        deadline = time.monotonic() + timeout_s
        self._hear(deadline=0)
        while self._stop is None and not (self._free and self._acceptor.full):
            with self._meter.count_wait():
                heard = self._hear(deadline)
            if not heard and self._stop is None:
                raise self.end.timeout(step, timeout_s, self._state())

    def _hear(self, deadline: float) -> bool:
        """Wait until a reader connects or sends, then receive all messages; return False if the deadline passes first."""
        heard = False
        while self._stop is None and (handles := places.wait_readable(self._acceptor.handles(), deadline)):
            heard, deadline = True, 0
            with self._lock:
                for connection in self._acceptor.news(handles) if self._stop is None else ():
                    self._obey(protocol.receive(connection), connection)
        return heard

    def _obey(self, message: ControlMessage | Disconnected, connection: Connection) -> None:
        if not isinstance(message, Free) or connection not in self._unread.get(message.slot, ()):
            self._stop = self._stop or protocol.stop(message, "a reader", connection)
            return
        self._unread[message.slot].remove(connection)
        if not self._unread[message.slot]:
            self._free.append(message.slot)
            self._meter.use(self._meter.slots - len(self._free))

    def _state(self) -> str:
        if not self._acceptor.full:
            return f"{len(self._acceptor.connections)} of {self._readers} readers have connected; the others were not made, or died before"
        return f"all {self._meter.slots} slots are taken: a reader has stopped, or is slower than this deadline"

    def _leave(self, last: Goodbye | Failed) -> None:
        self._acceptor.send_last(last)
        self._write_views.clear()
        self._device.clear()


class HostReader(HostEnd):
    """A reader of the end that listens at `address`, a writer or a reader that passes messages on; it waits up to `timeout_s` for it.

    If the writer is on another host, it can also pass messages on to the readers of `onward`.

    Raises ChannelTimeout if no writer listens in time, ChannelError if it refuses the authkey.
    """

    def __init__(
        self, name: str, authkey: bytes, address: str, timeout_s: float, onward: Acceptor | None = None, *, encrypt: bool = False
    ) -> None:
        places.check_address(name, address)
        connection, welcome = protocol.connect(name, address, authkey, timeout_s, encrypt=encrypt)
        super().__init__(name, "a reader", welcome.slots)
        buffers = onward.buffers if onward is not None else None
        if buffers is None and welcome.carrier is not None:
            buffers = DeviceBuffers.on_current_device(name, welcome.carrier)
        self._carried = {} if buffers is None else buffers.memories
        self._connection = connection if connection.local else from_writer(name, connection, buffers, onward, welcome.slots)
        self._mapped = MappedMemory()
        self._read_views: dict[int, tuple[slot_memory.ReadView, Taken]] = {}  # for each slot, the last message read there
        self._full: deque[Full] = deque()
        self._there: dict[int, tuple[int, int]] = {}  # for each slot that is being written: tensors that have arrived, and all
        self._taken: deque[tuple[int, Taken]] = deque()

    def take(self, step: int, timeout_s: float) -> dict[str, Column]:
        return self._next(step, timeout_s, whole=True)

    def begin(self, step: int, timeout_s: float) -> dict[str, Column]:
        return self._next(step, timeout_s, whole=False)

    def wait_for_tensors(self, beyond: int, timeout_s: float) -> int:
        slot, taken = self._taken[-1]
        if slot not in self._there:
            return taken.tensors
        self._await(taken.step, timeout_s, lambda: slot not in self._there or self._there[slot][0] > beyond, one_by_one=True)
        if slot in self._there and self._there[slot][0] <= beyond:
            assert self._stop is not None
            raise self.end.stop_error(taken.step, self._stop)
        return self._there[slot][0] if slot in self._there else taken.tensors

    def _next(self, step: int, timeout_s: float, *, whole: bool) -> dict[str, Column]:
        def is_ready() -> bool:
            return bool(self._full) and not (whole and self._full[0].slot in self._there)

        self._await(step, timeout_s, is_ready)
        with self._lock:
            if self._stop is not None and not (is_ready() and self._stop.reason is None):
                raise self.end.stop_error(step, self._stop)
            full = self._full[0]
            if full.step != step:
                raise self.end.defect(step, f"the next message is that of step {full.step}; both ends must count the same steps")
            self._full.popleft()
            try:
                columns, taken = self._read(full)
            except slot_memory.Malformed as error:
                self._stop = Stop(f"the writer ({self._connection.peer})", f"put a malformed message: {error}", self._connection.pid)
                raise self.end.stop_error(step, self._stop) from error
        self._taken.append((full.slot, taken))
        self._meter.message(full.size + full.carried, len(self._taken))
        return columns

    def release(self) -> None:
        if not self._taken:
            raise ChannelError(f"channel '{self.end.channel}', a reader: release() without a message taken; each take is released once")
        slot, taken = self._taken[0]
        if slot in self._there:
            raise self.end.defect(taken.step, "release() while the message is still being written; wait until all of it has arrived")
        self._taken.popleft()
        self._meter.use(len(self._taken))
        with self._lock:
            if self._open:
                protocol.send(self._connection, Free(slot))
        if taken.text or not taken.is_reusable():  # text is in the header, and is decoded for each message
            self._read_views.pop(slot, None)
        taken.check_unchanged(self.end)

    def _read(self, full: Full) -> tuple[dict[str, Column], Taken]:
        """Read the message's columns: the views of the slot's last message, if both have the same layout."""
        segment, carried = self._segments[full.slot], self._carried.get(full.slot) if full.carried else None
        header = segment[: full.header]
        if full.slot in self._read_views and self._read_views[full.slot][0].matches(header, full.size, segment, carried):
            view, taken = self._read_views[full.slot]
            taken.renew(full.step)
        else:
            columns = slot_memory.read(segment, full.header, full.size, self._mapped, carried)
            view, taken = slot_memory.ReadView(header, full.size, segment, carried, columns), Taken(full.step, columns)
            self._read_views[full.slot] = view, taken
        return dict(view.columns), taken

    def _await(self, step: int, timeout_s: float, ready: Callable[[], bool], *, one_by_one: bool = False) -> None:
        """Wait until `ready()` holds, or the channel has stopped.

        With `one_by_one` it leaves later messages unread: each read of the socket hands the interpreter to a thread that computes.
        """
        deadline = time.monotonic() + timeout_s
        if not one_by_one:
            self._hear(0, one_by_one=False)
        while self._stop is None and not ready():
            with self._meter.count_wait():
                heard = self._hear(deadline, one_by_one)
            if not heard and self._stop is None:
                raise self.end.timeout(step, timeout_s, "no message came: the writer has stopped, or is slower than this deadline")

    def _hear(self, deadline: float, one_by_one: bool) -> bool:
        """Wait until the writer sends, then receive one message or all; return False if the deadline passes first."""
        heard = False
        while self._stop is None and not (heard and one_by_one) and places.wait_readable([self._connection.fileno()], deadline):
            heard, deadline = True, 0
            with self._lock:
                if self._stop is None:
                    self._obey(protocol.receive(self._connection))
        return heard

    def _obey(self, message: ControlMessage | Disconnected) -> None:
        if isinstance(message, Full):
            why = self._accept(message)
            if why is None:
                self._full.append(message)
                if message.coming:
                    self._there[message.slot] = (0, message.coming)
                return
            message = why
        if isinstance(message, More) and message.slot in self._there:
            there, of = self._there[message.slot]
            if there < message.tensors < of:
                self._there[message.slot] = (message.tensors, of)
                return
            if message.tensors == of:
                del self._there[message.slot]
                return
        self._stop = protocol.stop(message, "the writer", self._connection)

    def _accept(self, full: Full) -> Disconnected | None:
        """Map the slot's new memory, if there is any; return the fault of the message, or that the writer died meanwhile."""
        try:
            if full.segment:
                self._segments[full.slot] = map_segment(self._connection.receive_handle(), full.segment)  # views keep the old memory alive
            if full.memory:
                self._carried[full.slot] = self._map_memory(full.memory)
            held = {f.slot for f in self._full} | {slot for slot, _ in self._taken}
            if full.slot in held or not full.header <= full.size <= len(self._segments.get(full.slot, b"")):
                raise ProtocolError(f"{show_value(full)}, which fits no free slot")
        except (EOFError, OSError, slot_memory.Malformed) as error:
            return protocol.disconnect_message(error)
        return None

    def _map_memory(self, memory: Handle | int) -> torch.Tensor:
        if isinstance(memory, Handle):
            return slot_memory.map_memory(memory, self._mapped)
        return torch.frombuffer(map_segment(self._connection.receive_handle(), memory), dtype=torch.uint8)

    def _leave(self, last: Goodbye | Failed) -> None:
        protocol.send(self._connection, last)
        self._connection.close()
        self._full.clear()
        self._read_views.clear()
