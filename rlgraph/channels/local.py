"""Channels inside one process. Messages pass by reference, and no call waits, since no other thread could end the wait."""

from collections import deque
from dataclasses import dataclass, field

import torch

from rlgraph.channels.api import End, Meter, Site, Statistics, Stop, Taken, Transport, check_channel, check_columns
from rlgraph.columns import Column, Columns
from rlgraph.errors import ChannelError


@dataclass(frozen=True)
class _Message:
    step: int
    columns: Columns
    size: int


@dataclass
class _Queue:
    """The messages that one reader has not released, oldest first; the reader holds the messages in `taken`."""

    messages: deque[_Message] = field(default_factory=deque)
    taken: deque[Taken] = field(default_factory=deque)


@dataclass
class _Shared:
    name: str
    slots: int
    queues: list[_Queue]
    address: str = ""
    opened: int = 0  # readers
    stop: Stop | None = None  # what the writer did, for the readers
    reader_stop: Stop | None = None  # what a reader did, for the writer

    @property
    def slots_in_use(self) -> int:
        return max(len(queue.messages) for queue in self.queues)


class LocalWriter:
    """The writer of a `local_channel`."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self.address = shared.address
        self._end = End(shared.name, "the writer")
        self._meter = Meter(shared.slots)

    def put(
        self, step: int, columns: Columns, timeout_s: float, *, dtype: torch.dtype | None = None, bucket_bytes: int | None = None
    ) -> None:
        check_columns(self._end, step, columns)
        shared = self._shared
        stop = shared.stop or shared.reader_stop
        if stop is not None:
            raise self._end.stop_error(step, stop)
        if shared.slots_in_use == shared.slots:
            state = f"all {shared.slots} slots are taken, and in one process nobody else could free one: take and release first"
            raise self._end.timeout(step, 0, state)
        stored = {name: _copy_column(column, dtype) for name, column in columns.items()}
        message = _Message(step, stored, sum(_size(column) for column in stored.values()))
        for queue in shared.queues:
            queue.messages.append(message)
        self._meter.message(message.size, shared.slots_in_use)

    def close(self) -> None:
        self._shared.stop = self._shared.stop or Stop("the writer")

    def fail(self, reason: str) -> None:
        self._shared.stop = self._shared.stop or Stop("the writer", f"failed: {reason}")

    def statistics(self) -> Statistics:
        self._meter.use(self._shared.slots_in_use)
        return self._meter.statistics()


class LocalReader:
    """A reader of a `local_channel`."""

    def __init__(self, shared: _Shared, queue: _Queue) -> None:
        self._shared = shared
        self._queue = queue
        self._end = End(shared.name, "a reader")
        self._meter = Meter(shared.slots)
        self._stop: Stop | None = None

    def take(self, step: int, timeout_s: float) -> dict[str, Column]:
        queue, stop = self._queue, self._shared.stop
        waiting = len(queue.messages) - len(queue.taken)
        if self._stop is not None:
            raise self._end.stop_error(step, self._stop)
        if stop is not None and (stop.reason is not None or not waiting):
            raise self._end.stop_error(step, stop)
        if not waiting:
            raise self._end.timeout(step, 0, "no message is there, and in one process nobody else could put one: fire the writer first")
        message = queue.messages[len(queue.taken)]
        if message.step != step:
            raise self._end.defect(step, f"the next message is that of step {message.step}; both ends must count the same steps")
        queue.taken.append(Taken(step, message.columns))
        self._meter.message(message.size, len(queue.taken))
        return dict(message.columns)

    def begin(self, step: int, timeout_s: float) -> dict[str, Column]:
        return self.take(step, timeout_s)

    def wait_for_tensors(self, beyond: int, timeout_s: float) -> int:
        return self._queue.taken[-1].tensors

    def release(self) -> None:
        if not self._queue.taken:
            raise ChannelError(f"channel '{self._end.channel}', a reader: release() without a message taken; each take is released once")
        self._queue.messages.popleft()
        taken = self._queue.taken.popleft()
        self._meter.use(len(self._queue.taken))
        taken.check_unchanged(self._end)

    def close(self) -> None:
        self._end_with(Stop("a reader"))

    def fail(self, reason: str) -> None:
        self._end_with(Stop("a reader", f"failed: {reason}"))

    def statistics(self) -> Statistics:
        return self._meter.statistics()

    def _end_with(self, stop: Stop) -> None:
        self._stop = self._stop or stop
        self._shared.reader_stop = self._shared.reader_stop or stop


def local_channel(name: str, slots: int, readers: int) -> tuple[LocalWriter, list[LocalReader]]:
    """Make the ends of a channel inside this process. Columns pass by reference, so the writer must not change them after `put`.

    A call that would have to wait raises ChannelTimeout at once. Raises ChannelError for an impossible number of slots or readers.

    >>> writer, [reader] = local_channel("scores", slots=1, readers=1)
    >>> writer.put(0, {"scores": torch.ones(2)}, timeout_s=1)
    >>> reader.take(0, timeout_s=1)
    {'scores': tensor([1., 1.])}
    """
    check_channel(name, slots, readers)
    shared = _Shared(name, slots, [_Queue() for _ in range(readers)])
    return LocalWriter(shared), [LocalReader(shared, queue) for queue in shared.queues]


def open_writer(transport: Transport, site: Site) -> LocalWriter:
    return LocalWriter(_shared_state(site))


def open_reader(transport: Transport, site: Site) -> LocalReader:
    """Make the next reader. Raises ChannelError if all readers have been made."""
    shared = _shared_state(site)
    if shared.opened == len(shared.queues):
        raise ChannelError(f"channel '{site.channel}' has {len(shared.queues)} readers, and all of them have been made")
    shared.opened += 1
    return LocalReader(shared, shared.queues[shared.opened - 1])


def _shared_state(site: Site) -> _Shared:
    """Look up the state that the ends at this site share in this process; the first end makes it."""
    if site.address not in site.here:
        check_channel(site.channel, site.slots, site.readers)
        site.here[site.address] = _Shared(site.channel, site.slots, [_Queue() for _ in range(site.readers)], site.address)
    found: _Shared = site.here[site.address]
    return found


def _copy_column(column: Column, dtype: torch.dtype | None) -> Column:
    if isinstance(column, torch.Tensor):
        column = column.detach()
        # A cast always copies, whatever the dtype was: the writer of weights continues to change its tensors.
        return column.to(dtype, copy=True) if dtype is not None and column.is_floating_point() else column
    return column


def _size(column: Column) -> int:
    return column.nbytes if isinstance(column, torch.Tensor) else sum(len(row.encode()) for row in column)
