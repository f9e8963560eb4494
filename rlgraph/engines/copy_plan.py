"""The copies that load new weights into a model, recorded once from the model's own loader and replayed in one call.

A loader fuses, splits and slices: it knows that `q_proj` is a part of `qkv_proj`. What it does in the end is copy, so the list of
its copies is all that a later version needs. This holds for dense, unquantised models, whose parameters stay where they are.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Copy:
    """One copy: into `to`, from the part of weight `name` that starts `offset` elements in, with this shape and these strides."""

    to: torch.Tensor
    name: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def source(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        weight = weights[self.name]
        return weight.as_strided(self.shape, self.strides, weight.storage_offset() + self.offset)


class CopyPlan:
    """The recorded copies of one model. `replay` leaves the model as its loader would, bit for bit."""

    def __init__(self, copies: list[Copy]) -> None:
        self.copies = copies
        self._to = [copy.to for copy in copies]
        self._sources: list[torch.Tensor] = []
        self._seen: dict[str, torch.Tensor] = {}

    def replay(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load new weights of the same names, shapes and strides; the views are kept while the tensors are the same."""
        if not same_tensors(weights, self._seen):
            self._sources, self._seen = [copy.source(weights) for copy in self.copies], dict(weights)
        with torch.no_grad():
            torch._foreach_copy_(self._to, self._sources)


def same_tensors(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Return whether these are the very same tensors, in the same order: a buffer that was only filled again."""
    return len(some) == len(others) and all(a is b for a, b in zip(some.values(), others.values(), strict=True)) and [*some] == [*others]


def record(load: Callable[[Weights], Any], weights: Mapping[str, torch.Tensor]) -> CopyPlan | None:
    """Load the weights with the model's own loader and return its copies, or None where it does more than copy.

    It does more if a copy comes from elsewhere than the weight that is being loaded, or if a weight is not copied whole.
    """
    recorder = _Recorder()

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            recorder.loading = (name, tensor)
            yield name, tensor

    with recorder:
        load(one_by_one())
    copied: dict[str, int] = {}
    for copy in recorder.copies:
        copied[copy.name] = copied.get(copy.name, 0) + copy.to.numel()
    whole = all(copied.get(name, 0) >= tensor.numel() for name, tensor in weights.items())
    return CopyPlan(recorder.copies) if whole and not recorder.foreign else None


class _Recorder(TorchDispatchMode):
    """Notes every copy while the loader runs."""

    def __init__(self) -> None:
        super().__init__()
        self.loading: tuple[str, torch.Tensor] | None = None
        self.copies: list[Copy] = []
        self.foreign = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and self.loading is not None:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.loading is not None
        name, weight = self.loading
        offset = int(source.storage_offset() - weight.storage_offset())
        inside = source.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() and 0 <= offset < max(weight.numel(), 1)
        if not inside or source.shape != to.shape:
            self.foreign = True
            return
        self.copies.append(Copy(to.detach(), name, offset, tuple(source.shape), source.stride()))
