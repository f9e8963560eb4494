"""Versions of weights on a feedback edge: every trainer rank publishes its rows, every generator receives them all.

The payload goes through ordinary channels, one for each trainer rank, whose slots stage the versions: publishing is one
copy (and cast) into a free slot, and no rank ever builds a full parameter that it does not own.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from rlgraph.channels.base import Reader, Writer
from rlgraph.channels.checksum import checksums
from rlgraph.channels.staging import Staging
from rlgraph.columns import Column
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

CHECKSUMS = "checksums of all above"  # a column beside the parameters
SWITCH_S = 0.0001  # after which one thread gives the interpreter to another
A_DAY_S = 86_400.0  # the receiving thread has no deadline of its own: who waits for it has one


class WeightsWriter:
    """One trainer rank's end. A generator of this host receives a version while it is being staged, bucket by bucket."""

    def __init__(self, writer: Writer, dtype: torch.dtype, bucket_bytes: int | None = None, checksum: bool = False) -> None:
        self.writer, self.dtype, self.bucket_bytes, self.checksum = writer, dtype, bucket_bytes, checksum

    def publish(self, version: int, rows: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        """Stage this rank's rows of every parameter, cast to the engine's dtype; returns as soon as they are copied."""
        columns = dict(rows)
        if self.checksum:
            columns[CHECKSUMS] = checksums(row.to(self.dtype) if row.is_floating_point() else row for row in rows.values())
        self.writer.put(version, columns, timeout_s, dtype=self.dtype, bucket_bytes=self.bucket_bytes)

    def blocked_s(self) -> float:
        """Return how long `publish` has waited for a free slot so far."""
        return self.writer.statistics().blocked_s


class WeightsReader:
    """A generator's end, from version `first` on.

    With `buffers=2` a thread receives the next version into a second buffer while the engine decodes.
    """

    def __init__(self, readers: Sequence[Reader], buffers: int, first: int = 1) -> None:
        self.readers = readers
        self._parts: list[dict[str, torch.Tensor]] = []  # of the version that is arriving, by rank
        self._ahead = _Ahead(readers, first) if buffers == 2 else None

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Return version `version` of all parameters, valid until `done`. Versions are received one after another.

        Raises ChannelTimeout, ChannelBroken or ChannelClosed as the channel does.
        """
        return self._take(version, timeout_s) if self._ahead is None else self._ahead.receive(version, timeout_s)

    def done(self) -> None:
        """Give the version's buffer back: the engine has its own copy, or will have once this thread's stream has come so far."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        if self._ahead is not None:
            self._ahead.free(None if stream is None else stream.record_event())
            return
        if stream is not None:
            stream.synchronize()
        for reader in self.readers:
            reader.release()

    def _take(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Return the rows of all ranks below one another, without a copy where there is one rank.

        What has come before a timeout is there at the next call.
        """
        for reader in self.readers[len(self._parts) :]:
            self._parts.append(_tensors(reader.take(version, timeout_s)))
        parts, self._parts = self._parts, []
        for rank, part in enumerate(parts):
            check(version, rank, part)
        parts = [parameters(part) for part in parts]
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass
class _Ahead:
    """Receives one version ahead into its own buffer. The thread ends with the channel."""

    readers: Sequence[Reader]
    first: int
    staging: Staging = field(default_factory=Staging)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # what is staged there, checked
    read: torch.cuda.Event | None = None  # when the engine has read the buffer

    def __post_init__(self) -> None:
        self.staged = threading.Semaphore(0)
        self.empty = threading.Semaphore(1)
        self.error: ChannelError | RuntimeError | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))  # else each of its steps waits 5 ms for the loop that decodes
        threading.Thread(target=self._run, name="receive weights", daemon=True).start()

    def _run(self) -> None:
        version = self.first
        while True:
            try:
                self._next(version)
            except (ChannelError, RuntimeError) as error:  # no memory for a copy, say: who waits is to hear of it
                self.error = error
                self.staged.release()
                return
            version += 1
            self.staged.release()

    def _next(self, version: int) -> None:
        """Copy what a rank has staged while it stages the rest, once the engine has done with the buffer."""
        parts = [_tensors(reader.begin(version, A_DAY_S)) for reader in self.readers]
        self.empty.acquire()
        self.staging.fill(parts, lambda rank, beyond: self.readers[rank].arrived(beyond, A_DAY_S), self.read)
        for rank, part in enumerate(self.staging.parts):
            check(version, rank, part)
        self.weights = parameters(self.staging.weights)
        del parts
        for reader in self.readers:
            reader.release()

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        if not self.staged.acquire(timeout=timeout_s):
            raise ChannelTimeout(f"no version {version} of the weights within {timeout_s:.1f} s; the trainer has not published it")
        if self.error is not None:
            raise self.error
        return self.weights

    def free(self, read: torch.cuda.Event | None) -> None:
        self.read = read
        self.empty.release()


def parameters(rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the rows without the checksums that came along."""
    return {name: row for name, row in rows.items() if name != CHECKSUMS}


def check(version: int, rank: int, rows: Mapping[str, torch.Tensor]) -> None:
    """Compare what came of a rank with the checksums that came along, if any. Raises ChannelBroken."""
    if CHECKSUMS not in rows:
        return
    sent = rows[CHECKSUMS].tolist()
    arrived = parameters(rows)
    for name, here, there in zip(arrived, checksums(arrived.values()).tolist(), sent, strict=True):
        if here != there:
            raise ChannelBroken(
                f"version {version} of the weights: parameter '{name}' of trainer rank {rank} arrived with other bits than it was sent "
                f"with (checksum {here}, sent {there}); a device, its memory or a link corrupts data: look into its error counters, "
                "and go on from the last checkpoint without it"
            )


def _tensors(columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
    return cast(dict[str, torch.Tensor], columns)
