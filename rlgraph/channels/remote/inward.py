"""The relay on the reader's host: it receives messages with their bytes, once for all readers to which this process passes them on.

These are the other readers on this host, which map the memory of the bytes, and a reader on the next host, to which the bytes are sent
while more of them arrive. A slot is free for the writer once all readers have released it. If one end stops, the others learn why.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from rlgraph.channels.host import protocol
from rlgraph.channels.host.acceptor import Acceptor
from rlgraph.channels.host.connection import Connection, ProtocolError, wait_readable
from rlgraph.channels.host.protocol import Arrived, ControlMessage, Disconnected, Failed, Free, Full, Goodbye, Lost, Portion, Posted, Staged
from rlgraph.channels.host.slot_memory import Handle, Segment, segment_of
from rlgraph.channels.remote import relay, transfer
from rlgraph.channels.remote.relay import Relay
from rlgraph.channels.remote.transfer import DeviceBuffers, Finish, HungUp, PairComm, PeerFailed, run_watched
from rlgraph.errors import show_value

POSTED_MOST = 2  # parts, so that a sender that has finished one can begin the next
_receives = threading.Lock()  # held for a transfer: a process receives one at a time


def from_writer(channel: str, remote: Connection, buffers: DeviceBuffers | None, onward: Acceptor | None, slots: int) -> Connection:
    """Start a relay to a writer on another host, and return the connection that stands for it; `onward` are further readers."""
    near, far = Connection.pair(remote.peer, remote.host)
    _Inward(channel, far, remote, buffers, onward=onward, slots=slots).start("from")
    return near


@dataclass
class _Inward(Relay):
    onward: Acceptor | None = None
    slots: int = 1
    coming: Full | None = None  # the message that arrives in parts
    there: tuple[int, int] = 0, 0  # the bytes and tensors of it that have arrived
    handle: int | None = None  # of new memory that the readers do not know yet
    unread: dict[int, list[Connection]] = field(default_factory=dict)  # for each slot, the readers that have not released it
    gone: list[Connection] = field(default_factory=list)  # readers that ended before the writer
    ended: bool = False  # whether the reader of this process has announced its end
    last: Goodbye | Failed | Lost | None = None  # of the writer

    def begin(self) -> None:
        self.join(1)

    def readers(self) -> list[Connection]:
        """All readers that receive messages."""
        others = [] if self.onward is None else self.onward.connections
        return [reader for reader in (self.near, *others) if reader not in self.gone]

    def sources(self) -> list[Connection]:
        return [*self.readers(), self.remote]

    def wait(self, sources: Sequence[Connection], deadline: float) -> list[int]:
        bells = [] if self.onward is None else [self.onward.bell]
        handles = wait_readable([*bells, *(source.fileno() for source in sources)], deadline)
        if self.onward is not None and self.onward.bell in handles:
            self.onward.hush()
        return handles

    def carry(self, message: ControlMessage, source: Connection) -> None:
        if source is not self.remote:
            self._answer(message, source)
        elif isinstance(message, Full):
            if self.coming is not None:
                raise ProtocolError(f"{show_value(message)}, in the middle of another message")
            self._receive(message)
        elif isinstance(message, Portion):
            self._receive_part(message)
        elif isinstance(message, Staged):
            raise ProtocolError(f"{show_value(message)}, which continues no message")
        else:
            self.last = message if isinstance(message, Goodbye | Failed | Lost) else None
            protocol.tell(self.readers(), message)

    def has_work(self, source: Connection, why: Disconnected) -> bool:
        if source is self.remote:
            return False
        if source is self.near and self.ended:
            self.gone.append(source)
        else:
            self._leave(source, why)
        return bool(self.readers())

    def note_message(self, message: ControlMessage, source: Connection) -> None:
        if source is self.remote and isinstance(message, Goodbye | Failed | Lost):
            self.last = message

    def fail(self, last: Failed) -> None:
        self.last = last
        super().fail(last)

    def part(self) -> None:
        self._forget_handle()
        if self.buffers is not None:
            self.buffers.forget_news()
        if self.onward is not None:
            self.onward.send_last(self.last or Lost(self.remote.peer, protocol.DIED.why))
        super().part()

    def _answer(self, message: ControlMessage, reader: Connection) -> None:
        """Pass on a reader's message: that it ended, or that a slot is free, once all readers have freed it."""
        if isinstance(message, Free) and reader in self.unread.get(message.slot, ()):
            self.unread[message.slot].remove(reader)
            if not self.unread[message.slot]:
                self.remote.send(protocol.encode(message))
        elif reader is not self.near:
            self._leave(reader, message)
        else:
            self.remote.send(protocol.encode(message))
            self.ended = True

    def _leave(self, reader: Connection, why: ControlMessage | Disconnected) -> None:
        """Tell the writer that a reader ended. The others still receive the messages on their way."""
        self.gone.append(reader)
        if not isinstance(why, Goodbye | Failed | Lost):
            why = Lost("" if reader is self.near else reader.peer, protocol.stop(why, "a reader", reader).reason or "")
        self.remote.send(protocol.encode(why))

    def _receive_part(self, part: Portion) -> None:
        """Receive the bytes of a part; readers learn of the message with the first part, which has the header."""
        full, (size, tensors) = self.coming, self.there
        if full is None or part.slot != full.slot or not tensors <= part.tensors <= full.coming:
            raise ProtocolError(f"{show_value(part)}, which continues no message")
        whole = part.tensors == full.coming
        if not max(size, full.header) <= part.bytes <= full.size or (whole and part.bytes < full.size):
            raise ProtocolError(f"{show_value(part)}, of a message of {full.size} bytes, {size} of which were there")
        self.remote.receive_into(memoryview(self.segments[part.slot])[size : part.bytes])
        self.there = part.bytes, part.tensors
        if not size:
            self._pass_on(full)
        protocol.tell_part(self.unread[part.slot], part, more=part.tensors > tensors)
        if whole:
            self.coming = None

    def _receive(self, full: Full) -> None:
        self.handle, self.segments[full.slot] = segment_of(self.channel, self.segments.get(full.slot), full.size)
        if full.coming:
            self.coming, self.there = full, (0, 0)
            return
        self.remote.receive_into(memoryview(self.segments[full.slot])[: full.size])
        if full.carried:
            self._receive_carried(full)
        else:
            self._pass_on(full)

    def _pass_on(self, full: Full) -> None:
        """Announce a message to the readers, with the handle of its memory if it is new."""
        self._gather()
        self.unread[full.slot] = self.readers()
        self._tell(full, self.unread[full.slot], None)
        self._forget_handle()

    def _tell(self, full: Full, readers: Sequence[Connection], news: Handle | Segment | None, awaited: int = 0) -> None:
        mapped = 0 if self.handle is None else len(self.segments[full.slot])
        message = Full(full.step, full.slot, full.header, full.size, mapped, full.carried, full.coming, awaited=awaited)
        protocol.tell_full(readers, message, self.handle, news)

    def _forget_handle(self) -> None:
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None

    def _gather(self) -> None:
        """Wait until all readers have connected: they share the memory from the first message on."""
        if self.onward is None or self.onward.full:
            return
        end = time.monotonic() + relay.STALL_S
        while not self.onward.full:
            handles = wait_readable([self.onward.bell, self.near.fileno()], end)
            if not handles:
                missing = (
                    f"{self.onward.missing_readers} of the readers that it passes messages on to did not connect within {relay.STALL_S:g} s"
                )
                raise PeerFailed(missing)
            if self.near.fileno() in handles:
                raise HungUp  # before the first message a reader can only announce its end
            self.onward.hush()

    def _receive_carried(self, full: Full) -> None:
        """Receive the carried bytes: relays to other hosts learn of them with the first part, readers on this host after the last."""
        if self.buffers is None or self.comm is None:
            raise ProtocolError(f"{show_value(full)}, but the ends agreed on no carrier")
        if full.awaited >= full.carried:
            raise ProtocolError(f"{show_value(full)}, of which no byte has left the writer")
        self._gather()
        self.unread[full.slot] = self.readers()
        beyond = [reader for reader in self.unread[full.slot] if reader.sends_on]
        part = protocol.part_bytes(full.carried, self.slots, transfer.PART_BYTES) if beyond else None
        if not _receives.acquire(timeout=relay.STALL_S):
            raise RuntimeError(f"other transfers to this process took {relay.STALL_S:g} s")
        try:
            memory, before = self.buffers.of_slot(full.slot, full.carried, self.comm.memory), 0
            for there in self._receive_parts(full, memory, self.comm, part or full.carried):
                if before:
                    protocol.tell(beyond, Staged(full.slot, there))
                else:
                    self._tell(full, beyond, None, full.carried - there)
                before = there
        finally:
            _receives.release()
        self.remote.send(protocol.encode(Arrived(full.slot)))
        self._tell(full, [reader for reader in self.unread[full.slot] if not reader.sends_on], self.buffers.news.pop(full.slot, None))
        self._forget_handle()

    def _receive_parts(self, full: Full, memory: torch.Tensor, comm: PairComm, part: int) -> Iterator[int]:
        """Receive bytes in parts, and yield after each how many have arrived. Meanwhile post the next part, if the sending host has it."""
        staged, begun = full.carried - full.awaited, 0
        posted: deque[tuple[int, Finish]] = deque()
        while begun < full.carried or posted:
            while staged < full.carried and (not (posted or begun < staged) or wait_readable([self.remote.fileno()], 0)):
                staged = self._hear_of_more(full, staged)
            while begun < staged and len(posted) < POSTED_MOST:
                end = min(begun + part, staged)
                posted.append((end, comm.receive(memory[begun:end])))
                self.remote.send(protocol.encode(Posted(full.slot, end)))
                begun = end
            there, arrived = posted.popleft()
            run_watched(arrived, [self.near, self.remote], relay.STALL_S, comm.check)
            yield there

    def _hear_of_more(self, full: Full, before: int) -> int:
        """Wait until the sending host has more of the bytes."""
        message = run_watched(lambda: protocol.receive(self.remote), [self.near], relay.STALL_S)
        if isinstance(message, Staged) and message.slot == full.slot and before < message.bytes <= full.carried:
            return message.bytes
        if not isinstance(message, Goodbye | Failed | Lost | Disconnected):
            raise ProtocolError(f"{show_value(message)}, in the middle of a message of which {before} of {full.carried} bytes were there")
        if not isinstance(message, Disconnected):
            self.note_message(message, self.remote)
            protocol.send(self.near, message)
        raise HungUp
