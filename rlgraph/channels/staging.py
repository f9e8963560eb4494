"""A second buffer for all weights, filled in one burst while the engine goes on with its own."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import torch

from rlgraph.channels.layout import ALIGNMENT, device_view

Weights: TypeAlias = Mapping[str, torch.Tensor]
Arrived: TypeAlias = Callable[[int, int], int]


class Staging:
    """Holds one version of the weights: every parameter whole, whatever rows the trainer's ranks sent.

    On a GPU it is one flat buffer, which a single trainer rank's memory is copied into as a whole, or in few parts: bursts on a stream
    of its own disturb decoding for the shortest time. What is copied where is kept while the rows lie where they lay: to look at each
    parameter again takes longer than to copy it.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._rows: list[torch.Tensor] = []  # of the last version, rank by rank and parameter by parameter
        self.parts: list[dict[str, torch.Tensor]] = []  # of the weights, the rows of each rank
        self._flat: torch.Tensor | None = None
        self._whole: tuple[torch.Tensor, list[int]] | None = None  # memory that is copied as it is, and where parameters begin and it ends
        self._streams: list[torch.cuda.Stream] = []  # one for each rank: what they send comes at once, each over its own link

    def fill(self, parts: Sequence[Weights], arrived: Arrived | None = None, after: torch.cuda.Event | None = None) -> None:
        """Copy the rows of all ranks below one another; returns when they are here.

        `arrived(rank, beyond)` waits until more than `beyond` parameters of a rank are there, and says how many; without it all are.
        On a GPU nothing is overwritten before `after`.
        """
        rows = [row for part in parts for row in part.values()]
        if len(rows) != len(self._rows) or any(new is not old for new, old in zip(rows, self._rows, strict=True)):
            self._prepare(parts, rows)
        if after is not None:
            for stream in self._streams:
                stream.wait_event(after)
        there = [0] * len(parts)
        while waiting := [rank for rank, part in enumerate(parts) if there[rank] < len(part)]:
            for rank in waiting:
                first = there[rank]
                there[rank] = len(parts[rank]) if arrived is None else arrived(rank, first)
                with torch.cuda.stream(self._streams[rank] if self._streams else None):
                    self._copy(rank, first, there[rank], parts[rank])
        for stream in self._streams:
            stream.synchronize()

    def _copy(self, rank: int, first: int, end: int, part: Weights) -> None:
        """Copy the rank's parameters from number `first` up to `end`."""
        if self._whole is not None and self._flat is not None:
            source, starts = self._whole
            piece = slice(starts[first], starts[end])
            self._flat[piece].copy_(source[piece], non_blocking=True)
            return
        rows = [(to, part[name]) for name, to in islice(self.parts[rank].items(), first, end) if to.numel()]
        if rows:
            torch._foreach_copy_([to for to, _ in rows], [of for _, of in rows], non_blocking=True)

    def _prepare(self, parts: Sequence[Weights], rows: list[torch.Tensor]) -> None:
        """Find out what to copy where; parameters that changed their shape or dtype get new memory."""
        source = _whole_memory(parts[0]) if len(parts) == 1 else None
        shapes = {name: (sum(len(part[name]) for part in parts), *tuple(first.shape)[1:]) for name, first in parts[0].items()}
        kinds = {name: (shapes[name], first.dtype) for name, first in parts[0].items()}
        if {name: (tuple(weight.shape), weight.dtype) for name, weight in self.weights.items()} != kinds:
            self._allocate(parts[0], shapes, source)
        pieces = {name: torch.split(weight, [len(part[name]) for part in parts]) for name, weight in self.weights.items()}
        self.parts = [{name: pieces[name][rank] for name in part} for rank, part in enumerate(parts)]
        self._rows, self._whole = rows, None
        if rows[0].is_cuda and len(self._streams) != len(parts):
            self._streams = [torch.cuda.Stream() for _ in parts]
        starts = list(_offsets(parts[0]).values())
        alike = source is not None and self._flat is not None and len(source) == len(self._flat) and starts == sorted(starts)
        if source is not None and alike and _offsets(parts[0]) == _offsets(self.weights):
            self._whole = source, [*starts, len(source)]

    def _allocate(self, first: Weights, shapes: Mapping[str, tuple[int, ...]], source: torch.Tensor | None) -> None:
        if source is None:
            kinds = {name: (torch.Size(shapes[name]), weight.dtype) for name, weight in first.items()}
            self._flat, self.weights = None, in_one_memory(kinds, next(iter(first.values())).device)
            return
        self._flat, self.weights = torch.empty_like(source), {}
        for name, start in _offsets(first).items():
            self.weights[name] = device_view(self._flat, first[name].dtype, first[name].shape, start)


def in_one_memory(kinds: Mapping[str, tuple[torch.Size, torch.dtype]], device: torch.device) -> dict[str, torch.Tensor]:
    """Return new tensors of these shapes and dtypes that lie together in one memory, which other processes map at once."""
    places, end = {}, 0
    for name, (shape, dtype) in kinds.items():
        places[name] = end
        end += -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    return {name: device_view(memory, dtype, shape, places[name]) for name, (shape, dtype) in kinds.items()}


def lie_together(weights: Weights) -> bool:
    """Return whether all weights are contiguous in one memory."""
    tensors = list(weights.values())
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1 and all(tensor.is_contiguous() for tensor in tensors)


def _offsets(weights: Weights) -> dict[str, int]:
    return {name: int(weight.storage_offset()) * weight.itemsize for name, weight in weights.items()}


def _whole_memory(weights: Weights) -> torch.Tensor | None:
    """Return the one memory on a GPU that all the weights lie in, as bytes; None where there is no such."""
    first = next(iter(weights.values()))
    if not first.is_cuda or not lie_together(weights):
        return None
    return torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
