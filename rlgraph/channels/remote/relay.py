"""A channel between two hosts is a channel on each of them. Relays join the two: they carry control messages and bytes over TCP.

The relay on the writer's host acts as a reader, the relay on the reader's host as a writer. Each runs in a thread of the process
whose end it serves, so `put` returns once its columns are in a slot, and they travel while both ends compute. Columns on a GPU
travel separately, by a communicator of the two relays.
"""

import mmap
import os
import socket
import threading
import time
from dataclasses import dataclass, field

import torch

from rlgraph.channels.host import protocol
from rlgraph.channels.host.address import ready
from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.channels.host.protocol import Arrived, ControlMessage, Disconnected, Failed, Full, More, Portion, Posted, Welcome
from rlgraph.channels.host.slot_memory import map_segment, segment_of
from rlgraph.channels.remote.gloo import Gloo
from rlgraph.channels.remote.nccl import Nccl
from rlgraph.channels.remote.transfer import DeviceBuffers, HungUp, LinkStore, PairComm, PeerFailed, watched
from rlgraph.errors import shown

STALL_S = 120.0  # a process may hold its interpreter for long; a host that is gone is found by keep-alive
FAREWELL_S = 10.0  # for the other host to read the last bytes
A_DAY_S = 86_400.0  # silence between two messages is no fault; the thread that waits for a message has its own deadline
_receives = threading.Lock()  # held for a transfer: a process receives one at a time


def relayed(channel: str, remote: Connection, *, outward: bool, buffers: DeviceBuffers | None) -> Connection:
    """Start a relay to `remote` and return the connection to it. With `outward` the writer is in this process, else the reader."""
    near, far = Connection.pair(remote.peer, remote.host)
    relay = _Outward(channel, far, remote, buffers) if outward else _Inward(channel, far, remote, buffers)
    name = f"relay of {channel} {'to' if outward else 'from'} {remote.peer}"
    threading.Thread(target=relay.run, name=name, daemon=True).start()
    return near


@dataclass
class _Relay:
    channel: str
    near: Connection
    remote: Connection
    buffers: DeviceBuffers | None
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    comm: PairComm | None = None

    def run(self) -> None:
        """Pass on messages of both sides until one of them ends."""
        try:
            with self.remote.deadline(STALL_S):
                self.begin()
                while self._carry_next():
                    pass
        except RuntimeError as error:  # the communicator failed while both ends live: tell them
            reason = str(error) if isinstance(error, PeerFailed) else f"the transfer of columns on a GPU failed: {error}"
            for connection in (self.near, self.remote):
                protocol.send(connection, Failed(reason[: protocol.MAX_REASON]))
        except HungUp:
            self._last_words()
        except (EOFError, OSError):
            pass  # both ends read end-of-file and raise with the channel's name
        finally:
            if self.comm is not None:
                self.comm.abort()
            self._part()

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

    def left(self, source: Connection) -> bool:
        """Whether work is left after one side has ended."""
        return False

    def join(self, rank: int) -> None:
        """Make the communicator with the other host's relay, if the channel has a carrier."""
        if (buffers := self.buffers) is None:
            return

        def meet() -> PairComm:
            store = LinkStore(self.remote)
            comm = Nccl(store, rank, buffers.device) if buffers.kind == "nccl" else Gloo(store, rank, STALL_S)
            store.end()
            return comm

        self.comm = watched(meet, [self.remote], STALL_S)

    def _carry_next(self) -> bool:
        sources = self.sources()
        if not sources:
            return False
        patience_s = A_DAY_S if len(sources) == 2 else STALL_S
        handles = ready([source.fileno() for source in sources], time.monotonic() + patience_s)
        for source in sources:
            if source.fileno() not in handles:
                continue
            message = protocol.receive(source)
            if not isinstance(message, Disconnected):
                self.carry(message, source)
            elif not self.left(source):
                return False
        return bool(handles) or len(sources) == 2

    def _last_words(self) -> None:
        """Pass on the last messages of a side that ended: that it closed, or failed."""
        for source, target in ((self.near, self.remote), (self.remote, self.near)):
            while ready([source.fileno()], 0) and not isinstance(message := protocol.receive(source), Disconnected | Full):
                protocol.send(target, message)

    def _part(self) -> None:
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


@dataclass
class _Outward(_Relay):
    """The writer is near: its messages go out with their bytes."""

    sent: dict[int, int] = field(default_factory=dict)  # by slot, the bytes that have left of the message that is being written
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, device bytes that have not arrived yet
    unrequested: int | None = None  # the slot whose device bytes the other host has not requested yet
    writer_ended: bool = False

    def sources(self) -> list[Connection]:
        # The other host reads no further message before it has the bytes of this one, so sending another might block for ever.
        if self.unrequested is not None:
            return [self.remote]
        if not self.writer_ended:
            return super().sources()
        return [self.remote] if self.leaving else []

    def left(self, source: Connection) -> bool:
        self.writer_ended = source is self.near
        return self.writer_ended

    def carry(self, message: ControlMessage, source: Connection) -> None:
        if isinstance(message, Full) and source is self.near:
            self._send(message)
        elif isinstance(message, Portion) and source is self.near:
            self.remote.send(protocol.encode(message))
            self.remote.send_bytes(memoryview(self.segments[message.slot])[self.sent[message.slot] : message.bytes])
            self.sent[message.slot] = message.bytes
        elif isinstance(message, Posted | Arrived) and source is self.remote:
            self._send_apart(message)
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
            self.unrequested = full.slot
        self.remote.send(protocol.encode(full))
        self.sent[full.slot] = 0
        if not full.coming:
            self.remote.send_bytes(memoryview(self.segments[full.slot])[: full.size])

    def _send_apart(self, message: Posted | Arrived) -> None:
        """Send the slot's device bytes. They arrive even if the writer has ended by now."""
        if message.slot not in self.leaving or self.comm is None:
            raise ProtocolError(f"{shown(message)}, but no bytes are under way in that slot")
        if isinstance(message, Posted):
            self.unrequested = None
            watched(self.comm.send(self.leaving[message.slot]), [self.remote], STALL_S, self.comm.check)
        else:
            del self.leaving[message.slot]


@dataclass
class _Inward(_Relay):
    """The reader is near: messages come in with their bytes, which go into memory of this host."""

    coming: Full | None = None  # the message of which parts come in, after its first part
    there: tuple[int, int] = 0, 0  # the bytes and tensors of it that are there
    handle: int | None = None  # of new memory, of which the reader does not know yet

    def begin(self) -> None:
        self.join(1)

    def carry(self, message: ControlMessage, source: Connection) -> None:
        if isinstance(message, Full) and source is self.remote:
            if self.coming is not None:
                raise ProtocolError(f"{shown(message)}, in the middle of another message")
            self._receive(message)
        elif isinstance(message, Portion) and source is self.remote:
            self._receive_part(message)
        else:
            super().carry(message, source)

    def _receive_part(self, part: Portion) -> None:
        """Receive the bytes of a part; the reader hears of the message with the first one, in which the header is."""
        full, (size, tensors) = self.coming, self.there
        if full is None or part.slot != full.slot or not tensors <= part.tensors <= full.coming:
            raise ProtocolError(f"{shown(part)}, which continues no message")
        whole = part.tensors == full.coming
        if not max(size, full.header) <= part.bytes <= full.size or (whole and part.bytes < full.size):
            raise ProtocolError(f"{shown(part)}, of a message of {full.size} bytes, {size} of which were there")
        self.remote.receive_into(memoryview(self.segments[part.slot])[size : part.bytes])
        self.there = part.bytes, part.tensors
        if not size:
            self._pass_on(full)
        if part.tensors > tensors:
            protocol.send(self.near, More(part.slot, part.tensors))
        if whole:
            self.coming = None

    def _receive(self, full: Full) -> None:
        self.handle, self.segments[full.slot] = segment_of(self.channel, self.segments.get(full.slot), full.size)
        if full.coming:
            self.coming, self.there = full, (0, 0)
            return
        self.remote.receive_into(memoryview(self.segments[full.slot])[: full.size])
        if full.carried:
            self._receive_apart(full)
        self._pass_on(full)

    def _pass_on(self, full: Full) -> None:
        """Tell the reader of a message, with the handle of its memory if that is new."""
        mapped = 0 if self.handle is None else len(self.segments[full.slot])
        protocol.send(self.near, Full(full.step, full.slot, full.header, full.size, mapped, full.carried, full.coming), self.handle)
        self._forget_handle()

    def _forget_handle(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def _part(self) -> None:
        self._forget_handle()
        super()._part()

    def _receive_apart(self, full: Full) -> None:
        if self.buffers is None or self.comm is None:
            raise ProtocolError(f"{shown(full)}, but the ends agreed on no carrier")
        if not _receives.acquire(timeout=STALL_S):
            raise RuntimeError(f"other transfers to this process took {STALL_S:g} s")
        try:
            arrived = self.comm.receive(self.buffers.of_slot(full.slot, full.carried, self.comm.memory))
            self.remote.send(protocol.encode(Posted(full.slot)))
            watched(arrived, [self.near, self.remote], STALL_S, self.comm.check)
        finally:
            _receives.release()
        self.remote.send(protocol.encode(Arrived(full.slot)))
