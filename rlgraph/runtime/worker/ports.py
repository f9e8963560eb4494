"""The channel ends of one worker: what it takes for a firing, what it puts after it, what it gives back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlgraph.channels.api import Reader, Statistics, Writer
from rlgraph.columns import Column, Columns, concat_rows
from rlgraph.compiler.plan import ChannelEnd, PlannedChannel


@dataclass
class Inbox:
    """One channel as a worker reads it: a reader for each writing rank; messages are shared by the worker's own nodes."""

    channel: PlannedChannel
    readers: Sequence[Reader]
    users: tuple[str, ...]  # this worker's nodes that read it, in firing order
    held: dict[int, Mapping[str, Column]] = field(default_factory=dict)

    def take(self, messages: Iterable[int], timeout_s: float) -> Mapping[str, Column]:
        """Take these messages as one batch: the rows of all writing ranks, in the order of the ranks."""
        for message in messages:
            if message not in self.held:
                self.held[message] = concat_rows([reader.take(message, timeout_s) for reader in self.readers])
        return concat_rows([self.held[message] for message in messages])

    def blocked_s(self) -> float:
        """Sum the seconds for which `take` has waited for messages so far."""
        return sum(reader.statistics().blocked_s for reader in self.readers)

    def done(self, node: str, messages: Iterable[int]) -> None:
        """Release the slots of these messages when the last of the worker's nodes has used them."""
        if node != self.users[-1]:
            return
        for message in messages:
            if self.held.pop(message, None) is not None:
                for reader in self.readers:
                    reader.release()


@dataclass
class Outbox:
    """One channel as a worker writes it."""

    channel: PlannedChannel
    writer: Writer

    def put(self, message: int, columns: Columns, timeout_s: float) -> None:
        self.writer.put(message, {name: columns[name] for name in self.channel.columns}, timeout_s)

    def blocked_s(self) -> float:
        """Read the seconds for which `put` has waited for a free slot so far."""
        return self.writer.statistics().blocked_s


@dataclass
class Mailbox:
    """All ends of one worker."""

    inboxes: list[Inbox] = field(default_factory=list)
    outboxes: list[Outbox] = field(default_factory=list)

    def read_by(self, node: str) -> list[Inbox]:
        return [box for box in self.inboxes if node in box.users]

    def written_by(self, node: str) -> list[Outbox]:
        return [box for box in self.outboxes if box.channel.writer == node]

    def statistics(self) -> dict[ChannelEnd, Statistics]:
        """Collect the counts of each end."""
        found = {ChannelEnd(box.channel.name, "put"): box.writer.statistics() for box in self.outboxes}
        for box in self.inboxes:
            for rank, reader in enumerate(box.readers):
                found[ChannelEnd(box.channel.name, "take", rank)] = reader.statistics()
        return found

    def fail(self, reason: str) -> None:
        """Break every channel, so that no peer waits for what will not come."""
        for outbox in self.outboxes:
            outbox.writer.fail(reason)
        for inbox in self.inboxes:
            for reader in inbox.readers:
                reader.fail(reason)

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.writer.close()
        for inbox in self.inboxes:
            for reader in inbox.readers:
                reader.close()
