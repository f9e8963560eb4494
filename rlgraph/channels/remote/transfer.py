"""Send columns between hosts through a communicator of two: its interface, NCCL for GPUs, and gloo as a substitute without one."""

import ctypes
import functools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol, TypeAlias, TypeVar

import torch
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroupGloo, Work

from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.channels.host.protocol import CarrierName, Failed, KeyValue
from rlgraph.channels.host.slot_memory import Handle, Segment, handle_of
from rlgraph.errors import ChannelError, show_value

# Columns on a GPU between hosts: the interface of a communicator of two, and how a relay waits for it.
#
# Waits cannot form a cycle, whatever channels a process has, also with the collectives of a trainer. Each connection has a separate
# thread and communicator. The reader's side posts a receive of bytes that the sending host has, and then requests them: a send that has
# begun waits only for the network, and a receive for its send to begin. A reader that passes a message on sends it in parts, each once it
# has arrived, and no message returns to an earlier host. A process receives one message at a time. It may wait for parts of it: the host
# that passes them on is then receiving this message itself, or has all of it, so a chain of such waits ends at the writer.

Finish: TypeAlias = Callable[[], None]  # blocks until a transfer has ended
T = TypeVar("T")

DEVICES: Final[dict[CarrierName, str]] = {"nccl": "cuda", "gloo": "cpu"}  # the type of device whose memory each carries
PART_BYTES = 32 << 20  # of messages that are passed on: 0.7 ms at 50 GB/s, long compared with the messages that request a part
LOOK_S = 1.0  # between two checks whether the library's network failed
HANG_UP_S = 0.5  # a peer that ends closes all its connections, though not at the same moment


class HungUp(EOFError):
    """The peer's process, or its end of the channel, has ended."""


class PeerFailed(RuntimeError):
    """The other end failed, and gave its reason."""


class PairComm(Protocol):
    """One end of a communicator of two processes. Every method raises RuntimeError when the library fails."""

    def memory(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes to receive into."""

    def send(self, memory: torch.Tensor) -> Finish:
        """Start to send the bytes."""

    def receive(self, memory: torch.Tensor) -> Finish:
        """Post a receive that fills the memory; it is posted when this returns."""

    def check(self) -> None:
        """Raise if the network has failed under a running transfer."""

    def abort(self) -> None:
        """End all transfers and free the communicator."""


@dataclass
class DeviceBuffers:
    """The memory of each slot on this end's device, which the relays send and receive. If it is `shared`, readers on this host map it."""

    channel: str
    kind: CarrierName
    device: torch.device
    shared: bool = False
    memories: dict[int, torch.Tensor] = field(default_factory=dict)
    news: dict[int, Handle | Segment] = field(default_factory=dict)  # by slot, memory that these readers do not know yet

    @classmethod
    def on_current_device(cls, channel: str, kind: CarrierName, *, shared: bool = False) -> "DeviceBuffers":
        """Make empty buffers on this process's current device. Raises ChannelError if "nccl" finds no GPU."""
        if kind == "nccl" and not torch.cuda.is_available():
            raise ChannelError(
                f"channel '{channel}': its carrier 'nccl' moves columns from GPU to GPU, but this process sees no GPU; "
                "run both ends on GPUs, or leave the carrier out"
            )
        return cls(channel, kind, torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu"), shared)

    def of_slot(self, slot: int, size: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Reuse `size` bytes of a slot's memory, or replace it with `new` memory if it is too small."""
        if slot not in self.memories or self.memories[slot].numel() < size:
            if self.shared and self.kind == "gloo":
                self.news[slot] = segment = Segment.new(self.channel, size)
                self.memories[slot] = segment.bytes
            else:
                self.memories[slot] = new(size)
                if self.shared:
                    self.news[slot] = handle_of(self.memories[slot])
        return self.memories[slot][:size]

    def forget_news(self) -> None:
        """Close the handles of memory that no reader will receive."""
        while self.news:
            _, memory = self.news.popitem()
            if isinstance(memory, Segment):
                os.close(memory.handle)


class LinkStore(Store):
    """A key-value store over the connection of two ends, with which they set up their communicator before the first message."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # C++ calls it with bytes
        self._known[key] = value
        self._connection.send(protocol.encode(KeyValue(key, value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Receive until the other end has set all the keys; the deadline is the connection's."""
        while not self.check(keys):
            message = protocol.receive(self._connection)
            if isinstance(message, Failed):
                raise PeerFailed(message.reason)
            if not isinstance(message, KeyValue):
                raise ProtocolError(f"{show_value(message)}, while the two ends set up their communicator")
            self._known[message.key] = message.value

    def end(self) -> None:
        """Wait until the other end also calls this, so that no key stays unread on the connection."""
        self._connection.send(protocol.encode(KeyValue("", b"")))
        self.wait([""])


def run_watched(work: Callable[[], T], connections: Sequence[Connection], timeout_s: float, check: Callable[[], None] | None = None) -> T:
    """Run the work in a new thread and return its result. Unlike the library, this detects that the peer ended.

    Raises HungUp if one of the connections ends first, RuntimeError if the work fails or lasts too long; the thread may then continue
    until its library gives up.
    """
    done, doing = socket.socketpair()
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        with doing:  # its close wakes the waiting thread
            try:
                found.append(work())
            except (RuntimeError, EOFError, OSError) as error:
                failed.append(error)

    threading.Thread(target=run, name="carrier", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    with done:
        while not (ended := _wait_ended_sockets([done, *connections], min(LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"it did not end within {timeout_s:g} s")
            if check is not None:
                check()
        if done.fileno() not in ended and not _wait_ended_sockets([done], HANG_UP_S):
            raise HungUp
        if failed and not isinstance(failed[0], PeerFailed) and _wait_ended_sockets(connections, HANG_UP_S):
            raise HungUp
    if failed:
        raise failed[0]
    return found[0]


def _wait_ended_sockets(sockets: Sequence[socket.socket | Connection], timeout_s: float) -> set[int]:
    """Wait until at least one socket has ended, and return the ended sockets; none after `timeout_s`."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLRDHUP)
    return {handle for handle, _ in poll.poll(max(timeout_s, 0) * 1000)}


# Send columns in host memory with gloo, the substitute for NCCL on machines without a GPU.


class Gloo:
    """A process group of two, separate from the default group. `timeout_s` bounds each transfer."""

    def __init__(self, store: Store, rank: int, timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._peer = 1 - rank
        self._group = ProcessGroupGloo(store, rank, 2, self._timeout)

    def memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def send(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.send([memory], self._peer, 0))  # type: ignore[attr-defined]  # missing in torch's stubs

    def receive(self, memory: torch.Tensor) -> Finish:
        return self._finish(self._group.recv([memory], self._peer, 0))  # type: ignore[attr-defined]  # missing in torch's stubs

    def check(self) -> None:
        """Do nothing: gloo raises its failures itself."""

    def abort(self) -> None:
        """Close the connections as soon as no transfer uses them."""
        del self._group

    def _finish(self, work: Work) -> Finish:
        timeout = self._timeout

        def finish() -> None:
            work.wait(timeout)

        return finish


# Send columns on GPUs between hosts with NCCL, directly from the writer's staging buffer into the reader's.
#
# This calls the functions of the NCCL library that torch has loaded. A `ProcessGroupNCCL` would watch its transfers with a thread that
# ends the process when a peer dies, and the variable that turns this off also applies to the trainer's groups.

UINT8, SUCCESS, IN_PROGRESS = 1, 0, 7  # ncclDataType_t, ncclResult_t
FIRST = 64  # bytes of the transfer that connects the two ends


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class Nccl:
    """A communicator of two processes. Its transfers run on their own stream."""

    def __init__(self, store: Store, rank: int, device: torch.device) -> None:
        self._library = _library()
        self._peer, self._device, self._stream = 1 - rank, device, torch.cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        identity = _UniqueId()
        if rank == 0:
            self._must(self._library.ncclGetUniqueId(ctypes.byref(identity)))
            store.set("identity", bytes(identity))  # type: ignore[arg-type]  # stores take bytes too
        agreed = store.get("identity")
        if len(agreed) != ctypes.sizeof(_UniqueId):
            raise RuntimeError(f"NCCL: the writer sent an id of {len(agreed)} bytes; a ncclUniqueId has {ctypes.sizeof(_UniqueId)}")
        with torch.cuda.device(device):
            joined = self._library.ncclCommInitRank(ctypes.byref(self._communicator), 2, _UniqueId.from_buffer_copy(agreed), rank)
            self._must(joined)
        first = self.memory(FIRST)  # connects both ends, so that later receives can be posted before their sends
        (self.send(first) if rank == 0 else self.receive(first))()

    def memory(self, size: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # no earlier use of the memory on another stream can still run
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def send(self, memory: torch.Tensor) -> Finish:
        return self._begin(self._library.ncclSend, memory)

    def receive(self, memory: torch.Tensor) -> Finish:
        return self._begin(self._library.ncclRecv, memory)

    def check(self) -> None:
        state = ctypes.c_int()
        self._must(self._library.ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        self._must(state.value)

    def abort(self) -> None:
        with torch.cuda.device(self._device):
            self._library.ncclCommAbort(self._communicator)

    def _begin(self, transfer: Callable[..., int], memory: torch.Tensor) -> Finish:
        with torch.cuda.stream(self._stream):
            self._must(transfer(memory.data_ptr(), memory.numel(), UINT8, self._peer, self._communicator, self._stream.cuda_stream))
            event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps
            event.record(self._stream)
        return event.synchronize

    def _must(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise RuntimeError("the library 'libnccl.so.2' is not installed; install a torch for CUDA, which includes it") from error
    handle, number = ctypes.c_void_p, ctypes.c_int
    transfer = [handle, ctypes.c_size_t, number, number, handle, handle]
    for name, arguments in {
        "ncclGetUniqueId": [handle],
        "ncclCommInitRank": [handle, number, _UniqueId, number],
        "ncclSend": transfer,
        "ncclRecv": transfer,
        "ncclCommGetAsyncError": [handle, handle],
        "ncclCommAbort": [handle],
        "ncclGetErrorString": [number],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
