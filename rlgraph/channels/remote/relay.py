"""A channel between two hosts is a channel on each of them. Two relays connect them: they send control messages and bytes over TCP.

The relay on the writer's host acts as a reader (`outward`), the relay on the reader's host as a writer (`inward`). Each runs in a thread
of the process whose end it serves, so `put` returns once its columns are in a slot, and they are sent while both ends compute. A
communicator of the two relays sends columns on a GPU.
"""

import mmap
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection, ProtocolError, wait_readable
from rlgraph.channels.host.protocol import Arrived, ControlMessage, Disconnected, Failed, Full, Portion, Posted, Staged, Welcome
from rlgraph.channels.host.slot_memory import map_segment
from rlgraph.channels.remote.transfer import DeviceBuffers, Gloo, HungUp, LinkStore, Nccl, PairComm, PeerFailed, run_watched
from rlgraph.errors import show_value

STALL_S = 120.0  # a process may hold its interpreter for long; keep-alive detects a lost host
FAREWELL_S = 10.0  # for the other host to read the last bytes
NO_DEADLINE_S = 86_400.0  # silence between two messages is normal; the thread that waits for a message has a deadline


@dataclass
class Relay:
    """One of two relays that join a channel: `near` is the end in this process, `remote` the other relay."""

    channel: str
    near: Connection
    remote: Connection
    buffers: DeviceBuffers | None
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    comm: PairComm | None = None

    def start(self, what: str) -> None:
        """Run in a new thread, which is named after the relay's work."""
        threading.Thread(target=self._run, name=f"relay of {self.channel} {what} {self.remote.peer}", daemon=True).start()

    def _run(self) -> None:
        """Pass on messages from both sides until one side ends."""
        try:
            with self.remote.deadline(STALL_S):
                self.begin()
                while self._carry_next():
                    pass
        except RuntimeError as error:  # the communicator failed while both ends run: tell them
            reason = str(error) if isinstance(error, PeerFailed) else f"the transfer of columns on a GPU failed: {error}"
            self.fail(Failed(reason[: protocol.MAX_REASON]))
        except HungUp:
            self._last_words()
        except (EOFError, OSError):
            pass  # both ends read end-of-file and raise with the channel's name
        finally:
            if self.comm is not None:
                self.comm.abort()
            self.part()

    def begin(self) -> None:
        """Prepare before the first message."""

    def sources(self) -> list[Connection]:
        """The connections to listen to now."""
        return [self.near, self.remote]

    def carry(self, message: ControlMessage, source: Connection) -> None:
        """Pass a message on, with the bytes that belong to it."""
        if source is self.remote:
            protocol.send(self.near, message)  # the near end may be gone, with messages still on their way out
        else:
            self.remote.send(protocol.encode(message))

    def has_work(self, source: Connection, why: Disconnected) -> bool:
        """Whether work is left after one side has ended."""
        return False

    def fail(self, last: Failed) -> None:
        """Tell all ends that a transfer failed."""
        for connection in (self.near, self.remote):
            protocol.send(connection, last)

    def join(self, rank: int) -> None:
        """Create the communicator with the other host's relay, if the channel has a carrier."""
        if (buffers := self.buffers) is None:
            return

        def meet() -> PairComm:
            store = LinkStore(self.remote)
            comm = Nccl(store, rank, buffers.device) if buffers.kind == "nccl" else Gloo(store, rank, STALL_S)
            store.end()
            return comm

        self.comm = run_watched(meet, [self.remote], STALL_S)

    def _carry_next(self) -> bool:
        sources = self.sources()
        if not sources:
            return False
        both = self.remote in sources and len(sources) > 1
        handles = self.wait(sources, time.monotonic() + (NO_DEADLINE_S if both else STALL_S))
        for source in sources:
            if source.fileno() not in handles:
                continue
            message = protocol.receive(source)
            if not isinstance(message, Disconnected):
                self.carry(message, source)
            elif not self.has_work(source, message):
                return False
        return bool(handles) or both

    def wait(self, sources: Sequence[Connection], deadline: float) -> list[int]:
        """Wait for messages, and return the handles that have one."""
        return wait_readable([source.fileno() for source in sources], deadline)

    def _last_words(self) -> None:
        """Pass on the last messages of a side that closed or failed."""
        for source, target in ((self.near, self.remote), (self.remote, self.near)):
            while wait_readable([source.fileno()], 0) and not isinstance(message := protocol.receive(source), Disconnected | Full):
                if not isinstance(message, Staged):
                    self.note_message(message, source)
                    protocol.send(target, message)

    def note_message(self, message: ControlMessage, source: Connection) -> None:
        """Note one of the last messages."""

    def part(self) -> None:
        """End both sides. The remote host reads everything sent before this host drops the connection."""
        self.near.close()
        self.remote.end(socket.SHUT_WR)
        rest = memoryview(bytearray(4096))
        try:
            with self.remote.deadline(FAREWELL_S):
                while True:
                    self.remote.receive_into(rest)
        except (EOFError, OSError):
            self.remote.close()


# The relay on the writer's host: it sends the writer's messages with their bytes.


def to_reader(channel: str, remote: Connection, buffers: DeviceBuffers | None) -> Connection:
    """Start a relay to a reader on another host, and return the connection that stands for it."""
    near, far = Connection.pair(remote.peer, remote.host)
    near.sends_on = True
    _Outward(channel, far, remote, buffers).start("to")
    return near


@dataclass
class _Outward(Relay):
    """The relay whose near end is the writer: it sends the writer's messages with their bytes."""

    sent: dict[int, int] = field(default_factory=dict)  # by slot, the bytes already sent of the message that is being written
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, device bytes that have not arrived yet
    unrequested: int | None = None  # the slot of which the other host has not requested all device bytes yet
    staged: int = 0  # of those bytes, how many this host has
    requested: int = 0
    writer_ended: bool = False

    def sources(self) -> list[Connection]:
        # The other host reads no further message before it has the bytes of this one, so sending another might block forever.
        if self.unrequested is not None:
            return [self.remote, self.near] if self._awaits() else [self.remote]
        if not self.writer_ended:
            return super().sources()
        return [self.remote] if self.leaving else []

    def has_work(self, source: Connection, why: Disconnected) -> bool:
        self.writer_ended = source is self.near
        return self.writer_ended and not self._awaits()

    def _awaits(self) -> bool:
        """Whether this host, which passes the message on, still waits for some of its device bytes."""
        return self.unrequested is not None and self.staged < len(self.leaving[self.unrequested])

    def carry(self, message: ControlMessage, source: Connection) -> None:
        if isinstance(message, Full) and source is self.near:
            self._send(message)
        elif isinstance(message, Portion) and source is self.near:
            self.remote.send(protocol.encode(message), more=True)
            self.remote.send_bytes(memoryview(self.segments[message.slot])[self.sent[message.slot] : message.bytes])
            self.sent[message.slot] = message.bytes
        elif isinstance(message, Staged) and source is self.near:
            self.staged = message.bytes
            self.remote.send(protocol.encode(message))
        elif isinstance(message, Posted | Arrived) and source is self.remote:
            self._send_carried(message)
        else:
            super().carry(message, source)
            if isinstance(message, Welcome):
                self.join(0)

    def _send(self, full: Full) -> None:
        if full.segment:
            self.segments[full.slot] = map_segment(self.near.receive_handle(), full.segment)
        if full.carried:
            assert self.buffers is not None
            self.leaving[full.slot] = self.buffers.memories[full.slot][: full.carried]
            self.unrequested, self.staged, self.requested = full.slot, full.carried - full.awaited, 0
        self.remote.send(protocol.encode(full), more=not full.coming)
        self.sent[full.slot] = 0
        if not full.coming:
            self.remote.send_bytes(memoryview(self.segments[full.slot])[: full.size])

    def _send_carried(self, message: Posted | Arrived) -> None:
        """Send the requested device bytes of the slot. They arrive even if the writer has ended by now."""
        if message.slot not in self.leaving or self.comm is None or isinstance(message, Posted) is not (message.slot == self.unrequested):
            raise ProtocolError(f"{show_value(message)}, but no such bytes are under way in that slot")
        if isinstance(message, Arrived):
            del self.leaving[message.slot]
            return
        leaving = self.leaving[message.slot]
        if not self.requested < message.bytes <= self.staged:
            raise ProtocolError(f"{show_value(message)}, of {self.staged} bytes, {self.requested} of which were requested before")
        part, self.requested = leaving[self.requested : message.bytes], message.bytes
        if self.requested == len(leaving):
            self.unrequested = None
        run_watched(self.comm.send(part), [self.remote], STALL_S, self.comm.check)
