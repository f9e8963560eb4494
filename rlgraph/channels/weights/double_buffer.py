"""A second buffer for all weights, filled in one burst while the engine decodes with its own copy."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from rlgraph.channels.host.serialization import ALIGNMENT, device_view
from rlgraph.channels.weights.shards import WeightShard, copy_all, parameters
from rlgraph.errors import ChannelError

Weights: TypeAlias = Mapping[str, torch.Tensor]
Kinds: TypeAlias = Mapping[str, tuple[torch.Size, torch.dtype]]
Shards: TypeAlias = list[WeightShard]
Arrived: TypeAlias = Callable[[int, int], int]


class Staging:
    """Holds one version of the weights, every parameter whole, however the trainer's ranks shard it.

    On a GPU it is one flat buffer. The memory of a single trainer rank is copied into it as a whole or in a few pieces: a burst on its own
    stream disturbs decoding for the shortest time. The copies are planned once for each sharding, because planning takes longer than
    copying.
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
        """Copy the shards of all ranks to their places; returns when they are copied. The same list objects are checked once.

        `arrived(rank, beyond)` waits until more than `beyond` shards of a rank have arrived, and returns how many; without it all have.
        On a GPU the copies begin after the event `after`. Raises ChannelError, before the first copy, for shards that do not make up
        whole parameters.
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
        """Copy the rank's shards from number `first` up to `end`."""
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
        self.targets = [[shard.within(self.weights[shard.name]) for shard in shards] for shards in ranks]
        self._shards, self._whole = list(ranks), None
        if any(shard.tensor.is_cuda for shards in ranks for shard in shards) and len(self._streams) != len(ranks):
            self._streams = [torch.cuda.Stream() for _ in ranks]
        if source is not None and self._flat is not None and len(source) == len(self._flat):
            starts = list(_offsets(tensors).values())
            if starts == sorted(starts) and _offsets(tensors) == _offsets(self.weights):
                self._whole = source, [*starts, len(source)]

    def _allocate(self, kinds: Kinds, device: torch.device, tensors: Weights, source: torch.Tensor | None) -> None:
        if source is None:
            self._flat, self.weights = None, in_one_memory(kinds, device)
            return
        self._flat, self.weights = torch.empty_like(source), {}
        for name, start in _offsets(tensors).items():
            self.weights[name] = device_view(self._flat, kinds[name][1], kinds[name][0], start)


def in_one_memory(kinds: Kinds, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate tensors of these shapes and dtypes in one memory, which another process maps in one call."""
    places, end = {}, 0
    for name, (shape, dtype) in kinds.items():
        places[name] = end
        end += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    return {name: device_view(memory, dtype, shape, places[name]) for name, (shape, dtype) in kinds.items()}


def lie_together(weights: Weights) -> bool:
    """Whether all weights are contiguous in one memory."""
    tensors = list(weights.values())
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1 and all(tensor.is_contiguous() for tensor in tensors)


def _offsets(weights: Weights) -> dict[str, int]:
    return {name: int(weight.storage_offset()) * weight.itemsize for name, weight in weights.items()}


def _whole_memory(weights: Weights) -> torch.Tensor | None:
    """The one GPU memory that holds all the weights, as bytes; None if they are not in one."""
    first = next(iter(weights.values()))
    if not first.is_cuda or not lie_together(weights):
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
