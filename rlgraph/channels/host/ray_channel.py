"""The transport "ray" sends columns through the channels of Ray's Compiled Graphs, in shared memory and between GPUs."""

import contextlib
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.experimental.channel.common import ChannelContext
from ray.experimental.channel.communicator import Communicator
from ray.experimental.channel.shared_memory_channel import Channel, ReaderRefInfo, SharedMemoryType
from ray.experimental.channel.torch_tensor_accelerator_channel import _TorchTensorAcceleratorChannel
from ray.experimental.channel.torch_tensor_type import TorchTensorType
from ray.experimental.channel.utils import get_self_actor
from torch._C._distributed_c10d import FileStore

from rlgraph.channels.api import Site, Stop, Taken, Transport
from rlgraph.channels.host import slot_memory
from rlgraph.channels.host.channel import HostReader, HostWriter
from rlgraph.channels.host.connection import Connection
from rlgraph.channels.host.protocol import CarrierName, ControlMessage, Disconnected, Failed, Full, Goodbye, KeyValue, send
from rlgraph.channels.host.slot_memory import new_segment
from rlgraph.channels.remote.transfer import DEVICES, DeviceBuffers, Gloo, Nccl, PairComm, run_watched
from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelBroken, ChannelError

# Columns through the channels of Ray's Compiled Graphs: a buffer of Ray's shared memory for each slot of the plan.
#
# Ray carries the bytes. The control messages (connected, full, free, why an end stopped) use the connection of every host channel,
# because Ray has none: its reader polls with most of a core and does not notice a peer's death. Three rules avoid Ray's defects. A message
# never exceeds its buffer, since Ray never frees a buffer that it enlarges; a larger message gets a new channel of twice the size. A reader
# copies each message and releases Ray's buffer, which a view that outlives the message would hold forever. All ends are on one host,
# since a channel of Ray between hosts can hang.

ROOM = 1.25  # size of a new buffer relative to its first message
LEAST_BYTES = 4096
CLEANUP_TIMEOUT_S = 30.0  # for cleanup by Ray, when the channel has ended


def open_writer(transport: Transport, site: Site) -> "RayWriter":
    return RayWriter(site)


def open_reader(transport: Transport, site: Site) -> "RayReader":
    return RayReader(site)


class RayWriter(HostWriter):
    """The writer; all its readers are processes of the same Ray on this host.

    Raises ChannelError if Ray did not start this process.
    """

    def __init__(self, site: Site) -> None:
        _check_ray(site.channel)
        super().__init__(site.channel, site.slots, site.readers, site.authkey, site.address)
        self._apart = None  # columns on a GPU go through host memory
        self._site = site
        self._channels: dict[int, tuple[Any, int]] = {}  # for each slot, Ray's channel and the bytes that its buffer holds

    def _send(self, step: int, slot: int, wanted: slot_memory.MessageLayout, columns: Columns, bucket_bytes: int | None) -> int:
        """Write the message into Ray's buffer of the slot, then notify the readers, with the name of the buffer if it is new."""
        header = wanted.header(None)
        size = slot_memory.size_of(wanted, header)
        message = (header, size - wanted.host_size, _raw(wanted, columns), self._parts(wanted))
        packed = ray._private.worker.global_worker.get_serialization_context().serialize(message)
        needed = packed.total_bytes + len(packed.metadata)
        channel, room = self._channels.get(slot, (None, 0))
        new = needed > room
        if new:
            room = max(int(needed * ROOM), 2 * room, LEAST_BYTES)
            channel = self._make(room)
            self._channels[slot] = channel, room
        with in_words(f"channel '{self.end.channel}', the writer, step {step}"):
            channel.write(packed, CLEANUP_TIMEOUT_S)
        name = channel._writer_ref.binary()
        handle, segment = new_segment(self.end.channel, len(name)) if new else (None, b"")
        if isinstance(segment, mmap.mmap):
            segment[: len(name)] = name
        try:
            self._tell(Full(step, slot, len(name), len(name), len(segment), carried=size + wanted.device_size), handle)
        finally:
            if handle is not None:
                os.close(handle)
        self._after(slot, wanted, columns)
        return size + wanted.device_size

    def _parts(self, wanted: slot_memory.MessageLayout) -> tuple[Any, ...]:
        """The entries of the message besides its bytes in host memory."""
        return ()

    def _after(self, slot: int, wanted: slot_memory.MessageLayout, columns: Columns) -> None:
        """Send the columns that do not go through host memory, after the readers were notified of the message."""

    def _make(self, size: int) -> Any:
        """Make a channel of Ray with a buffer of this size, for each process that reads."""
        processes = len({connection.pid for connection in self._acceptor.connections})
        with in_words(f"channel '{self.end.channel}', the writer, a slot of {size / 2**20:.1f} MiB"):
            return Channel(self_actor(), [(any_actor(self._site), node_id())] * processes, SharedMemoryType(buffer_size_bytes=size))


class RayReader(HostReader):
    """A reader. Raises ChannelError if Ray did not start this process."""

    def __init__(self, site: Site) -> None:
        _check_ray(site.channel)
        super().__init__(site.channel, site.authkey, site.address, site.timeout_s)
        self._ray_buffers: RayBuffers = site.here.setdefault(f"Ray's buffers of {site.address}", RayBuffers(site))
        self._ray_buffers.readers += 1

    def _accept(self, full: Full) -> Disconnected | None:
        why = super()._accept(full)
        if why is None and full.segment:
            self._ray_buffers.connect(full.slot, self._segments[full.slot][: full.size])
            self._segments[full.slot] = mmap.mmap(-1, mmap.PAGESIZE)
        return why

    def _read(self, full: Full) -> tuple[dict[str, Column], Taken]:
        """Copy the message out of Ray's buffer, which the next message then uses, and arrange it as in a slot."""
        header, start, raw, parts = self._ray_buffers.take(full)
        apart = self._beside(full, parts)
        size = full.carried - apart
        if len(self._segments[full.slot]) < size:
            self._segments[full.slot] = mmap.mmap(-1, size)
        memory = self._segments[full.slot]
        memory[: len(header)] = header
        for offset, column in raw:
            np.copyto(np.frombuffer(memory, np.uint8, len(column), start + offset), column)
        return super()._read(Full(full.step, full.slot, len(header), size, 0, apart))

    def _beside(self, full: Full, parts: tuple[Any, ...]) -> int:
        """Receive the columns that do not go through host memory, and return their bytes."""
        return 0


@dataclass
class RayBuffers:
    """Ray's buffers of one channel in a process that reads. Ray delivers each message once per process, however many readers it has."""

    site: Site
    readers: int = 0
    channels: dict[int, tuple[bytes, Any]] = field(default_factory=dict)  # for each slot, the name and the channel of Ray
    messages: dict[int, tuple[Any, int]] = field(default_factory=dict)  # by step, with the number of readers that have not taken it
    lock: threading.Lock = field(default_factory=threading.Lock)  # readers of one process may be in several threads

    def connect(self, slot: int, name: bytes) -> None:
        """Attach to the channel of this name at once, while the writer lives."""
        with self.lock:
            if slot not in self.channels or self.channels[slot][0] != name:
                self.channels[slot] = name, attach_channel(self.site, name)

    def take(self, full: Full) -> Any:
        with self.lock:  # otherwise two threads read the message from Ray, which delivers it once
            if full.step not in self.messages:
                with in_words(f"channel '{self.site.channel}', a reader, step {full.step}"):
                    self.messages[full.step] = self.channels[full.slot][1].read(CLEANUP_TIMEOUT_S), self.readers
            message, left = self.messages.pop(full.step)
            if left > 1:
                self.messages[full.step] = message, left - 1
            return message


def attach_channel(site: Site, name: bytes) -> Any:
    """Find Ray's channel with this name on this host, and keep its buffer alive when the writer ends."""
    found, actor, node = ray.ObjectRef(name), any_actor(site), node_id()
    of = {node: ReaderRefInfo(found, ray.ActorID.nil(), 1)}
    channel = Channel(actor, [(actor, node)], SharedMemoryType(), node, found, of, True)
    with in_words(f"channel '{site.channel}', a reader"):
        channel.ensure_registered_as_reader()
    return channel


@contextmanager
def in_words(where: str) -> Iterator[None]:
    """Convert Ray's errors to errors of the channel."""
    try:
        yield
    except ray.exceptions.ObjectStoreFullError as error:
        raise ChannelError(
            f"{where} does not fit into Ray's object store; start Ray with more object_store_memory, or leave transport='ray' out"
        ) from error
    except (ray.exceptions.RayError, ValueError) as error:
        raise ChannelBroken(
            f"{where}: Ray's channel failed, after {CLEANUP_TIMEOUT_S:g} s at most: {type(error).__name__}: {error}"
        ) from error


def _check_ray(channel: str) -> None:
    if not ray.is_initialized():
        raise ChannelError(
            f"channel '{channel}' has transport 'ray', and this process is not a worker of a Ray: its ends are workers of one Ray on one "
            "host, so launch the plan on Ray, or choose another transport"
        )


def _raw(wanted: slot_memory.MessageLayout, columns: Columns) -> list[tuple[int, Any]]:
    """The bytes and the offset of each tensor: a view if it has the layout that is sent, otherwise a copy."""
    found = []
    for place in wanted.host:
        column = cast(torch.Tensor, columns[place.name]).detach()
        stored = column.is_contiguous() and column.dtype == place.dtype and column.device.type == "cpu"
        if not stored or column.is_conj() or column.is_neg():
            column = torch.empty(place.shape, dtype=place.dtype).copy_(column)
        if column.numel():
            found.append((place.offset, column.as_strided((column.numel(),), (1,)).view(torch.uint8).numpy()))
    return found


def node_id() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def self_actor() -> Any:
    """The actor of this process; None for a driver."""
    return get_self_actor()


def any_actor(site: Site) -> Any:
    """An actor on this host: Ray requires one per reader, and only counts actors on the writer's host."""
    if self_actor() is not None:
        return self_actor()
    if "an actor" not in site.here:
        site.here["an actor"] = ray.remote(Site).options(num_cpus=0).remote("", 1, 1, "")
    return site.here["an actor"]


# Columns on a GPU use the accelerator channel of Ray's Compiled Graphs, all others its shared memory.
#
# Ray's channel has no buffer: a send waits for its receive. So the writer stages each slot on its GPU, and a thread per reader sends
# from there when the reader reads. Ray's channel calls rlgraph's communicator, a pair that uses the NCCL that torch has loaded: Ray's
# communicator would need cupy, which has a second NCCL. "gloo" replaces NCCL on machines without a GPU.

META_BYTES = 4096  # of Ray's metadata: shape and dtype of one flat tensor


def open_device_writer(transport: Transport, site: Site) -> "RayDeviceWriter":
    return RayDeviceWriter(site, cast(CarrierName, transport.carrier))


def open_device_reader(transport: Transport, site: Site) -> "RayDeviceReader":
    return RayDeviceReader(site, cast(CarrierName, transport.carrier))


class RayDeviceWriter(RayWriter):
    """The writer. Raises ChannelError if Ray did not start this process, or it has no GPU."""

    def __init__(self, site: Site, kind: CarrierName) -> None:
        self._kind, self._staged = kind, DeviceBuffers.on_current_device(site.channel, kind)
        self._senders: dict[Connection, _Sender] = {}
        super().__init__(site)
        self._apart = DEVICES[kind]

    def _await(self, step: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        super()._await(step, timeout_s)
        while self._stop is None and len(self._senders) < self._readers:
            if not self._hear(deadline):
                raise self.end.timeout(step, timeout_s, "a reader has connected and has not sent the name of its store")

    def _obey(self, message: ControlMessage | Disconnected, connection: Connection) -> None:
        if isinstance(message, KeyValue) and connection not in self._senders:
            self._senders[connection] = _Sender(self, message.key, self._kind, self._staged.device, self._site)
        else:
            super()._obey(message, connection)

    def _parts(self, wanted: slot_memory.MessageLayout) -> tuple[Any, ...]:
        """The bytes of the message on the GPU, and for each reader the Ray channel of their metadata."""
        return wanted.device_size, {sender.store: sender.name for sender in self._senders.values()} if wanted.device_size else {}

    def _after(self, slot: int, wanted: slot_memory.MessageLayout, columns: Columns) -> None:
        """Stage the columns on the GPU and let each reader's thread send them."""
        if not wanted.device_size:
            return
        memory = self._staged.of_slot(slot, wanted.device_size, lambda size: torch.empty(size, dtype=torch.uint8, device=wanted.device))
        for place in wanted.apart:
            to = slot_memory.device_view(memory, place.dtype, place.shape, place.offset)
            to.copy_(cast(torch.Tensor, columns[place.name]).detach())
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()
        for sender in self._senders.values():
            sender.queue.put(memory)

    def _end_with(self, last: Goodbye | Failed, stop: Stop) -> None:
        super()._end_with(last, stop)
        for sender in self._senders.values():
            sender.queue.put(None)
            if isinstance(last, Failed):
                sender.abort()


class RayDeviceReader(RayReader):
    """A reader. Raises ChannelError if Ray did not start this process, or it has no GPU."""

    def __init__(self, site: Site, kind: CarrierName) -> None:
        self._kind, self._device = kind, DeviceBuffers.on_current_device(site.channel, kind).device
        super().__init__(site)
        self._store = f"{site.address}.{secrets.token_hex(4)}"
        self._channel: Any = None
        self._pair: Pair | None = None
        send(self._connection, KeyValue(self._store, b""))

    def _beside(self, full: Full, parts: tuple[Any, ...]) -> int:
        """Receive the columns on the GPU, and return their bytes."""
        size, names = parts
        if not size:
            return 0
        try:
            self._carried[full.slot] = run_watched(lambda: self._receive_tensor(names[self._store]), [], CLEANUP_TIMEOUT_S)
        except (RuntimeError, EOFError, OSError) as error:
            raise ChannelBroken(f"{self.end.channel}, step {full.step}: Ray's accelerator channel failed: {error}") from error
        return cast(int, size)

    def _receive_tensor(self, name: bytes) -> torch.Tensor:
        try:
            return self._receive(name)
        except RayError as error:
            raise RuntimeError(str(error)) from error

    def _receive(self, name: bytes) -> torch.Tensor:
        if self._channel is None:
            self._pair = Pair(self._store, 1, self._kind, self._device)
            self._channel = _channel(attach_channel(self._ray_buffers.site, name), self._pair, self._ray_buffers.site)
        found: torch.Tensor = self._channel.read(CLEANUP_TIMEOUT_S)[0]
        return found

    def _end_with(self, last: Goodbye | Failed, stop: Stop) -> None:
        super()._end_with(last, stop)
        if self._pair is not None:
            self._pair.destroy()


class _Sender:
    """Sends the staged columns to one reader, on its own thread."""

    def __init__(self, writer: RayDeviceWriter, store: str, kind: CarrierName, device: torch.device, site: Site) -> None:
        self.store, self._kind, self._device, self._site, self._writer = store, kind, device, site, writer
        self._told = Channel(self_actor(), [(any_actor(site), node_id())], SharedMemoryType(buffer_size_bytes=META_BYTES))
        self.name: bytes = self._told._writer_ref.binary()
        self.queue: queue.Queue[torch.Tensor | None] = queue.Queue()
        self._pair: Pair | None = None
        threading.Thread(target=self._run, name=f"send {site.channel}", daemon=True).start()

    def _run(self) -> None:
        channel = None
        try:
            while (memory := self.queue.get()) is not None:
                if channel is None:
                    self._pair = Pair(self.store, 0, self._kind, self._device)
                    channel = _channel(self._told, self._pair, self._site)
                channel.write([memory])
        except (RuntimeError, EOFError, OSError, RayError) as error:
            self._writer.fail(f"Ray's accelerator channel failed: {error}")
        self.abort()

    def abort(self) -> None:
        if self._pair is not None:
            self._pair.destroy()


class Pair(Communicator):
    """The communicator that Ray's channel uses: the writer is rank 0, one reader is rank 1."""

    def __init__(self, store: str, rank: int, kind: CarrierName, device: torch.device) -> None:
        file_store = FileStore(store, 2)
        file_store.set_timeout(timedelta(seconds=CLEANUP_TIMEOUT_S))
        self._rank, self._device = rank, device
        self._comm: PairComm | None = Nccl(file_store, rank, device) if kind == "nccl" else Gloo(file_store, rank, CLEANUP_TIMEOUT_S)

    def send(self, value: torch.Tensor, peer_rank: int) -> None:
        assert self._comm is not None
        self._comm.send(value)()

    def recv(self, shape: Any, dtype: torch.dtype, peer_rank: int, allocator: Any = None) -> torch.Tensor:
        assert self._comm is not None
        memory = self._comm.memory(torch.Size(shape).numel())
        self._comm.receive(memory)()
        return memory

    def destroy(self) -> None:
        if self._comm is not None:
            comm, self._comm = self._comm, None
            with contextlib.suppress(RuntimeError):
                comm.abort()

    def get_rank(self, actor: Any) -> int:
        return 0 if actor is None else 1

    def get_self_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return 2

    def initialize(self, rank: int) -> None:
        pass

    def get_actor_handles(self) -> list[Any]:
        return []

    def get_transport_name(self) -> str:
        return "accelerator"

    @classmethod
    def generate_communicator_id(cls) -> str:
        return secrets.token_hex(8)

    @property
    def recv_stream(self) -> Any:
        return contextlib.nullcontext()

    send_stream = recv_stream

    def allgather(self, send_buf: torch.Tensor, recv_buf: torch.Tensor) -> None:
        raise NotImplementedError

    def allreduce(self, send_buf: torch.Tensor, recv_buf: torch.Tensor, op: Any) -> None:
        raise NotImplementedError

    reducescatter = allreduce


class _Flat(_TorchTensorAcceleratorChannel):
    """Ray's accelerator channel, on the device of the pair."""

    def ensure_registered_as_writer(self) -> None:
        """Do nothing: the end is registered, and Ray would refuse the CPU of the gloo pair."""

    ensure_registered_as_reader = ensure_registered_as_writer


def _channel(told: Any, pair: Pair, site: Site) -> Any:
    """Make Ray's channel of a pair, with the channel `told` for its metadata."""
    context = ChannelContext.get_current()
    context.set_torch_device(pair._device)
    name = pair.generate_communicator_id()
    context.communicators[name] = pair
    kind = TorchTensorType(transport=TorchTensorType.ACCELERATOR)
    kind.set_communicator_id(name)
    return _Flat(None, [(any_actor(site), node_id())], kind, told)
