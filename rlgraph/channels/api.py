"""What every channel is: a writer, its readers, a fixed number of slots, deadlines, and three different ways to stop.

An end belongs to one thread. From any other, `close()` and `fail()` end a wait that is going on, and `statistics()` may be read.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout

MAX_SLOTS = 64  # the control messages of this many slots always fit into a socket's buffer, so sending one never waits


@dataclass(frozen=True)
class Statistics:
    """What one end has seen. `used` counts the slots that a writer found taken at its last put, or that a reader holds now."""

    slots: int
    used: int
    peak_used: int
    messages: int
    bytes: int
    blocked_s: float  # seconds spent waiting for the other end, the wait that is going on included


class Writer(Protocol):
    """The end that puts messages in."""

    def put(
        self, step: int, columns: Columns, timeout_s: float, *, dtype: torch.dtype | None = None, bucket_bytes: int | None = None
    ) -> None:
        """Copy the columns into a free slot for every reader; blocks while all slots are taken.

        Floating-point columns are stored as a copy of type `dtype` where one is given. With `bucket_bytes` a reader of this host that
        calls `begin` gets at the first columns while the others are being copied, each time that so many bytes more are there.
        Raises ChannelTimeout after `timeout_s` without a free slot (the channel stays usable), ChannelClosed when a reader
        closed its end, ChannelBroken when one failed or died, ChannelError for what is no column.
        """

    def close(self) -> None:
        """End the channel: the readers take what is in the slots, then get ChannelClosed."""

    def fail(self, reason: str) -> None:
        """Break the channel: the readers get ChannelBroken with the reason at once, before messages still in the slots."""

    def statistics(self) -> Statistics:
        """What this end has seen so far."""


class Reader(Protocol):
    """One of the ends that take messages out; each sees every message once, in order."""

    def take(self, step: int, timeout_s: float) -> dict[str, Column]:
        """Return the next message, which must be that of `step`; blocks until there is one.

        Tensors are views of the slot, valid until `release`, and are read-only: `release` finds changes in place.
        Raises ChannelTimeout after `timeout_s` of silence (the channel stays usable), ChannelClosed when the writer closed and all is
        taken, ChannelBroken when it failed or died, ChannelError for a message of another step.
        """

    def begin(self, step: int, timeout_s: float) -> dict[str, Column]:
        """Take the next message as soon as it is begun: `arrived` says which of its tensors are there. Raises as `take` does."""

    def arrived(self, beyond: int, timeout_s: float) -> int:
        """How many tensors of the message begun last are there; blocks until it is more than `beyond`, or all.

        Raises as `take` does.
        """

    def release(self) -> None:
        """Give back the slot of the oldest message taken and not yet released.

        Raises ChannelError if there is none, or if a column of it was changed in place.
        """

    def close(self) -> None:
        """Stop reading: the writer gets ChannelClosed."""

    def fail(self, reason: str) -> None:
        """Break the channel: the writer gets ChannelBroken with the reason."""

    def statistics(self) -> Statistics:
        """What this end has seen so far."""


@dataclass(frozen=True)
class End:
    """One end of a named channel, which words the errors raised there."""

    channel: str
    role: str

    def stopped(self, step: int, stop: "Stop") -> ChannelClosed | ChannelBroken:
        kind = ChannelClosed if stop.reason is None else ChannelBroken
        error = kind(f"{self._at(step)}: {stop.who} {stop.reason or 'closed the channel, so no further message can pass'}")
        error.channel, error.peer = self.channel, stop.peer
        return error

    def timeout(self, step: int, timeout_s: float, state: str) -> ChannelTimeout:
        return ChannelTimeout(f"{self._at(step)}: waited {timeout_s:g} s, {state}")

    def defect(self, step: int, what: str) -> ChannelError:
        return ChannelError(f"{self._at(step)}: {what}")

    def _at(self, step: int) -> str:
        return f"channel '{self.channel}', {self.role}, step {step}"


@dataclass(frozen=True)
class Stop:
    """Why no message can pass any more: `who` closed the channel, or broke it for a reason; `peer` is its process, 0 where unknown."""

    who: str
    reason: str | None = None
    peer: int = 0


class Meter:
    """Counts for one end what `Statistics` reports."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used = self.peak_used = self.messages = self.bytes = 0
        self._blocked_s = 0.0
        self._since: float | None = None

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside as waiting for the other end."""
        since = self._since = time.monotonic()
        try:
            yield
        finally:
            self._since = None
            self._blocked_s += time.monotonic() - since

    def message(self, size: int, used: int) -> None:
        self.messages += 1
        self.bytes += size
        self.use(used)

    def use(self, used: int) -> None:
        self.used = used
        self.peak_used = max(self.peak_used, used)

    def statistics(self) -> Statistics:
        since = self._since
        waiting_s = 0.0 if since is None else time.monotonic() - since
        return Statistics(self.slots, self.used, self.peak_used, self.messages, self.bytes, self._blocked_s + waiting_s)


class Taken:
    """A message in the hands of a reader; finds out whether it was changed in place."""

    def __init__(self, step: int, columns: Mapping[str, Column]) -> None:
        self.step = step
        self.tensors = sum(isinstance(column, torch.Tensor) for column in columns.values())
        self.text = self.tensors < len(columns)
        # inference tensors keep no count of their changes
        self._tensors = {name: c for name, c in columns.items() if isinstance(c, torch.Tensor) and not c.is_inference()}
        self._versions = [tensor._version for tensor in self._tensors.values()]

    def again(self, step: int) -> None:
        """Hold the same tensors once more, for the next message that lies there."""
        self.step, self._versions = step, [tensor._version for tensor in self._tensors.values()]

    def as_given(self) -> bool:
        """Whether the tensors can be given again, for the slot's next message: nobody changed them, or asked for gradients."""
        return all(t._version == v and not t.requires_grad for t, v in zip(self._tensors.values(), self._versions, strict=True))

    def check_unchanged(self, end: End) -> None:
        for (name, tensor), version in zip(self._tensors.items(), self._versions, strict=True):
            if tensor._version != version:
                raise end.defect(
                    self.step,
                    f"column '{name}' was changed in place between take and release; what a channel gives is shared with "
                    "other nodes and read-only: change a clone() of it",
                )


def check_channel(name: str, slots: int, readers: int) -> None:
    """Raise ChannelError for a number of slots or readers that no channel can have."""
    if not 1 <= slots <= MAX_SLOTS:
        raise ChannelError(f"channel '{name}' has slots={slots}; a channel holds 1 to {MAX_SLOTS} messages")
    if readers < 1:
        raise ChannelError(f"channel '{name}' has readers={readers}; a channel has at least 1 reader")


def check_columns(end: End, step: int, columns: Columns) -> None:
    """Raise ChannelError for a value that is neither a tensor nor a list of text."""
    for name, column in columns.items():
        if isinstance(column, torch.Tensor):
            continue
        if not isinstance(column, list) or not all(isinstance(row, str) for row in column):
            raise end.defect(step, f"column '{name}' is a {type(column).__name__}; a column is a torch.Tensor or a list of str")
