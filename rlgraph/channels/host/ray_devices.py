"""Columns on a GPU through the accelerator channel of Ray's Compiled Graphs, all others through its shared memory.

Ray's channel has no buffer: a send waits for its receive. So the writer stages each slot on its GPU, and a thread for each reader sends
from there when the reader takes. The communicator that Ray's channel calls is rlgraph's own pair of NCCL, the library that torch
has loaded: Ray's would need cupy, which brings a second one. "gloo" is its twin for machines without a GPU.
"""

import contextlib
import queue
import secrets
import threading
import time
from datetime import timedelta
from typing import Any, cast

import torch
from ray.exceptions import RayError
from ray.experimental.channel.common import ChannelContext
from ray.experimental.channel.communicator import Communicator
from ray.experimental.channel.shared_memory_channel import Channel, SharedMemoryType
from ray.experimental.channel.torch_tensor_accelerator_channel import _TorchTensorAcceleratorChannel
from ray.experimental.channel.torch_tensor_type import TorchTensorType
from torch._C._distributed_c10d import FileStore

from rlgraph.channels.api import Stop
from rlgraph.channels.factory import Site, Transport
from rlgraph.channels.host import slot_memory
from rlgraph.channels.host.connection import Connection
from rlgraph.channels.host.protocol import CarrierName, ControlMessage, Disconnected, Failed, Full, Goodbye, KeyValue, send
from rlgraph.channels.host.ray_channel import RAY_S, RayReader, RayWriter, any_actor, attached, node_id, self_actor
from rlgraph.channels.remote.gloo import Gloo
from rlgraph.channels.remote.nccl import Nccl
from rlgraph.channels.remote.transfer import DEVICES, DeviceBuffers, PairComm, watched
from rlgraph.columns import Columns
from rlgraph.errors import ChannelBroken

META_BYTES = 4096  # of Ray's metadata: shape and dtype of one flat tensor


def open_writer(transport: Transport, site: Site) -> "RayDeviceWriter":
    return RayDeviceWriter(site, cast(CarrierName, transport.carrier))


def open_reader(transport: Transport, site: Site) -> "RayDeviceReader":
    return RayDeviceReader(site, cast(CarrierName, transport.carrier))


class RayDeviceWriter(RayWriter):
    """The writer. Raises ChannelError where this process is none of Ray's, or has no GPU."""

    def __init__(self, site: Site, kind: CarrierName) -> None:
        self._kind, self._staged = kind, DeviceBuffers.here(site.channel, kind)
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
        """The message's number of bytes on the GPU, and for each reader the Ray channel of their metadata."""
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
    """A reader. Raises ChannelError where this process is none of Ray's, or has no GPU."""

    def __init__(self, site: Site, kind: CarrierName) -> None:
        self._kind, self._device = kind, DeviceBuffers.here(site.channel, kind).device
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
            self._carried[full.slot] = watched(lambda: self._received(names[self._store]), [], RAY_S)
        except (RuntimeError, EOFError, OSError) as error:
            raise ChannelBroken(f"{self.end.channel}, step {full.step}: Ray's accelerator channel failed: {error}") from error
        return cast(int, size)

    def _received(self, name: bytes) -> torch.Tensor:
        try:
            return self._receive(name)
        except RayError as error:
            raise RuntimeError(str(error)) from error

    def _receive(self, name: bytes) -> torch.Tensor:
        if self._channel is None:
            self._pair = Pair(self._store, 1, self._kind, self._device)
            self._channel = _channel(attached(self._ray_buffers.site, name), self._pair, self._ray_buffers.site)
        found: torch.Tensor = self._channel.read(RAY_S)[0]
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


class Pair(Communicator):  # type: ignore[misc]
    """The communicator that Ray's channel uses: the writer is rank 0, one reader is rank 1."""

    def __init__(self, store: str, rank: int, kind: CarrierName, device: torch.device) -> None:
        file_store = FileStore(store, 2)
        file_store.set_timeout(timedelta(seconds=RAY_S))
        self._rank, self._device = rank, device
        self._comm: PairComm | None = Nccl(file_store, rank, device) if kind == "nccl" else Gloo(file_store, rank, RAY_S)

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


class _Flat(_TorchTensorAcceleratorChannel):  # type: ignore[misc]
    """Ray's accelerator channel, on whichever device the pair is."""

    def ensure_registered_as_writer(self) -> None:
        """Nothing: it is, and the twin's device is a CPU, which Ray refuses."""

    ensure_registered_as_reader = ensure_registered_as_writer


def _channel(told: Any, pair: Pair, site: Site) -> Any:
    """Make Ray's channel of a pair, whose metadata go through `told`."""
    context = ChannelContext.get_current()
    context.set_torch_device(pair._device)
    name = pair.generate_communicator_id()
    context.communicators[name] = pair
    kind = TorchTensorType(transport=TorchTensorType.ACCELERATOR)
    kind.set_communicator_id(name)
    return _Flat(None, [(any_actor(site), node_id())], kind, told)
