"""Versions of weights on a feedback edge: every trainer rank publishes its shards, every generator receives all of them.

The weights go through ordinary channels, one for each trainer rank, whose slots stage the versions. Publishing is one copy (and cast)
into a free slot; no rank builds a full parameter that it does not own. A message holds a description of the shards, their tensors, and
their checksums if enabled.
"""

import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from rlgraph.channels.api import Reader, Writer
from rlgraph.channels.weights.checksum import checksums
from rlgraph.channels.weights.double_buffer import Staging
from rlgraph.channels.weights.shards import Assembly, WeightShard, check_own, described, shards_of
from rlgraph.columns import Column
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

SHARDS = "shards of all below"  # the first column: where the others belong
CHECKSUMS = "checksums of all above"  # the last one
SWITCH_S = 0.0001  # after which one thread gives the interpreter to another
A_DAY_S = 86_400.0  # the receiving thread waits without a deadline; `receive` has one


class WeightsWriter:
    """One trainer rank's end. A generator on the same host receives a version bucket by bucket, while it is being staged."""

    def __init__(self, writer: Writer, dtype: torch.dtype, bucket_bytes: int | None = None, checksum: bool = False) -> None:
        self.writer, self.dtype, self.bucket_bytes, self.checksum = writer, dtype, bucket_bytes, checksum
        self._sharding: Sequence[tuple[object, ...]] = []  # what the description depends on, of the last version
        self._names: list[str] = []
        self._description = torch.empty(0)

    def publish(self, version: int, shards: Iterable[WeightShard], timeout_s: float) -> None:
        """Stage this rank's shards, cast to the generator's dtype; returns as soon as they are copied.

        Raises ChannelError for shards that leave their parameter or overlap, and the channel's errors.
        """
        sent = [shard for shard in shards if shard.replica == 0]
        sharding = [(s.name, s.global_shape, s.offsets, s.tensor.shape, s.tensor.dtype) for s in sent]
        if not self._names or sharding != self._sharding:
            check_own(sent)
            self._sharding, self._names, self._description = sharding, _column_names(sent), described(sent)
        tensors = [shard.tensor for shard in sent]
        columns: dict[str, Column] = {SHARDS: self._description, **dict(zip(self._names, tensors, strict=False))}
        if self.checksum:
            columns[CHECKSUMS] = checksums(tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in tensors)
        self.writer.put(version, columns, timeout_s, dtype=self.dtype, bucket_bytes=self.bucket_bytes)

    def blocked_s(self) -> float:
        """The seconds that `publish` has waited for a free slot so far."""
        return self.writer.statistics().blocked_s


class WeightsReader:
    """A generator's end, from version `first` on.

    With `buffers=2` a thread receives the next version into a second buffer while the engine decodes.
    """

    def __init__(self, readers: Sequence[Reader], buffers: int, first: int = 1) -> None:
        self.readers = readers
        self._messages: list[dict[str, torch.Tensor]] = []  # of the version that is arriving, by rank
        self._sharding: Sequence[tuple[object, ...]] = []  # what the assembly depends on, of the last version
        self._assembly = Assembly([])
        self._prefetch = _Prefetch(readers, first) if buffers == 2 else None

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Receive version `version` of all parameters, valid until `done`. Versions are received in order.

        Raises ChannelError for shards that do not make up whole parameters, ChannelTimeout, ChannelBroken or ChannelClosed as the
        channel does.
        """
        return self._take(version, timeout_s) if self._prefetch is None else self._prefetch.receive(version, timeout_s)

    def done(self) -> None:
        """Free the version's buffer: the engine has copied it, or will have once this thread's CUDA stream gets here."""
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        if self._prefetch is not None:
            self._prefetch.free(None if stream is None else stream.record_event())
            return
        if stream is not None:
            stream.synchronize()
        for reader in self.readers:
            reader.release()

    def _take(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Take the shards of all ranks and assemble the parameters. After a timeout the next call goes on with what has arrived."""
        for reader in self.readers[len(self._messages) :]:
            self._messages.append(_tensors(reader.take(version, timeout_s)))
        messages, self._messages = self._messages, []
        received = [_RankShards.of(rank, message) for rank, message in enumerate(messages)]
        sharding = [(rank_shards.description, [(tensor.shape, tensor.dtype) for tensor in rank_shards.tensors]) for rank_shards in received]
        if sharding != self._sharding:
            self._assembly = Assembly([rank_shards.shards() for rank_shards in received])
            self._sharding = sharding
        for rank, message in enumerate(messages):
            check(version, rank, self._assembly.shards[rank], received[rank].tensors, message)
        return self._assembly.assemble([rank_shards.tensors for rank_shards in received])


@dataclass(frozen=True)
class _RankShards:
    """The shards of one trainer rank in a version: their description and their tensors."""

    rank: int
    description: bytes
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, rank: int, message: Mapping[str, torch.Tensor]) -> "_RankShards":
        """Split a message whose first column has arrived."""
        if SHARDS not in message:
            raise ChannelError(
                f"weights: the message of trainer rank {rank} has no column '{SHARDS}'; both ends run one version of rlgraph"
            )
        return cls(rank, message[SHARDS].numpy().tobytes(), [tensor for name, tensor in message.items() if name not in (SHARDS, CHECKSUMS)])

    def shards(self) -> list[WeightShard]:
        return shards_of(self.description, self.tensors)

    def same(self, other: "_RankShards") -> bool:
        """Whether these are the same tensor objects as the other's, with the same description."""
        alike = self.description == other.description and len(self.tensors) == len(other.tensors)
        return alike and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))


@dataclass
class _Prefetch:
    """Receives the next version into a second buffer, on a thread that ends with the channel."""

    readers: Sequence[Reader]
    first: int
    staging: Staging = field(default_factory=Staging)
    last: dict[int, tuple["_RankShards", list[WeightShard]]] = field(default_factory=dict)  # by rank, of the last version
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
            except (ChannelError, RuntimeError) as error:  # out of memory, for example: `receive` raises it
                self.error = error
                self.staged.release()
                return
            version += 1
            self.staged.release()

    def _next(self, version: int) -> None:
        """Copy each rank's shards as they are staged, once the engine has released the buffer."""
        messages = [_tensors(reader.begin(version, A_DAY_S)) for reader in self.readers]
        for reader in self.readers:
            reader.arrived(0, A_DAY_S)  # the description, which comes first
        shards = [self._shards(_RankShards.of(rank, message)) for rank, message in enumerate(messages)]
        self.empty.acquire()
        self.staging.fill(
            shards, lambda rank, beyond: min(self.readers[rank].arrived(beyond + 1, A_DAY_S) - 1, len(shards[rank])), self.read
        )
        for rank, message in enumerate(messages):
            self.readers[rank].arrived(len(message) - 1, A_DAY_S)  # what comes behind the last shard
            check(version, rank, shards[rank], self.staging.targets[rank], message)
        self.weights = dict(self.staging.weights)
        del messages
        for reader in self.readers:
            reader.release()

    def _shards(self, rank_shards: "_RankShards") -> list[WeightShard]:
        """The rank's shards: the same list object for every version with the same sharding and the same tensors."""
        last = self.last.get(rank_shards.rank)
        if last is None or not rank_shards.same(last[0]):
            last = self.last[rank_shards.rank] = rank_shards, rank_shards.shards()
        return last[1]

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        if not self.staged.acquire(timeout=timeout_s):
            raise ChannelTimeout(f"no version {version} of the weights within {timeout_s:.1f} s; the trainer has not published it")
        if self.error is not None:
            raise self.error
        return self.weights

    def free(self, read: torch.cuda.Event | None) -> None:
        self.read = read
        self.empty.release()


def check(
    version: int, rank: int, shards: Sequence[WeightShard], arrived: Sequence[torch.Tensor], message: Mapping[str, torch.Tensor]
) -> None:
    """Compare a rank's received shards with the checksums in its message, if any. Raises ChannelBroken."""
    if CHECKSUMS not in message:
        return
    for shard, here, there in zip(shards, checksums(arrived).tolist(), message[CHECKSUMS].tolist(), strict=True):
        if here != there:
            raise ChannelBroken(
                f"version {version} of the weights: parameter '{shard.name}' {shard} of trainer rank {rank} arrived with other bits than "
                f"it was sent with (checksum {here}, sent {there}); a device, its memory or a link corrupts data: look into its error "
                "counters, and go on from the last checkpoint without it"
            )


def _column_names(shards: Sequence[WeightShard]) -> list[str]:
    """Name a column for each shard: by its parameter, with a number from its second box on."""
    count: dict[str, int] = {}
    names = []
    for shard in shards:
        count[shard.name] = count.get(shard.name, 0) + 1
        names.append(shard.name if count[shard.name] == 1 else f"{shard.name} #{count[shard.name]}")
    return names


def _tensors(columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
    return cast(dict[str, torch.Tensor], columns)
