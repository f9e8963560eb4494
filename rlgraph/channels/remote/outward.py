"""The relay on the writer's host: messages of the writer go out with their bytes."""

from dataclasses import dataclass, field

import torch

from rlgraph.channels.host import protocol
from rlgraph.channels.host.connection import Connection, ProtocolError
from rlgraph.channels.host.protocol import Arrived, ControlMessage, Disconnected, Full, Portion, Posted, Staged, Welcome
from rlgraph.channels.host.slot_memory import map_segment
from rlgraph.channels.remote import relay
from rlgraph.channels.remote.relay import Relay
from rlgraph.channels.remote.transfer import DeviceBuffers, watched
from rlgraph.errors import shown


def to_reader(channel: str, remote: Connection, buffers: DeviceBuffers | None) -> Connection:
    """Start a relay to a reader on another host, and return the connection that stands for it."""
    near, far = Connection.pair(remote.peer, remote.host)
    near.sends_on = True
    _Outward(channel, far, remote, buffers).start("to")
    return near


@dataclass
class _Outward(Relay):
    """The writer is near: its messages go out with their bytes."""

    sent: dict[int, int] = field(default_factory=dict)  # by slot, the bytes that have left of the message that is being written
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)  # by slot, device bytes that have not arrived yet
    unrequested: int | None = None  # the slot of which the other host has not requested all device bytes yet
    staged: int = 0  # of those bytes, how many this host has
    requested: int = 0
    writer_ended: bool = False

    def sources(self) -> list[Connection]:
        # The other host reads no further message before it has the bytes of this one, so sending another might block for ever.
        if self.unrequested is not None:
            return [self.remote, self.near] if self._awaits() else [self.remote]
        if not self.writer_ended:
            return super().sources()
        return [self.remote] if self.leaving else []

    def left(self, source: Connection, why: Disconnected) -> bool:
        self.writer_ended = source is self.near
        return self.writer_ended and not self._awaits()

    def _awaits(self) -> bool:
        """Whether device bytes of the message are still to come to this host, which passes them on."""
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
            self.unrequested, self.staged, self.requested = full.slot, full.carried - full.awaited, 0
        self.remote.send(protocol.encode(full), more=not full.coming)
        self.sent[full.slot] = 0
        if not full.coming:
            self.remote.send_bytes(memoryview(self.segments[full.slot])[: full.size])

    def _send_apart(self, message: Posted | Arrived) -> None:
        """Send device bytes of the slot, those that are requested. They arrive even if the writer has ended by now."""
        if message.slot not in self.leaving or self.comm is None or isinstance(message, Posted) is not (message.slot == self.unrequested):
            raise ProtocolError(f"{shown(message)}, but no such bytes are under way in that slot")
        if isinstance(message, Arrived):
            del self.leaving[message.slot]
            return
        leaving = self.leaving[message.slot]
        if not self.requested < message.bytes <= self.staged:
            raise ProtocolError(f"{shown(message)}, of {self.staged} bytes, {self.requested} of which were requested before")
        part, self.requested = leaving[self.requested : message.bytes], message.bytes
        if self.requested == len(leaving):
            self.unrequested = None
        watched(self.comm.send(part), [self.remote], relay.STALL_S, self.comm.check)
