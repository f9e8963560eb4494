"""Versions of weights on a feedback edge: every trainer rank publishes its rows, every generator receives them all.

The payload goes through ordinary channels, one for each trainer rank, whose slots stage the versions: publishing is one
copy (and cast) into a free slot, and no rank ever builds a full parameter that it does not own.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rlgraph.channels.base import Reader, Writer
from rlgraph.channels.staging import Staging
from rlgraph.errors import ChannelError, ChannelTimeout

SWITCH_S = 0.0005  # after which one thread gives the interpreter to another
A_DAY_S = 86_400.0  # the receiving thread has no deadline of its own: who waits for it has one


class WeightsWriter:
    """One trainer rank's end."""

    def __init__(self, writer: Writer, dtype: torch.dtype) -> None:
        self.writer, self.dtype = writer, dtype

    def publish(self, version: int, rows: Mapping[str, torch.Tensor], timeout_s: float) -> None:
        """Stage this rank's rows of every parameter, cast to the engine's dtype; returns as soon as they are copied."""
        self.writer.put(version, rows, timeout_s, dtype=self.dtype)

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
        self._ahead = _Ahead(self, first) if buffers == 2 else None

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Return version `version` of all parameters, valid until `done`. Versions are received one after another.

        Raises ChannelTimeout, ChannelBroken or ChannelClosed as the channel does.
        """
        if self._ahead is not None:
            return self._ahead.receive(version, timeout_s)
        return self.take(version, timeout_s)

    def done(self) -> None:
        """Give the version's buffer back; the engine has its own copy now."""
        if self._ahead is not None:
            self._ahead.free()
        else:
            self.release()

    def take(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Return the rows of all ranks below one another, without a copy where there is one rank."""
        parts = self.parts(version, timeout_s)
        return parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def parts(self, version: int, timeout_s: float) -> list[dict[str, torch.Tensor]]:
        """Return the rows of each rank, where the channels hold them. What has come before a timeout is there at the next call."""
        for reader in self.readers[len(self._parts) :]:
            self._parts.append({name: _tensor(rows) for name, rows in reader.take(version, timeout_s).items()})
        parts, self._parts = self._parts, []
        return parts

    def release(self) -> None:
        for reader in self.readers:
            reader.release()


@dataclass
class _Ahead:
    """Receives one version ahead into its own buffer. The thread ends with the channel."""

    weights: WeightsReader
    first: int
    staging: Staging = field(default_factory=Staging)

    def __post_init__(self) -> None:
        self.staged = threading.Semaphore(0)
        self.empty = threading.Semaphore(1)
        self.error: ChannelError | RuntimeError | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))  # else each of its steps waits 5 ms for the loop that decodes
        threading.Thread(target=self._run, name="receive weights", daemon=True).start()

    def _run(self) -> None:
        version = self.first
        while True:
            self.empty.acquire()
            try:
                arrived = self.weights.parts(version, A_DAY_S)
                self.staging.fill(arrived)
                del arrived
                self.weights.release()
            except (ChannelError, RuntimeError) as error:  # no memory for a copy, say: who waits is to hear of it
                self.error = error
                self.staged.release()
                return
            version += 1
            self.staged.release()

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        if not self.staged.acquire(timeout=timeout_s):
            raise ChannelTimeout(f"no version {version} of the weights within {timeout_s:.1f} s; the trainer has not published it")
        if self.error is not None:
            raise self.error
        return self.staging.weights

    def free(self) -> None:
        self.empty.release()


def _tensor(column: object) -> torch.Tensor:
    assert isinstance(column, torch.Tensor)
    return column
