"""The interface of channels, and the table of transports: a writer, its readers, slots, deadlines, and three errors that stop it.

An end belongs to one thread. Other threads may call `close()` and `fail()`, which end its wait, and `statistics()`.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, cast

import torch

from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout

MAX_SLOTS = 64  # the control messages of this many slots always fit into a socket's buffer, so sending one never waits


@dataclass(frozen=True)
class Statistics:
    """The counts of one end. `used` is the number of slots that were occupied at a writer's last put, or that a reader holds now."""

    slots: int
    used: int
    peak_used: int
    messages: int
    bytes: int
    blocked_s: float  # seconds spent waiting for the other end, including a wait under way


class Writer(Protocol):
    """The end that writes messages into the channel."""

    def put(
        self, step: int, columns: Columns, timeout_s: float, *, dtype: torch.dtype | None = None, bucket_bytes: int | None = None
    ) -> None:
        """Copy the columns into a free slot for every reader; block while all slots are occupied.

        With `dtype`, floating-point columns are cast to it on the way. With `bucket_bytes`, a reader on this host that calls `begin` reads
        the first columns while the rest are being copied; it is notified after every `bucket_bytes` bytes.
        Raises ChannelTimeout after `timeout_s` without a free slot (the channel stays usable), ChannelClosed if a reader closed its
        end, ChannelBroken if a reader failed or died, ChannelError for a value that is not a column.
        """

    def close(self) -> None:
        """End the channel: the readers read the messages in the slots, then receive ChannelClosed."""

    def fail(self, reason: str) -> None:
        """Break the channel: the readers receive ChannelBroken with the reason at once, before messages still in the slots."""

    def statistics(self) -> Statistics:
        """The counts of this end so far."""


class Reader(Protocol):
    """An end that reads messages from the channel; each reader receives every message once, in order."""

    def take(self, step: int, timeout_s: float) -> dict[str, Column]:
        """Read the next message, which must belong to `step`; block until there is one.

        Tensors are views of the slot, valid until `release`. They are read-only: `release` detects changes in place.
        Raises ChannelTimeout after `timeout_s` without a message (the channel stays usable), ChannelClosed if the writer closed and all
        messages are read, ChannelBroken if it failed or died, ChannelError for a message of another step.
        """

    def begin(self, step: int, timeout_s: float) -> dict[str, Column]:
        """Read the next message while it is still being written. `wait_for_tensors` waits for its parts. Raises as `take` does."""

    def wait_for_tensors(self, beyond: int, timeout_s: float) -> int:
        """Count the arrived tensors of the message that `begin` returned last; block until there are more than `beyond`, or all.

        Raises as `take` does.
        """

    def release(self) -> None:
        """Free the slot of the oldest message that was read and not released.

        Raises ChannelError if there is none, or if one of its columns was changed in place.
        """

    def close(self) -> None:
        """Stop reading: the writer receives ChannelClosed."""

    def fail(self, reason: str) -> None:
        """Break the channel: the writer receives ChannelBroken with the reason."""

    def statistics(self) -> Statistics:
        """The counts of this end so far."""


@dataclass(frozen=True)
class End:
    """One end of a named channel; makes the errors that it raises."""

    channel: str
    role: str

    def stop_error(self, step: int, stop: "Stop") -> ChannelClosed | ChannelBroken:
        kind = ChannelClosed if stop.reason is None else ChannelBroken
        error = kind(f"{self._at(step)}: {stop.who} {stop.reason or 'closed the channel, so no further message can pass'}")
        error.channel, error.peer, error.host = self.channel, stop.peer, stop.host
        return error

    def timeout(self, step: int, timeout_s: float, state: str) -> ChannelTimeout:
        return ChannelTimeout(f"{self._at(step)}: waited {timeout_s:g} s, {state}")

    def defect(self, step: int, what: str) -> ChannelError:
        return ChannelError(f"{self._at(step)}: {what}")

    def _at(self, step: int) -> str:
        return f"channel '{self.channel}', {self.role}, step {step}"


@dataclass(frozen=True)
class Stop:
    """The reason why the channel ended: `who` closed it, or broke it for `reason`; `peer` is its process id, 0 if unknown;
    `host` is the address of its host, if that is another one and the connection to it ended."""

    who: str
    reason: str | None = None
    peer: int = 0
    host: str = ""


class Meter:
    """Counts the statistics of one end."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.used = self.peak_used = self.messages = self.bytes = 0
        self._blocked_s = 0.0
        self._since: float | None = None

    @contextmanager
    def count_wait(self) -> Iterator[None]:
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
    """A message that a reader holds; detects changes in place."""

    def __init__(self, step: int, columns: Mapping[str, Column]) -> None:
        self.step = step
        self.tensors = sum(isinstance(column, torch.Tensor) for column in columns.values())
        self.text = self.tensors < len(columns)
        # inference tensors do not count their changes
        self._tensors = {name: c for name, c in columns.items() if isinstance(c, torch.Tensor) and not c.is_inference()}
        self._versions = [tensor._version for tensor in self._tensors.values()]

    def renew(self, step: int) -> None:
        """Hold the same tensors for the slot's next message."""
        self.step, self._versions = step, [tensor._version for tensor in self._tensors.values()]

    def is_reusable(self) -> bool:
        """Whether the tensors can be reused for the slot's next message: nobody changed them or asked for gradients."""
        return all(t._version == v and not t.requires_grad for t, v in zip(self._tensors.values(), self._versions, strict=True))

    def check_unchanged(self, end: End) -> None:
        for (name, tensor), version in zip(self._tensors.items(), self._versions, strict=True):
            if tensor._version != version:
                raise end.defect(
                    self.step,
                    f"column '{name}' was changed in place between take and release; columns of a channel are shared with "
                    "other nodes and read-only: change a clone() of it",
                )


def check_channel(name: str, slots: int, readers: int) -> None:
    """Raise ChannelError for an impossible number of slots or readers."""
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


# Every transport by name: its two ends, and its properties for the plan, the memory estimate, the worker and the tests.
#
# A new transport is one file that defines `open_writer` and `open_reader`, and one line in `TRANSPORTS`, or in a user's program one call
# of `register`. The file is imported when an end is made, so a plan can name a transport whose library is not installed.

Reach: TypeAlias = Literal["process", "host", "hosts"]  # within which the readers must be
Memory: TypeAlias = Literal["host", "gpu"]


@dataclass(frozen=True)
class Transport:
    """One way to connect a writer and its readers. `module` defines `open_writer(transport, site)` and `open_reader(transport, site)`.

    `writer_keeps` is the memory in which the writer holds a copy of each slot, `reader_keeps` the memory in which each reader holds
    another copy: None if messages pass by reference, or if a reader maps the writer's memory. `carrier` is the library that sends columns
    on a GPU to another host. With `needs_ray` both ends must be workers of one Ray. With `encrypts` it supports `Site.encrypt` between
    hosts. With `passes_on`, `module` also defines `open_onward(transport, site)`: a reader can pass messages on to other readers.
    """

    name: str
    module: str
    reach: Reach
    writer_keeps: Memory | None
    reader_keeps: Memory | None = None
    carrier: Literal["nccl", "gloo"] | None = None
    needs_ray: bool = False
    encrypts: bool = False
    passes_on: bool = False


class Onward(Protocol):
    """The address at which readers connect to a reader that passes messages on to them."""

    @property
    def address(self) -> str: ...


@dataclass(frozen=True)
class Site:
    """The address of a channel, and its number of slots and readers, as both ends know them.

    The writer listens at the path `address`, or at a free port of `host` if the transport reaches other hosts; readers then connect to
    the writer's `address`. `local_readers` of the readers are on its host, and connect at the path. A reader waits `timeout_s` for the
    writer, and passes messages on to the readers of `onward`. The ends of one process share `here`.
    """

    channel: str
    slots: int
    readers: int
    address: str
    authkey: bytes = field(default=b"", repr=False)
    host: str = ""
    timeout_s: float = 0.0
    here: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    encrypt: bool = False  # traffic between hosts
    local_readers: int = 0
    onward: Onward | None = field(default=None, repr=False, compare=False)


class ListeningWriter(Writer, Protocol):
    """A writer whose `address` tells its readers where to connect."""

    @property
    def address(self) -> str: ...


# If several fit, a plan uses the first that reaches far enough and has its slots in the memory of the columns.
TRANSPORTS: Final[Mapping[str, Transport]] = {
    transport.name: transport
    for transport in (
        Transport("local", "rlgraph.channels.local", "process", writer_keeps=None),
        Transport("shm", "rlgraph.channels.host.channel", "host", writer_keeps="host"),
        Transport("peer", "rlgraph.channels.host.channel", "host", writer_keeps="gpu"),
        Transport("tcp", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host", encrypts=True, passes_on=True),
        Transport("nccl", "rlgraph.channels.host.channel", "hosts", writer_keeps="gpu", reader_keeps="gpu", carrier="nccl", passes_on=True),
        Transport(
            "gloo", "rlgraph.channels.host.channel", "hosts", writer_keeps="host", reader_keeps="host", carrier="gloo", passes_on=True
        ),
        Transport("ray", "rlgraph.channels.host.ray_channel", "host", writer_keeps="host", reader_keeps="host", needs_ray=True),
        Transport("ray nccl", "rlgraph.channels.host.ray_channel", "host", "gpu", reader_keeps="gpu", carrier="nccl", needs_ray=True),
        Transport("ray gloo", "rlgraph.channels.host.ray_channel", "host", "host", reader_keeps="host", carrier="gloo", needs_ray=True),
    )
}


def register(transport: Transport) -> None:
    """Add a custom transport under its name, in the process that compiles and launches; workers only import its module.

    Raises ChannelError if another transport has this name.

    register(Transport("files", "mine.files", "host", writer_keeps="host"))  # then call launch(transport="files")
    """
    known = cast(dict[str, Transport], TRANSPORTS)
    if known.setdefault(transport.name, transport) != transport:
        raise ChannelError(f"transport '{transport.name}' exists already; choose another name")


def transport_of(name: str) -> Transport:
    """Look up a transport by its name. Raises ChannelError for an unknown name."""
    if name not in TRANSPORTS:
        raise ChannelError(f"transport '{name}' does not exist; choose one of {list(TRANSPORTS)}")
    return TRANSPORTS[name]


def first_choice(reach: Reach, memory: Memory = "host") -> str:
    """Name the transport that a plan uses for readers within this reach and columns in this memory."""
    wanted = None if reach == "process" else memory
    return next(name for name, found in TRANSPORTS.items() if found.reach == reach and found.writer_keeps == wanted)


def open_writer(transport: str | Transport, site: Site) -> ListeningWriter:
    """Make the writing end of a channel. Raises ChannelError for a site on which the transport cannot work.

    writer = open_writer("shm", Site("scores", slots=2, readers=1, address="/tmp/job/scores", authkey=key))
    reader = open_reader("shm", Site("scores", slots=2, readers=1, address=writer.address, authkey=key, timeout_s=10))
    """
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(ListeningWriter, importlib.import_module(found.module).open_writer(found, site))


def open_onward(transport: str | Transport, site: Site) -> Onward:
    """Listen for readers to which a reader will pass messages on. Its `Site.onward` accepts the result, whose `address` they connect to."""
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(Onward, importlib.import_module(found.module).open_onward(found, site))


def open_reader(transport: str | Transport, site: Site) -> Reader:
    """Make a reading end of a channel, whose writer listens at the site's address.

    Raises ChannelTimeout if none listens in time, ChannelError if it refuses the reader.
    """
    found = transport if isinstance(transport, Transport) else transport_of(transport)
    return cast(Reader, importlib.import_module(found.module).open_reader(found, site))
