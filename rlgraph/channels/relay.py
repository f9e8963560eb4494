"""A channel between two hosts is a channel on each of them, joined by relays that carry tokens and bytes over TCP.

The relay of the writer's host takes part as a reader, that of the reader's host as a writer: each in a thread of the process
whose end it serves. So a `put` returns when its columns are in a slot, and travels while both ends compute.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlgraph.channels import tokens
from rlgraph.channels.address import ready
from rlgraph.channels.link import Link
from rlgraph.channels.memory import map_segment, new_segment
from rlgraph.channels.tokens import Full, Lost

STALL_S = 120.0  # a process may hold its interpreter for long; a host that is gone is found by keep-alive
FAREWELL_S = 10.0  # for the other host to read what was sent last
A_DAY_S = 86_400.0  # of silence, which is no fault between two messages: who waits for them has a deadline


def relayed(channel: str, remote: Link, *, outward: bool) -> Link:
    """Return the near end of a channel whose other end is at `remote`. `outward`: the writer is here, else the reader is."""
    near, far = Link.pair(remote.peer)
    relay = _Relay(channel, far, remote)
    name, carry = ("to", relay.outward) if outward else ("from", relay.inward)
    threading.Thread(target=relay.run, args=(carry,), name=f"relay of {channel} {name} {remote.peer}", daemon=True).start()
    return near


@dataclass
class _Relay:
    channel: str
    near: Link
    remote: Link
    segments: dict[int, mmap.mmap] = field(default_factory=dict)

    def run(self, carry: Callable[[Full], None]) -> None:
        """Carry what comes from either side until one of them ends; `carry` takes the messages."""
        try:
            with self.remote.deadline(STALL_S):
                while self._carry_next(carry):
                    pass
        except (EOFError, OSError):
            pass  # the ends find the end of their files, and say so with the channel's name
        finally:
            self._part()

    def _carry_next(self, carry: Callable[[Full], None]) -> bool:
        for handle in ready([self.near.fileno(), self.remote.fileno()], time.monotonic() + A_DAY_S):
            source, target = (self.near, self.remote) if handle == self.near.fileno() else (self.remote, self.near)
            token = tokens.receive(source)
            if isinstance(token, Lost):
                return False
            if isinstance(token, Full):
                carry(token)
            elif target is self.near:
                tokens.send(target, token)  # the near end may be gone, with messages still on their way out
            else:
                target.send(tokens.encode(token))
        return True

    def outward(self, full: Full) -> None:
        """The writer is near: its message goes out with its bytes."""
        if full.segment:
            self.segments[full.slot] = map_segment(self.near.receive_handle(), full.segment)
        self.remote.send(tokens.encode(full))
        self.remote.send_bytes(memoryview(self.segments[full.slot])[: full.size])

    def inward(self, full: Full) -> None:
        """The reader is near: the message comes in with its bytes, which go into memory of this host."""
        handle, segment = None, self.segments.get(full.slot)
        if segment is None or len(segment) < full.size:
            handle, segment = new_segment(self.channel, full.size)
            self.segments[full.slot] = segment
        try:
            self.remote.receive_into(memoryview(segment)[: full.size])
            here = Full(full.step, full.slot, full.header, full.size, 0 if handle is None else len(segment))
            tokens.send(self.near, here, handle)
        finally:
            if handle is not None:
                os.close(handle)

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
