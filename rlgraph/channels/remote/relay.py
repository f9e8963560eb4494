"""A channel between two hosts is a channel on each of them, joined by relays that carry tokens and bytes over TCP.

The relay of the writer's host takes part as a reader, that of the reader's host as a writer: each in a thread of the process
whose end it serves. So a `put` returns when its columns are in a slot, and travels while both ends compute. Columns on a GPU
travel apart, by a carrier that joins the two relays.
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
from rlgraph.channels.host.connection import Garbled, Link
from rlgraph.channels.host.protocol import Arrived, Failed, Full, Lost, Posted, Token, Welcome
from rlgraph.channels.host.shared_memory import map_segment, segment_of
from rlgraph.channels.remote.gloo import Gloo
from rlgraph.channels.remote.nccl import Nccl
from rlgraph.channels.remote.transfer import Cargo, Carrier, HungUp, Meeting, PeerFailed, watched

STALL_S = 120.0  # a process may hold its interpreter for long; a host that is gone is found by keep-alive
FAREWELL_S = 10.0  # for the other host to read what was sent last
A_DAY_S = 86_400.0  # of silence, which is no fault between two messages: who waits for them has a deadline
_receives = threading.Lock()  # held for a transfer: a process receives one at a time


def relayed(channel: str, remote: Link, *, outward: bool, cargo: Cargo | None) -> Link:
    """Return the near end of a channel whose other end is at `remote`. `outward`: the writer is here, else the reader is."""
    near, far = Link.pair(remote.peer)
    relay = _Outward(channel, far, remote, cargo) if outward else _Inward(channel, far, remote, cargo)
    name = f"relay of {channel} {'to' if outward else 'from'} {remote.peer}"
    threading.Thread(target=relay.run, name=name, daemon=True).start()
    return near


@dataclass
class _Relay:
    channel: str
    near: Link
    remote: Link
    cargo: Cargo | None
    segments: dict[int, mmap.mmap] = field(default_factory=dict)
    carrier: Carrier | None = None

    def run(self) -> None:
        """Carry what comes from either side until one of them ends."""
        try:
            with self.remote.deadline(STALL_S):
                self.begin()
                while self._carry_next():
                    pass
        except RuntimeError as error:  # of a carrier, while both ends live: they are to hear of it
            reason = str(error) if isinstance(error, PeerFailed) else f"columns on a GPU were not carried: {error}"
            for link in (self.near, self.remote):
                protocol.send(link, Failed(reason[: protocol.MAX_REASON]))
        except HungUp:
            self._last_words()
        except (EOFError, OSError):
            pass  # the ends find the end of their files, and say so with the channel's name
        finally:
            if self.carrier is not None:
                self.carrier.abort()
            self._part()

    def begin(self) -> None:
        """Do what comes before the first token."""

    def sources(self) -> list[Link]:
        """Return the links that are listened to."""
        return [self.near, self.remote]

    def carry(self, token: Token, source: Link) -> None:
        """Pass a token on, with what belongs to it."""
        if source is self.remote:
            protocol.send(self.near, token)  # the near end may be gone, with messages still on their way out
        else:
            self.remote.send(protocol.encode(token))

    def left(self, source: Link) -> bool:
        """Return whether there is something left to do when one side has ended."""
        return False

    def join(self, rank: int) -> None:
        """Meet the relay of the other host, where columns are carried apart."""
        if (cargo := self.cargo) is None:
            return

        def meet() -> Carrier:
            meeting = Meeting(self.remote)
            carrier = Nccl(meeting, rank, cargo.device) if cargo.kind == "nccl" else Gloo(meeting, rank, STALL_S)
            meeting.end()
            return carrier

        self.carrier = watched(meet, [self.remote], STALL_S)

    def _carry_next(self) -> bool:
        sources = self.sources()
        if not sources:
            return False
        patience_s = A_DAY_S if len(sources) == 2 else STALL_S
        handles = ready([source.fileno() for source in sources], time.monotonic() + patience_s)
        for source in sources:
            if source.fileno() not in handles:
                continue
            token = protocol.receive(source)
            if not isinstance(token, Lost):
                self.carry(token, source)
            elif not self.left(source):
                return False
        return bool(handles) or len(sources) == 2

    def _last_words(self) -> None:
        """Pass on what either side said before it ended: that it closed, or failed."""
        for source, target in ((self.near, self.remote), (self.remote, self.near)):
            while ready([source.fileno()], 0) and not isinstance(token := protocol.receive(source), Lost | Full):
                protocol.send(target, token)

    def _part(self) -> None:
        """End both sides; the remote one reads what was sent before this host forgets the connection."""
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

    leaving: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, what has not arrived yet
    unasked: int | None = None  # the slot whose bytes the other host has not asked for yet
    writer_ended: bool = False

    def sources(self) -> list[Link]:
        # The other host reads no further message before it has the bytes of this one, so that sending it might block for ever.
        if self.unasked is not None:
            return [self.remote]
        if not self.writer_ended:
            return super().sources()
        return [self.remote] if self.leaving else []

    def left(self, source: Link) -> bool:
        self.writer_ended = source is self.near
        return self.writer_ended

    def carry(self, token: Token, source: Link) -> None:
        if isinstance(token, Full) and source is self.near:
            self._send(token)
        elif isinstance(token, Posted | Arrived) and source is self.remote:
            self._send_apart(token)
        else:
            super().carry(token, source)
            if isinstance(token, Welcome):
                self.join(0)

    def _send(self, full: Full) -> None:
        if full.segment:
            self.segments[full.slot] = map_segment(self.near.receive_handle(), full.segment)
        if full.carried:
            assert self.cargo is not None
            self.leaving[full.slot] = self.cargo.memories[full.slot][: full.carried]
            self.unasked = full.slot
        self.remote.send(protocol.encode(full))
        self.remote.send_bytes(memoryview(self.segments[full.slot])[: full.size])

    def _send_apart(self, token: Posted | Arrived) -> None:
        """The near end may have ended by now: what it put arrives all the same."""
        if token.slot not in self.leaving or self.carrier is None:
            raise Garbled(f"{token!r}, and nothing is on its way in that slot")
        if isinstance(token, Posted):
            self.unasked = None
            watched(self.carrier.send(self.leaving[token.slot]), [self.remote], STALL_S, self.carrier.check)
        else:
            del self.leaving[token.slot]


@dataclass
class _Inward(_Relay):
    """The reader is near: messages come in with their bytes, which go into memory of this host."""

    def begin(self) -> None:
        self.join(1)

    def carry(self, token: Token, source: Link) -> None:
        if isinstance(token, Full) and source is self.remote:
            self._receive(token)
        else:
            super().carry(token, source)

    def _receive(self, full: Full) -> None:
        handle, segment = segment_of(self.channel, self.segments.get(full.slot), full.size)
        self.segments[full.slot] = segment
        try:
            self.remote.receive_into(memoryview(segment)[: full.size])
            if full.carried:
                self._receive_apart(full)
            here = Full(full.step, full.slot, full.header, full.size, 0 if handle is None else len(segment), full.carried)
            protocol.send(self.near, here, handle)
        finally:
            if handle is not None:
                os.close(handle)

    def _receive_apart(self, full: Full) -> None:
        if self.cargo is None or self.carrier is None:
            raise Garbled(f"{full!r}, and no carrier was agreed on")
        if not _receives.acquire(timeout=STALL_S):
            raise RuntimeError(f"other transfers to this process took {STALL_S:g} s")
        try:
            arrived = self.carrier.receive(self.cargo.room(full.slot, full.carried, self.carrier.memory))
            self.remote.send(protocol.encode(Posted(full.slot)))
            watched(arrived, [self.near, self.remote], STALL_S, self.carrier.check)
        finally:
            _receives.release()
        self.remote.send(protocol.encode(Arrived(full.slot)))
