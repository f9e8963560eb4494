"""The copies that load new weights into a model, recorded once from the model's own loader and replayed in one call.

A loader fuses, splits and slices: it knows that `q_proj` is a part of `qkv_proj`. In the end it only copies, so the list of its copies is
enough for every later version. This holds for dense, unquantised models, whose parameters stay in place.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlgraph import notices

Weights: TypeAlias = Iterable[tuple[str, torch.Tensor]]
COPIED, CONSTANT = 1, 2  # what an element of a parameter was last given


class Loadable(Protocol):
    """A model that loads weights: a model of vLLM, or one rank's shard of it."""

    def load_weights(self, weights: Weights) -> Any:
        """Load full tensors under their Hugging Face names."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The tensors that the model computes with."""


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
        self._by_name: dict[str, list[Copy]] = {}
        for copy in copies:
            self._by_name.setdefault(copy.name, []).append(copy)

    def replay(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load new weights of the same names, shapes and strides; the views are kept while the tensors are the same."""
        if not same_tensors(weights, self._seen):
            self._sources, self._seen = [copy.source(weights) for copy in self.copies], dict(weights)
        with torch.no_grad():
            torch._foreach_copy_(self._to, self._sources)

    def let_go(self) -> None:
        """Let go of the weights; their owner frees the memory."""
        self._sources, self._seen = [], {}

    def replay_one(self, name: str, weight: torch.Tensor) -> None:
        """Load a new weight of this name, and leave the others as they are."""
        own = self._by_name.get(name, [])
        with torch.no_grad():
            torch._foreach_copy_([copy.to for copy in own], [copy.source({name: weight}) for copy in own])


def same_tensors(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are the same tensor objects in the same order: a buffer that was only refilled."""
    return len(some) == len(others) and all(a is b for a, b in zip(some.values(), others.values(), strict=True)) and [*some] == [*others]


def record(model: Loadable, weights: Mapping[str, torch.Tensor]) -> CopyPlan | None:
    """Load the weights with the model's own loader and record its copies; None if it does more than copy.

    It does more if a copy comes from elsewhere than the weight that is being loaded, if a parameter is written in another way, or if
    a part of one is left as it was. Constants, like the zeros of a padded vocabulary, stay and need no copy. A rank of a
    tensor-parallel model copies only its own part of each weight, but all of its parameters.
    """
    recorder = _Recorder({_place(parameter) for parameter in model.parameters()})

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            recorder.loading = (name, tensor)
            yield name, tensor

    with recorder:
        model.load_weights(one_by_one())
    if recorder.foreign or not all(_covers_exactly(parameter, recorder.written) for parameter in model.parameters()):
        notices.here.say(
            f"{type(model).__name__} loads weights with more than copies, so every new version goes through its own loader instead of "
            "recorded copies: swaps take longer"
        )
        return None
    return CopyPlan(recorder.copies)


def _place(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _covers_exactly(parameter: torch.Tensor, written: Mapping[int, list[tuple[int, torch.Tensor]]]) -> bool:
    """Whether every element was copied or is a constant, and none is both: a replay would lose a constant set after a copy."""
    last = torch.zeros(parameter.untyped_storage().nbytes() // parameter.itemsize, dtype=torch.uint8, device=parameter.device)
    for kind, part in written.get(_place(parameter), []):
        if part.dtype != parameter.dtype:
            return False
        elements = last.as_strided(part.shape, part.stride(), part.storage_offset())
        if kind == CONSTANT and bool((elements == COPIED).any()):
            return False
        elements.fill_(kind)
    return bool(last.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset()).all())


class _Recorder(TorchDispatchMode):
    """Notes every copy, and every other write to the memories of parameters, while the loader runs."""

    def __init__(self, parameters: set[int]) -> None:
        super().__init__()
        self.parameters = parameters
        self.loading: tuple[str, torch.Tensor] | None = None
        self.copies: list[Copy] = []
        self.written: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by memory, in order: what kind, and where
        self.foreign = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.loading is not None:
            if func is torch.ops.aten.copy_.default:
                self._note(args[0], args[1])
            elif func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
                self._write(CONSTANT, args[0])
            elif func is torch.ops.aten._local_scalar_dense.default or func._schema.is_mutable:
                # A number that was read off a weight may come back as a constant.
                self.foreign |= any(_place(tensor) in self.parameters | {_place(self.loading[1])} for tensor in _tensors(args, kwargs))
        return func(*args, **(kwargs or {}))

    def _note(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self.loading is not None
        name, weight = self.loading
        offset = int(source.storage_offset() - weight.storage_offset())
        inside = _place(source) == _place(weight) and 0 <= offset < max(weight.numel(), 1)
        if not inside or source.shape != to.shape:
            self.foreign = True
            return
        self._write(COPIED, to)
        self.copies.append(Copy(to.detach(), name, offset, tuple(source.shape), source.stride()))

    def _write(self, kind: int, to: torch.Tensor) -> None:
        self.written.setdefault(_place(to), []).append((kind, to.detach()))


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for value in [*args, *(kwargs or {}).values()]:
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor
