"""Columns on a GPU between hosts: what a relay asks of the library that carries their bytes, and how it waits for it.

Why no cycle of waits can arise, whatever channels a process has, and beside the collectives of a trainer: each connection has a
thread and a communicator of its own. The reader's side posts its receive first and then asks for the bytes, so a send that has
begun waits for nothing but the wire. What a receive waits for is the begin of its send, and that waits for no transfer: a process
that trains only sends, one that generates only receives. A process receives one message at a time, so that kernels which wait for
bytes leave the GPU to the others.
"""

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
from rlgraph.channels.host.connection import Garbled, Link
from rlgraph.channels.host.protocol import Failed, Kind, Told
from rlgraph.errors import ChannelError

Finish: TypeAlias = Callable[[], None]  # blocks until a transfer has ended
T = TypeVar("T")

DEVICES: Final[dict[Kind, str]] = {"nccl": "cuda", "gloo": "cpu"}  # the type of device whose memory each carries
LOOK_S = 1.0  # a network that fails under a library is found by asking the library
HANG_UP_S = 0.5  # a peer that ends takes all its connections along, if not in the same moment


class HungUp(EOFError):
    """The process at the other end of a link is gone, or its end of the channel."""


class PeerFailed(RuntimeError):
    """The other end could not do its part, and said why."""


class Carrier(Protocol):
    """One end of a communicator of two. What fails raises RuntimeError."""

    def memory(self, size: int) -> torch.Tensor:
        """Return new memory to receive into, as bytes."""

    def send(self, memory: torch.Tensor) -> Finish:
        """Begin to send the bytes."""

    def receive(self, memory: torch.Tensor) -> Finish:
        """Post the receive of so many bytes; it is posted when this returns."""

    def check(self) -> None:
        """Raise if the network has failed under a transfer that is going on."""

    def abort(self) -> None:
        """End whatever is going on, and give everything back."""


@dataclass
class Cargo:
    """What a channel's relays carry apart: the memory of each slot on the device of this end."""

    kind: Kind
    device: torch.device
    memories: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def here(cls, channel: str, kind: Kind) -> "Cargo":
        """Return an empty one for the device that is current where the end is made. Raises ChannelError where there is none."""
        if kind == "nccl" and not torch.cuda.is_available():
            raise ChannelError(
                f"channel '{channel}': its carrier 'nccl' moves columns from GPU to GPU, and this process sees no GPU; "
                "give both ends one, or no carrier"
            )
        return cls(kind, torch.device("cuda", torch.cuda.current_device()) if kind == "nccl" else torch.device("cpu"))

    def room(self, slot: int, size: int, new: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return the slot's memory, which is `new` where there was none so large."""
        if slot not in self.memories or self.memories[slot].numel() < size:
            self.memories[slot] = new(size)
        return self.memories[slot][:size]


class Meeting(Store):
    """How the two ends of a carrier find each other: over their link, which is authenticated, before its first message."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # C++ calls it with bytes
        self._known[key] = value
        self._link.send(protocol.encode(Told(key, value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._known for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Listen to the other end until it has told all the keys; the deadline is that of the link."""
        while not self.check(keys):
            token = protocol.receive(self._link)
            if isinstance(token, Failed):
                raise PeerFailed(token.reason)
            if not isinstance(token, Told):
                raise Garbled(f"{token!r} where the ends of a carrier meet")
            self._known[token.key] = token.value

    def end(self) -> None:
        """Return when the other end is there too, with nothing left on the link of what it told."""
        self._link.send(protocol.encode(Told("", b"")))
        self.wait([""])


def watched(work: Callable[[], T], links: Sequence[Link], timeout_s: float, check: Callable[[], None] | None = None) -> T:
    """Return what the work returns, which blocks in a thread of its own, since a library hears of no peer's end.

    Raises HungUp when one of the links ends before, RuntimeError when the work fails or takes too long; the thread may then go
    on until its library gives up.
    """
    done, doing = socket.socketpair()
    found: list[T] = []
    failed: list[Exception] = []

    def run() -> None:
        with doing:  # whose end wakes the one who waits
            try:
                found.append(work())
            except (RuntimeError, EOFError, OSError) as error:
                failed.append(error)

    threading.Thread(target=run, name="carrier", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    with done:
        while not (ended := _ended([done, *links], min(LOOK_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise RuntimeError(f"no end of it within {timeout_s:g} s")
            if check is not None:
                check()
        if done.fileno() not in ended and not _ended([done], HANG_UP_S):
            raise HungUp
        if failed and not isinstance(failed[0], PeerFailed) and _ended(links, HANG_UP_S):
            raise HungUp
    if failed:
        raise failed[0]
    return found[0]


def _ended(sockets: Sequence[socket.socket | Link], timeout_s: float) -> set[int]:
    """Return which of the sockets have ended, as soon as one has; none after so many seconds."""
    poll = select.poll()
    for one in sockets:
        poll.register(one, select.POLLRDHUP)
    return {handle for handle, _ in poll.poll(max(timeout_s, 0) * 1000)}
