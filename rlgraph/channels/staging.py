"""A second buffer for all weights, filled in one burst while the engine goes on with its own."""

from collections.abc import Mapping, Sequence

import torch

from rlgraph.channels.layout import device_view

Weights = Mapping[str, torch.Tensor]


class Staging:
    """Holds one version of the weights: every parameter whole, whatever rows the trainer's ranks sent.

    On a GPU it is one flat buffer, which a single trainer rank's memory is copied into as a whole: one burst on a stream of
    its own disturbs decoding for the shortest time. What is copied where is kept while the rows lie where they lay: to look at each
    parameter again takes longer than to copy it.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._rows: list[torch.Tensor] = []  # of the last version, parameter by parameter and rank by rank
        self._to: list[torch.Tensor] = []
        self._from: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def fill(self, parts: Sequence[Weights]) -> None:
        """Copy the rows of all ranks below one another; returns when they have arrived."""
        rows = [part[name] for name in parts[0] for part in parts]
        if len(rows) != len(self._rows) or any(new is not old for new, old in zip(rows, self._rows, strict=True)):
            self._prepare(parts, rows)
        if not self._to:
            return
        if self._stream is None:
            torch._foreach_copy_(self._to, self._from)
            return
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._to, self._from, non_blocking=True)
        self._stream.synchronize()

    def _prepare(self, parts: Sequence[Weights], rows: list[torch.Tensor]) -> None:
        """Find out what to copy where; parameters that changed their shape or dtype get new memory."""
        source = _whole_memory(parts[0]) if len(parts) == 1 else None
        shapes = {name: (sum(len(part[name]) for part in parts), *tuple(first.shape)[1:]) for name, first in parts[0].items()}
        kinds = {name: (shapes[name], first.dtype) for name, first in parts[0].items()}
        if {name: (tuple(weight.shape), weight.dtype) for name, weight in self.weights.items()} != kinds:
            self._allocate(parts[0], shapes, source)
        self._rows = rows
        flat = self._flat
        if source is not None and flat is not None and len(source) == len(flat) and _offsets(parts[0]) == _offsets(self.weights):
            self._to, self._from = [flat], [source]
            return
        targets: list[torch.Tensor] = []
        for name in parts[0]:
            targets += torch.split(self.weights[name], [len(part[name]) for part in parts])
        pairs = [(to, of) for to, of in zip(targets, rows, strict=True) if of.numel()]
        self._to, self._from = [to for to, _ in pairs], [of for _, of in pairs]

    def _allocate(self, first: Weights, shapes: Mapping[str, tuple[int, ...]], source: torch.Tensor | None) -> None:
        if next(iter(first.values())).is_cuda:
            self._stream = torch.cuda.Stream()
        if source is None:
            self._flat, self.weights = None, {name: weight.new_empty(shapes[name]) for name, weight in first.items()}
            return
        self._flat, self.weights = torch.empty_like(source), {}
        for name, start in _offsets(first).items():
            self.weights[name] = device_view(self._flat, first[name].dtype, first[name].shape, start)


def _offsets(weights: Weights) -> dict[str, int]:
    return {name: int(weight.storage_offset()) * weight.itemsize for name, weight in weights.items()}


def _whole_memory(weights: Weights) -> torch.Tensor | None:
    """Return the one memory on a GPU that all the weights lie in, as bytes; None where there is no such."""
    tensors = list(weights.values())
    storage = tensors[0].untyped_storage()
    if not tensors[0].is_cuda or any(t.untyped_storage().data_ptr() != storage.data_ptr() for t in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)
