"""A second buffer for all weights, filled in one burst while the engine goes on with its own."""

from collections.abc import Mapping, Sequence

import torch

Weights = Mapping[str, torch.Tensor]


class Staging:
    """Holds one version of the weights: every parameter whole, whatever rows the trainer's ranks sent.

    On a GPU it is one flat buffer, which a single trainer rank's memory is copied into as a whole: one burst on a stream of
    its own disturbs decoding for the shortest time.
    """

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self._flat: torch.Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    def fill(self, parts: Sequence[Weights]) -> None:
        """Copy the rows of all ranks below one another; returns when they have arrived."""
        source = _whole_memory(parts[0]) if len(parts) == 1 else None
        if not self.weights:
            self._allocate(parts, source)
        if self._stream is None:
            self._copy(parts, source)
            return
        with torch.cuda.stream(self._stream):
            self._copy(parts, source)
        self._stream.synchronize()

    def _allocate(self, parts: Sequence[Weights], source: torch.Tensor | None) -> None:
        first = parts[0]
        if next(iter(first.values())).is_cuda:
            self._stream = torch.cuda.Stream()
        if source is not None:
            self._flat = torch.empty_like(source)
            for name, weight in first.items():
                start = weight.storage_offset() * weight.itemsize
                self.weights[name] = self._flat[start : start + weight.nbytes].view(weight.dtype).view(weight.shape)
            return
        for name, weight in first.items():
            rows = sum(len(part[name]) for part in parts)
            self.weights[name] = weight.new_empty((rows, *weight.shape[1:]))

    def _copy(self, parts: Sequence[Weights], source: torch.Tensor | None) -> None:
        if source is not None and self._flat is not None:
            self._flat.copy_(source, non_blocking=True)
            return
        for name, weight in self.weights.items():
            start = 0
            for part in parts:
                rows = part[name]
                weight[start : start + len(rows)].copy_(rows, non_blocking=True)
                start += len(rows)


def _whole_memory(weights: Weights) -> torch.Tensor | None:
    """Return the one memory on a GPU that all the weights lie in, as bytes; None where there is no such."""
    tensors = list(weights.values())
    storage = tensors[0].untyped_storage()
    if not tensors[0].is_cuda or any(t.untyped_storage().data_ptr() != storage.data_ptr() for t in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)
