"""Versions of weights on a feedback edge: every trainer rank publishes its shards, every generator receives all of them.

The weights use ordinary channels, one per trainer rank, whose slots stage the versions. Publishing is one copy (and cast)
into a free slot; no rank builds a full parameter that it does not own. A message holds a description of the shards, their tensors, and
their checksums if enabled. With two buffers a reader copies a version in one burst while the engine decodes with another copy.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import torch

from rlgraph.channels.api import Reader, Writer
from rlgraph.channels.host.slot_memory import ALIGNMENT, device_view
from rlgraph.channels.weights.shards import Assembly, WeightShard, check_own, copy_all, encode_shards, parameters, shards_of
from rlgraph.columns import Column
from rlgraph.errors import ChannelBroken, ChannelError, ChannelTimeout

# Checksums of tensors, with which both ends of a transfer detect a changed bit.

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLUMNS_COUNT = 1_000_003  # weights the sum along the columns differently from the sum along the rows


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a 64-bit checksum on the tensor's device. Equal bits in equal places have the same checksum on any device.

    It is Fletcher's checksum in two dimensions: the sums of rows and of columns, each weighted by its index. It changes if any single
    element changes, and if any two rows or columns are swapped. It reads the tensor twice and copies nothing.
    """
    rows = max(len(tensor), 1) if tensor.dim() else 1
    bits = tensor.detach().contiguous().view(WORDS[tensor.itemsize]).view(rows, -1)
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, weight in ((1, 1), (0, COLUMNS_COUNT)):
        sums = bits.sum(dim, dtype=torch.int64)
        found += weight * (sums * torch.arange(1, len(sums) + 1, device=tensor.device)).sum()
    return found


def checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the checksum of each tensor, `[n]` int64."""
    found = [checksum(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)


# The message that carries a version of one trainer rank's weights.

DESCRIPTION = "shards of all below"  # the first column of a message
CHECKSUMS = "checksums of all above"  # the last one
Weights: TypeAlias = Mapping[str, torch.Tensor]
Shards: TypeAlias = list[WeightShard]


@dataclass(frozen=True)
class WeightMessage:
    """A version of one trainer rank's weights. Its columns are the description, then each shard, and last the checksums, if enabled."""

    description: bytes  # the encoded places of the shards
    shards: Weights  # by column name, in the order of the description
    checksums: torch.Tensor | None = None  # [shards] int64

    @classmethod
    def describe(cls, shards: Shards) -> "WeightMessage":
        """Name the shards and encode their places. Raises ChannelError for shards that exceed their parameter or overlap."""
        check_own(shards)
        return cls(encode_shards(shards), dict(zip(_column_names(shards), (shard.tensor for shard in shards), strict=True)))

    def columns(self) -> dict[str, Column]:
        """List the columns in the order in which they are sent."""
        found: dict[str, Column] = {DESCRIPTION: torch.frombuffer(bytearray(self.description), dtype=torch.uint8), **self.shards}
        if self.checksums is not None:
            found[CHECKSUMS] = self.checksums
        return found

    @classmethod
    def read(cls, rank: int, columns: Mapping[str, Column]) -> "WeightMessage":
        """Read the columns of trainer rank `rank`. Raises ChannelError if they are not weights."""
        found = cast(dict[str, torch.Tensor], dict(columns))
        if DESCRIPTION not in found:
            raise ChannelError(
                f"weights: the message of trainer rank {rank} has no column '{DESCRIPTION}'; both ends run one version of rlgraph"
            )
        return cls(found.pop(DESCRIPTION).numpy().tobytes(), checksums=found.pop(CHECKSUMS, None), shards=found)

    @property
    def layout(self) -> tuple[object, ...]:
        """The data that determines how the shards of all ranks are assembled."""
        return self.description, [(tensor.shape, tensor.dtype) for tensor in self.shards.values()]

    def weight_shards(self) -> Shards:
        return shards_of(self.description, list(self.shards.values()))

    def check(self, version: int, rank: int, shards: Shards, arrived: Sequence[torch.Tensor]) -> None:
        """Compare the received shards with the checksums, if any. Raises ChannelBroken if they differ."""
        if self.checksums is None:
            return
        for shard, here, there in zip(shards, checksums(arrived).tolist(), self.checksums.tolist(), strict=True):
            if here != there:
                raise ChannelBroken(
                    f"version {version} of the weights: parameter '{shard.name}' {shard} of trainer rank {rank} changed on the way"
                    f" (checksum {here}, sent {there}); a device, its memory or a link corrupts data: check its error "
                    "counters, and resume from the last checkpoint without it"
                )


class ArrivingMessage:
    """A message of weights whose columns arrive one after the other."""

    def __init__(self, reader: Reader, rank: int, version: int) -> None:
        self.reader, self.rank = reader, rank
        self._columns = reader.begin(version, NO_DEADLINE_S)

    def wait_for_description(self) -> WeightMessage:
        """Wait until the description has arrived; shards of the returned message may arrive later."""
        self.reader.wait_for_tensors(0, NO_DEADLINE_S)
        return WeightMessage.read(self.rank, self._columns)

    def wait_for_shards(self, beyond: int) -> int:
        """Wait until more than `beyond` shards have arrived, and count them."""
        columns = self.reader.wait_for_tensors(beyond + 1, NO_DEADLINE_S)  # the description is one of them
        return min(columns - 1, len(self._columns) - 1 - (CHECKSUMS in self._columns))

    def wait_for_all(self) -> None:
        self.reader.wait_for_tensors(len(self._columns) - 1, NO_DEADLINE_S)


def _column_names(shards: Sequence[WeightShard]) -> list[str]:
    """Name a column for each shard after its parameter, with a number from the parameter's second box on."""
    count: dict[str, int] = {}
    names = []
    for shard in shards:
        count[shard.name] = count.get(shard.name, 0) + 1
        names.append(shard.name if count[shard.name] == 1 else f"{shard.name} #{count[shard.name]}")
    return names


# The ends of a feedback edge.

SWITCH_S = 0.0001  # after which one thread hands the interpreter to another
NO_DEADLINE_S = 86_400.0  # the receiving thread waits without a deadline; `receive` has one

Kinds: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]
Arrived: TypeAlias = Callable[[int, int], int]


class WeightsWriter:
    """One trainer rank's end. A generator on the same host receives a version bucket by bucket, while it is being staged."""

    def __init__(self, writer: Writer, dtype: torch.dtype, bucket_bytes: int | None = None, checksum: bool = False) -> None:
        self.writer, self.dtype, self.bucket_bytes, self.checksum = writer, dtype, bucket_bytes, checksum
        self._sent: Shards = []  # of the last version, and its message: describing 500 matrices of an adapter again needs a millisecond
        self._message: WeightMessage | None = None

    def publish(self, version: int, shards: Iterable[WeightShard], timeout_s: float) -> None:
        """Stage this rank's shards, cast to the generator's dtype; returns as soon as they are copied.

        Raises ChannelError for shards that leave their parameter or overlap, and the channel's errors.
        """
        sent = [shard for shard in shards if shard.replica == 0]
        message = self._message
        if message is None or len(sent) != len(self._sent) or any(new is not old for new, old in zip(sent, self._sent, strict=True)):
            message = self._message = WeightMessage.describe(sent)
            self._sent = sent
        if self.checksum:
            cast = (s.tensor.to(self.dtype) if s.tensor.is_floating_point() else s.tensor for s in sent)
            message = replace(message, checksums=checksums(cast))
        self.writer.put(version, message.columns(), timeout_s, dtype=self.dtype, bucket_bytes=self.bucket_bytes)

    def blocked_s(self) -> float:
        """The seconds that `publish` has waited for a free slot so far."""
        return self.writer.statistics().blocked_s


class WeightsReader:
    """A generator's end, from version `first` on.

    With `buffers=2` a thread receives the next version into a second buffer while the engine decodes.
    """

    def __init__(self, readers: Sequence[Reader], buffers: int, first: int = 1) -> None:
        self.readers = readers
        self._messages: list[WeightMessage] = []  # of the version that is arriving, by rank
        self._sharding: Sequence[tuple[object, ...]] = []  # what the assembly depends on, of the last version
        self._assembly = Assembly([])
        self._prefetch = _Prefetch(readers, first) if buffers == 2 else None

    def receive(self, version: int, timeout_s: float) -> dict[str, torch.Tensor]:
        """Receive version `version` of all parameters, valid until `release`. Versions are received in order.

        Raises ChannelError for shards that do not make up whole parameters, ChannelTimeout, ChannelBroken or ChannelClosed as the
        channel does.
        """
        return self._take(version, timeout_s) if self._prefetch is None else self._prefetch.receive(version, timeout_s)

    def release(self) -> None:
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
        """Receive the shards of all ranks and assemble the parameters. After a timeout the next call continues with the received shards."""
        for reader in self.readers[len(self._messages) :]:
            self._messages.append(WeightMessage.read(len(self._messages), reader.take(version, timeout_s)))
        messages, self._messages = self._messages, []
        sharding = [message.layout for message in messages]
        if sharding != self._sharding:
            self._assembly = Assembly([message.weight_shards() for message in messages])
            self._sharding = sharding
        tensors = [list(message.shards.values()) for message in messages]
        for rank, message in enumerate(messages):
            message.check(version, rank, self._assembly.shards[rank], tensors[rank])
        return self._assembly.assemble(tensors)


class Staging:
    """Holds one version of the weights, with whole parameters, however the trainer's ranks shard them.

    On a GPU it is one flat buffer. The memory of a single trainer rank is copied into it at once or in a few pieces: a burst on a separate
    stream disturbs decoding for the shortest time. The copies are planned once per sharding, because planning takes longer than copying.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.targets: list[list[torch.Tensor]] = []  # for each rank, the views of the weights that its shards are copied to
        self._shards: list[Shards] = []  # of the last version, by rank
        self._flat: torch.Tensor | None = None
        self._whole: tuple[torch.Tensor, list[int]] | None = (
            None  # the source memory if one copy of it suffices, and its offsets of parameters and end
        )
        self._streams: list[torch.cuda.Stream] = []  # one for each rank, so that their copies overlap, each over its own link

    def fill(self, ranks: Sequence[Shards], arrived: Arrived | None = None, after: torch.cuda.Event | None = None) -> None:
        """Copy the shards of all ranks to their places; return when they are copied. The same list objects are checked once.

        `arrived(rank, beyond)` waits until more than `beyond` shards of a rank have arrived, and returns how many; without it, all have
        arrived. On a GPU the copies begin after the event `after`. Raises ChannelError, before the first copy, for shards that do not
        form whole parameters.
        """
        if len(ranks) != len(self._shards) or any(new is not old for new, old in zip(ranks, self._shards, strict=True)):
            self._prepare(ranks)
        if after is not None:
            for stream in self._streams:
                stream.wait_event(after)
        there = [0] * len(ranks)
        while waiting := [rank for rank, shards in enumerate(ranks) if there[rank] < len(shards)]:
            for rank in waiting:
                first = there[rank]
                there[rank] = len(ranks[rank]) if arrived is None else arrived(rank, first)
                with torch.cuda.stream(self._streams[rank] if self._streams else None):
                    self._copy(rank, first, there[rank], ranks[rank])
        for stream in self._streams:
            stream.synchronize()

    def _copy(self, rank: int, first: int, end: int, shards: Shards) -> None:
        """Copy the rank's shards from index `first` up to `end`."""
        if self._whole is not None and self._flat is not None:
            source, starts = self._whole
            piece = slice(starts[first], starts[end])
            self._flat[piece].copy_(source[piece], non_blocking=True)
            return
        pairs = [(self.targets[rank][number], shards[number].tensor) for number in range(first, end) if shards[number].tensor.numel()]
        copy_all([to for to, _ in pairs], [of for _, of in pairs])

    def _prepare(self, ranks: Sequence[Shards]) -> None:
        """Plan the copies; parameters that changed their shape or dtype get new memory."""
        found = parameters(ranks)
        if not found:
            raise ChannelError("weights: no trainer rank sends a shard; the ranks yield every parameter by `weight_shards`")
        alone = len(ranks) == 1 and len(found) == len(ranks[0]) and all(shard.is_whole for shard in ranks[0])
        tensors = {shard.name: shard.tensor for shard in ranks[0]} if alone else {}
        source = _whole_memory(tensors) if alone else None
        kinds = {name: (torch.Size(parameter.shape), parameter.dtype) for name, parameter in found.items()}
        if {name: (weight.shape, weight.dtype) for name, weight in self.weights.items()} != kinds:
            self._allocate(kinds, next(iter(found.values())).boxes[0][1].tensor.device, tensors, source)
        self.targets = [[shard.view_of(self.weights[shard.name]) for shard in shards] for shards in ranks]
        self._shards, self._whole = list(ranks), None
        if any(shard.tensor.is_cuda for shards in ranks for shard in shards) and len(self._streams) != len(ranks):
            self._streams = [torch.cuda.Stream() for _ in ranks]
        if source is not None and self._flat is not None and len(source) == len(self._flat):
            starts = list(_offsets(tensors).values())
            if starts == sorted(starts) and _offsets(tensors) == _offsets(self.weights):
                self._whole = source, [*starts, len(source)]

    def _allocate(self, kinds: Kinds, device: torch.device, tensors: Weights, source: torch.Tensor | None) -> None:
        if source is None:
            self._flat, self.weights = None, flat_buffer(kinds, device)
            return
        self._flat, self.weights = torch.empty_like(source), {}
        for name, start in _offsets(tensors).items():
            self.weights[name] = device_view(self._flat, kinds[name][1], kinds[name][0], start)


@dataclass
class _Prefetch:
    """Receives the next version into a second buffer, on a thread that ends with the channel."""

    readers: Sequence[Reader]
    first: int
    staging: Staging = field(default_factory=Staging)
    last: dict[int, tuple[WeightMessage, Shards]] = field(default_factory=dict)  # by rank, of the last version
    weights: dict[str, torch.Tensor] = field(default_factory=dict)  # the checked weights in the buffer
    read: torch.cuda.Event | None = None  # when the engine has read the buffer

    def __post_init__(self) -> None:
        self.staged = threading.Semaphore(0)
        self.empty = threading.Semaphore(1)
        self.error: ChannelError | RuntimeError | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))  # otherwise each of its steps waits 5 ms for the decode loop
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
        """Copy each rank's shards as they are staged, once the engine has released the buffer, and release their slots."""
        self._copy(version)
        for reader in self.readers:
            reader.release()

    def _copy(self, version: int) -> None:
        arriving = [ArrivingMessage(reader, rank, version) for rank, reader in enumerate(self.readers)]
        messages = [message.wait_for_description() for message in arriving]
        shards = [self._shards(rank, message) for rank, message in enumerate(messages)]
        self.empty.acquire()
        self.staging.fill(shards, lambda rank, beyond: arriving[rank].wait_for_shards(beyond), self.read)
        for rank, message in enumerate(messages):
            arriving[rank].wait_for_all()
            message.check(version, rank, shards[rank], self.staging.targets[rank])
        self.weights = dict(self.staging.weights)

    def _shards(self, rank: int, message: WeightMessage) -> Shards:
        """The rank's shards: the same list object for every version with the same sharding and the same tensors."""
        last = self.last.get(rank)
        if last is None or not _same_tensors(last[0], message):
            last = self.last[rank] = message, message.weight_shards()
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


def _same_tensors(one: WeightMessage, other: WeightMessage) -> bool:
    """Whether both have the same tensor objects, with the same description."""
    if one.description != other.description or len(one.shards) != len(other.shards):
        return False
    return all(a is b for a, b in zip(one.shards.values(), other.shards.values(), strict=True))


def flat_buffer(kinds: Kinds, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate tensors of these shapes and dtypes in one memory block, which another process maps in one call."""
    places, end = {}, 0
    for name, (shape, dtype) in kinds.items():
        places[name] = end
        end += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    return {name: device_view(memory, dtype, shape, places[name]) for name, (shape, dtype) in kinds.items()}


def are_contiguous(weights: Weights) -> bool:
    """Whether all weights are contiguous in one memory block."""
    tensors = list(weights.values())
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1 and all(tensor.is_contiguous() for tensor in tensors)


def _offsets(weights: Weights) -> dict[str, int]:
    return {name: int(weight.storage_offset()) * weight.itemsize for name, weight in weights.items()}


def _whole_memory(weights: Weights) -> torch.Tensor | None:
    """The single GPU memory block that holds all weights, as bytes; None if there are several."""
    first = next(iter(weights.values()))
    if not first.is_cuda or not are_contiguous(weights):
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
