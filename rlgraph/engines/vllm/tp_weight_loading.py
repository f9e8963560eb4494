"""New weights for an engine that spans GPUs: its ranks map the memory that they arrived in, and each copies its own part of them.

No tensor goes through a message. The engine's process describes once where the weights are, in memory of its first GPU or of the trainer's.
Every rank records the copies of its own loader once and replays them from then on, over NVLink from another GPU's memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from rlgraph.channels.host.slot_memory import DTYPES, Handle, MappedMemory, device_view, handle_of
from rlgraph.channels.weights.endpoints import are_contiguous, flat_buffer
from rlgraph.engines import copy_plan
from rlgraph.engines.copy_plan import same_tensors

Weights = Mapping[str, torch.Tensor]


class Weight(msgspec.Struct, array_like=True):
    """The place of a parameter: `offset` in bytes from the start of the memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Description(msgspec.Struct, array_like=True):
    """All parameters, contiguous in one memory."""

    memory: Handle
    weights: list[Weight]


def describe(weights: Weights, memory: Handle) -> bytes:
    """Encode, as msgpack, the places of weights in one memory."""
    entries = []
    for name, weight in weights.items():
        start = int(weight.storage_offset()) * weight.itemsize
        entries.append(Weight(name, str(weight.dtype).removeprefix("torch."), tuple(weight.shape), start))
    return msgspec.msgpack.encode(Description(memory, entries))


def view_weights(description: bytes, mapped: Callable[[Handle], torch.Tensor]) -> dict[str, torch.Tensor]:
    """View the weights in the described memory, which `mapped` gives as bytes."""
    found = msgspec.msgpack.decode(description, type=Description)
    memory = mapped(found.memory)
    return {w.name: device_view(memory, DTYPES[w.dtype], torch.Size(w.shape), w.offset) for w in found.weights}


class SharedWeights:
    """The end in the engine's own process; `call` calls a method of all ranks and returns when all have returned."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._own: dict[str, torch.Tensor] = {}
        self._known: dict[str, torch.Tensor] = {}  # what the ranks have mapped

    def load(self, weights: Weights) -> None:
        """Load the weights on every rank; the memory in which they arrived is free when this returns.

        Weights in one GPU memory are read from there; all others are first copied into one.
        """
        if not same_tensors(weights, self._known) and not (_first(weights).is_cuda and are_contiguous(weights)):
            weights = self._copy_weights(weights)
        torch.cuda.current_stream().synchronize()  # other processes are about to read
        if same_tensors(weights, self._known):
            self._call("take_weights")
            return
        self._call("take_weights", args=(describe(weights, handle_of(_first(weights))),))
        self._known = dict(weights)

    def give_back(self) -> None:
        """Free the memory that the weights were copied to; the ranks unmap it."""
        if self._own:
            self.let_go()
            torch.cuda.empty_cache()

    def let_go(self) -> None:
        """Hold no weights, and have the ranks unmap them: their memory is another's to free."""
        if self._known:
            self._call("forget_weights")
            self._known, self._own = {}, {}

    def _copy_weights(self, weights: Weights) -> dict[str, torch.Tensor]:
        kinds = {name: (w.shape, w.dtype) for name, w in weights.items()}
        if {name: (w.shape, w.dtype) for name, w in self._own.items()} != kinds:
            self._own = flat_buffer(kinds, torch.device("cuda"))
        with torch.no_grad():
            torch._foreach_copy_([self._own[name] for name in weights], list(weights.values()))
        return self._own


def _first(weights: Weights) -> torch.Tensor:
    return next(iter(weights.values()))


class RankWeights:
    """The end in the process of one rank, whose part of the model is `model`."""

    def __init__(self, model: copy_plan.Loadable) -> None:
        self.model = model
        self.weights: dict[str, torch.Tensor] = {}
        self.plan: copy_plan.CopyPlan | None = None

    def map(self, description: bytes, mapped: Callable[[Handle], torch.Tensor]) -> None:
        """Use the weights at the described places from now on."""
        self.weights = view_weights(description, mapped)

    def load(self) -> None:
        """Load by the recorded copies; by the model's loader the first time, or where it does more than copy."""
        if self.plan is None:
            self.plan = copy_plan.record(self.model, self.weights)
        else:
            self.plan.replay(self.weights)

    def forget(self) -> None:
        """Drop every view of the engine process's memory."""
        self.weights = {}
        if self.plan is not None:
            self.plan.let_go()


class Extension:
    """Methods added to vLLM's worker of each GPU."""

    get_model: Callable[[], Any]  # the worker's own
    rank_weights: RankWeights | None = None
    _mapped_weights: MappedMemory | None = None  # the few memories in which versions arrive

    def take_weights(self, description: bytes | None = None) -> None:
        """Load the weights at the described places (None: those of the last call); returns when they are loaded."""
        if self.rank_weights is None or self._mapped_weights is None:
            self.rank_weights, self._mapped_weights = RankWeights(self.get_model()), MappedMemory()
        if description is not None:
            self.rank_weights.map(description, self._mapped_weights.open)
        self.rank_weights.load()
        torch.cuda.current_stream().synchronize()

    def forget_weights(self) -> None:
        """Unmap all memory."""
        if self.rank_weights is not None:
            self.rank_weights.forget()
            self._mapped_weights = MappedMemory()
