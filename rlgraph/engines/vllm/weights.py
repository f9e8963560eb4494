"""New weights for an engine that spans GPUs, and for an engine in fp8.

If an engine spans GPUs, its ranks map the memory that the weights arrived in, and each copies its own part of them. No tensor goes through
a message. The engine's process describes once where the weights are, in memory of its first GPU or of the trainer's. Every rank records the
copies of its own loader once and replays them from then on, over NVLink from another GPU's memory.

For an engine in fp8 each new version is quantised on its way in, a matrix at a time, into the engine's own tensors. Of the projections of
the layers vLLM has a matrix of float8_e4m3fn and a float32 scale for each of its rows, one for each number that the projection gives, as it
made them at its start (`quantization="fp8_per_channel"`). A row is divided by its scale, its largest magnitude over 448. Embeddings, head,
norms and biases stay as they are. Activations are quantised by vLLM, with one scale for each token.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from rlgraph.channels.host.slot_memory import DTYPES, Handle, MappedMemory, device_view, handle_of
from rlgraph.channels.weights.endpoints import are_contiguous, flat_buffer
from rlgraph.engines import copy_plan
from rlgraph.engines.copy_plan import Copy, CopyPlan, same_tensors
from rlgraph.engines.lora import MergedWeights

# New weights for an engine that spans GPUs: its ranks map the memory that they arrived in, and each copies its own part of them.

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
        """Let go of the weights, and have the ranks unmap them; their owner frees the memory."""
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


# Weights of an engine in fp8: each new version is quantised on its way in, a matrix at a time, into the engine's own tensors.

LARGEST = 448.0  # the largest number of float8_e4m3fn
LEAST = 1 / (LARGEST * 512)  # of a scale, as vLLM's kernel has it: a row of zeros has one too
ARGUMENTS = {"quantization": "fp8_per_channel"}  # of vLLM


def quantise(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of a matrix `[out, in]`: float8_e4m3fn of the same shape, and the scales `[out, 1]`, float32.

    >>> numbers, scales = quantise(torch.tensor([[448.0, -1.0], [0.0, 224.0]]))
    >>> numbers.float().tolist(), scales.tolist()
    ([[448.0, -1.0], [0.0, 448.0]], [[1.0], [0.5]])
    """
    numbers = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn, device=matrix.device)
    scales = torch.empty(len(matrix), 1, device=matrix.device)
    quantise_into(numbers, scales, matrix)
    return numbers, scales


def quantise_into(numbers: torch.Tensor, scales: torch.Tensor, matrix: torch.Tensor) -> None:
    """Quantise the rows of a matrix into tensors of `quantise`'s shapes: on a GPU by vLLM's kernel, which needs no memory beside them."""
    if matrix.is_cuda:
        torch.ops._C.dynamic_per_token_scaled_fp8_quant(numbers, matrix.contiguous(), scales, None)
        return
    found = (matrix.float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=LEAST)
    scales.copy_(found)
    numbers.copy_((matrix.float() / found).clamp(-LARGEST, LARGEST).to(numbers.dtype))


def quantised_bytes(shapes: Mapping[str, tuple[int, ...]], itemsize: int) -> int:
    """Count the bytes of a model whose layers' matrices are in fp8, by the shapes of its weights; others have `itemsize` bytes a number."""
    return sum(torch.Size(shape).numel() * (1 if len(shape) == 2 and ".layers." in name else itemsize) for name, shape in shapes.items())


@dataclass(frozen=True)
class Target:
    """A matrix of a layer: where its fp8 numbers `[out, in]` and the scales of its rows `[out, 1]` are."""

    numbers: torch.Tensor
    scales: torch.Tensor

    def fill(self, matrix: torch.Tensor) -> None:
        """Quantise new weights into it."""
        quantise_into(self.numbers, self.scales, matrix.to(self.numbers.device))


class QuantisedWeights:
    """Loads versions into a model of vLLM whose layers are in fp8. Addresses stay, so recorded decode steps see each version.

    Raises ValueError for a model whose quantised layers it does not know.
    """

    def __init__(self, model: Any) -> None:
        fused = _fused_parts(model)
        self._model, self._targets = model, dict[str, Target]()
        for name, module in model.named_modules():
            if hasattr(module, "weight_scale"):
                self._targets |= dict(_targets(name, module, fused))
        self._rest: CopyPlan | None = None

    @property
    def names(self) -> frozenset[str]:
        """The names of the weights that are quantised."""
        return frozenset(self._targets)

    def let_go(self) -> None:
        """Let go of the weights; their owner frees the memory."""
        if self._rest is not None:
            self._rest.let_go()

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load a version by its Hugging Face names: of a merged adapter only the matrices that it changes, from the second on."""
        again = isinstance(weights, MergedWeights) and self._rest is not None
        with torch.no_grad():
            for name in weights.changed if again and isinstance(weights, MergedWeights) else self._targets:
                self._targets[name].fill(weights[name])
            if not again:
                rest = {name: weights[name] for name in weights if name not in self._targets}
                self._rest = self._rest or CopyPlan(_copies(self._model, rest))
                self._rest.replay(rest)


def _targets(name: str, module: Any, fused: Mapping[str, list[str]]) -> Iterator[tuple[str, Target]]:
    """Name the matrices that a layer's one is made of, each with its rows of it. vLLM keeps it transposed, in the memory of `[out, in]`."""
    parent, _, own = name.rpartition(".")
    names, widths = fused.get(own, [own]), list(module.logical_widths)
    widths = [sum(widths)] if len(names) == 1 else widths  # fused in the folder too
    numbers, scales = module.weight.data.t(), module.weight_scale.data
    whole = (sum(widths), module.input_size_per_partition)
    if tuple(numbers.shape) != whole or tuple(scales.shape) != (whole[0], 1) or len(names) != len(widths) or not numbers.is_contiguous():
        raise ValueError(
            f"fp8: layer '{name}' holds {tuple(numbers.shape)} numbers and {tuple(scales.shape)} scales for {names} of {widths} rows; "
            'new versions cannot be written into it: leave out weights_dtype="fp8"'
        )
    for part, rows, its in zip(names, numbers.split(widths), scales.split(widths), strict=True):
        yield f"{parent}.{part}.weight", Target(rows, its)


def _fused_parts(model: Any) -> Mapping[str, list[str]]:
    """Map each fused layer of a model of vLLM to its parts."""
    found: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})  # models without fused layers have none
    return found


def _copies(model: Any, weights: Mapping[str, torch.Tensor]) -> list[Copy]:
    """Find where each of the other weights is: parameters have the weights' own names where nothing is fused, and biases are fused."""
    parameters = dict(model.named_parameters())
    fused = {part: (whole, parts) for whole, parts in _fused_parts(model).items() for part in parts}
    found = []
    for name, weight in weights.items():
        to = parameters[name].data if name in parameters else _fused_bias_rows(name, weight, weights, parameters, fused)
        if to is not None:
            found.append(Copy(to[: len(weight)], name, 0, tuple(weight.shape), weight.stride()))
    return found


def _fused_bias_rows(
    name: str,
    weight: torch.Tensor,
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    fused: Mapping[str, tuple[str, list[str]]],
) -> torch.Tensor | None:
    """The rows of a fused bias that are this weight's; None for a tied head, which is the embeddings."""
    module, _, kind = name.rpartition(".")
    parent, _, own = module.rpartition(".")
    if own not in fused:
        if own == "lm_head":
            return None
        raise ValueError(f"fp8: the engine has no parameter for '{name}'; leave out weights_dtype=\"fp8\"")
    whole, parts = fused[own]
    before = sum(len(weights[f"{parent}.{part}.{kind}"]) for part in parts[: parts.index(own)])
    return parameters[f"{parent}.{whole}.{kind}"].data[before : before + len(weight)]
