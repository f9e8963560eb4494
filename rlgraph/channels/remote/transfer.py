"""Columns on a GPU between hosts: the interface of a communicator of two, and how a relay waits for it.

No cycle of waits can arise, whatever channels a process has, and beside the collectives of a trainer. Each connection has its own
thread and its own communicator. The reader's side posts a receive of bytes that are there on the sending host, and then requests them: a
send that has begun waits only for the wire, and a receive for its send to begin. A reader that passes a message on has it sent in parts,
each once it is there, and no message comes back to where it was. A process receives one message at a time. It may wait for parts of it:
the host that passes them on is then receiving this message itself, or has it whole, so at the end of such waits is the writer.
"""

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

from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.channels.host.protocol import CarrierName, Failed, KeyValue
from rlgraph.channels.host.slot_memory import Handle, Segment, handle_of
from rlgraph.errors import ChannelError, shown

Finish: TypeAlias = Callable[[], None]  # blocks until a transfer has ended
T = TypeVar("T")

DEVICES: Final[dict[CarrierName, str]] = {"nccl": "cuda", "gloo": "cpu"}  # the type of device whose memory each carries
PART_BYTES = 32 << 20  # of what is passed on: at 50 GB/s 0.7 ms, beside which the messages that request a part are short
LOOK_S = 1.0  # how often to ask the library whether its network failed
HANG_UP_S = 0.5  # a peer that ends closes all its connections, though not at the same moment


class HungUp(EOFError):
    """The peer's process, or its end of the channel, is gone."""


class PeerFailed(RuntimeError):
    """The other end failed, and gave its reason."""


class PairComm(Protocol):
    """One end of a communicator of two processes. Every method raises RuntimeError when the library fails."""

    def memory(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes to receive into."""

    def send(self, memory: torch.Tensor) -> Finish:
        """Begin to send the bytes."""

    def receive(self, memory: torch.Tensor) -> Finish:
        """Post the receive of as many bytes as the memory has; it is posted when this returns."""

    def check(self) -> None:
        """Raise if the network has failed under a running transfer."""

    def abort(self) -> None:
        """End all transfers and free the communicator."""


@dataclass
class DeviceBuffers:
    """The memory of each slot on this end's device, which the relays send and receive. If it is `shared`, readers of this host map it."""

    channel: str
    kind: CarrierName
    device: torch.device
    shared: bool = False
    memories: dict[int, torch.Tensor] = field(default_factory=dict)
    news: dict[int, Handle | Segment] = field(default_factory=dict)  # by slot, memory that those readers have not heard of

    @classmethod
    def here(cls, channel: str, kind: CarrierName, *, shared: bool = False) -> "DeviceBuffers":
        """Make empty buffers on this process's current device. Raises ChannelError where "nccl" finds no GPU."""
        if kind == "nccl" and not torch.cuda.is_available():
            raise ChannelError(
                f"channel '{channel}': its carrier 'nccl' moves columns from GPU to GPU, and this process sees no GPU; "
                "give both ends one, or no carrier"
            )
        return cls(channel, kind, torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu"), shared)

    def of_slot(self, slot: int, size: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Give `size` bytes of the memory of a slot, which is allocated by `new` where it is too small."""
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
        """Close the handles of memory that no reader will hear of."""
        while self.news:
            _, memory = self.news.popitem()
            if isinstance(memory, Segment):
                os.close(memory.handle)


class LinkStore(Store):
    """A key-value store over the connection of two ends, by which their communicator is set up before the first message."""

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
                raise ProtocolError(f"{shown(message)}, while the two ends set up their communicator")
            self._known[message.key] = message.value

    def end(self) -> None:
        """Wait for the other end to get here too, so that no key is left unread on the connection."""
        self._connection.send(protocol.encode(KeyValue("", b"")))
        self.wait([""])


def watched(work: Callable[[], T], connections: Sequence[Connection], timeout_s: float, check: Callable[[], None] | None = None) -> T:
    """Run the work in its own thread and return its result. A library does not notice that its peer ended; this does.

    Raises HungUp when one of the connections ends first, RuntimeError when the work fails or takes too long; the thread may then go
    on until its library gives up.
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
        while not (ended := _ended([done, *connections], min(LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"it did not end within {timeout_s:g} s")
            if check is not None:
                check()
        if done.fileno() not in ended and not _ended([done], HANG_UP_S):
            raise HungUp
        if failed and not isinstance(failed[0], PeerFailed) and _ended(connections, HANG_UP_S):
            raise HungUp
    if failed:
        raise failed[0]
    return found[0]


def _ended(sockets: Sequence[socket.socket | Connection], timeout_s: float) -> set[int]:
    """Wait until at least one socket has ended, and return those that have; none after `timeout_s`."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLRDHUP)
    return {handle for handle, _ in poll.poll(max(timeout_s, 0) * 1000)}
