"""The projections of a model with adapters beside them, frozen matrices of 4 bits, and adapters merged into their base."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear

from rlgraph.engines.hf_models.pretrained import check_model, parameter_shapes
from rlgraph.engines.precision import bitsandbytes
from rlgraph.errors import DataError
from rlgraph.values.lora import ALL_LINEAR, TENSORS, LoRA

# Frozen matrices in NF4, 4 bits a number with a float32 scale for each block of 64, by bitsandbytes.

BLOCK = 64


class FourBits:
    """A matrix `[out, in]` in NF4: it multiplies as a matrix of `dtype` that is made for each product, and again for its gradient.

    The numbers are made of float32, so that any copy of the same matrix gives the same.
    """

    def __init__(self, matrix: torch.Tensor, dtype: torch.dtype) -> None:
        self._library = bitsandbytes()
        self.codes, self.state = _quantise_matrix(self._library, matrix)
        self.state.dtype = dtype

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `states Wᵀ + bias`, with a gradient of `states`."""
        found: torch.Tensor = self._library.matmul_4bit(states, self.codes, quant_state=self.state, bias=bias)
        return found


def round_matrix(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that `FourBits` multiplies with in `dtype`."""
    library = bitsandbytes()
    codes, state = _quantise_matrix(library, matrix)
    found: torch.Tensor = library.functional.dequantize_4bit(codes, state)
    return found.to(dtype)


def _quantise_matrix(library: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, Any]:
    codes, state = library.functional.quantize_4bit(matrix.detach().float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    return codes, state


# Merge an adapter into its base: the one definition of the arithmetic, and a model's weights with an adapter merged in.
#
# A merged matrix is always made of the base that is kept, never of an earlier merge: the thousandth version has no more error than the
# first.

A, B = ".lora_A.weight", ".lora_B.weight"  # end the names of an adapter's matrices, behind the name of their projection


def merge_adapter(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Compute `base + scale · b a` in float32 and round it once, to `dtype`. `a` is [rank, in], `b` is [out, rank], both float32.

    >>> merge_adapter(torch.ones(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]]), 0.5, torch.float32)
    tensor([[1.5000, 2.0000],
            [1.0000, 1.0000]])
    """
    # Into a copy of the base: torch.addmm would copy it once more, with the same bits (0.20 s instead of 0.30 for 8B's widest on a core).
    return base.to(torch.float32, copy=True).addmm_(b, a, alpha=scale).to(dtype)


class BaseWeights(Mapping[str, torch.Tensor]):
    """The tensors of a model's folder, mapped from their files: the base that is kept. Those that merge lie on the adapter's device.

    Those that merge are rounded as `base`, "nf4", says. Raises DataError for a folder without a model.
    """

    def __init__(self, folder: str | Path, base: str | None = None) -> None:
        shapes = parameter_shapes(folder)
        self._folder, self._rounds = folder, base is not None
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(check_model(folder).path.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                self._tensors |= {name: tensors.get_tensor(name) for name in tensors.keys() if name in shapes}  # noqa: SIM118
        self._on_device: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def on(self, device: torch.device, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that merges, on a device, where it is kept from now on: as it is in the folder, or rounded, in `dtype`."""
        if name not in self._on_device or self._on_device[name].device != device:
            tensor = self._tensors[name].to(device)
            self._on_device[name] = round_matrix(tensor, dtype) if self._rounds else tensor
        return self._on_device[name]

    def with_adapter(self, adapter: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> "MergedWeights":
        """The weights with an adapter merged in, `adapter` by the names `….lora_A.weight` and `….lora_B.weight` of its matrices.

        Raises DataError for an adapter of another model.
        """
        changed = tuple(name.removesuffix(A) + ".weight" for name in adapter if name.endswith(A))
        for name in changed:
            module = name.removesuffix(".weight")
            there = tuple(self._tensors[name].shape) if name in self._tensors else None
            b = adapter.get(module + B)
            if b is None or there != (b.shape[0], adapter[module + A].shape[1]):
                given = "no lora_B" if b is None else f"an adapter for {[b.shape[0], adapter[module + A].shape[1]]}"
                has = f"is {list(there)}" if there is not None else "has no such tensor"
                raise DataError(f"adapter: '{module}' has {given}, and the model '{self._folder}' {has}: they are of two models")
        return MergedWeights(self, adapter, changed, scale, dtype)


class MergedWeights(Mapping[str, torch.Tensor]):
    """A model's weights by their Hugging Face names, in `dtype`. A merged matrix is made when it is asked for, and not kept.

    `changed` names the matrices with an adapter; the others are those of the `base`.
    """

    def __init__(
        self, base: BaseWeights, adapter: Mapping[str, torch.Tensor], changed: tuple[str, ...], scale: float, dtype: torch.dtype
    ) -> None:
        self.base, self.changed = base, changed
        self._adapter, self._scale, self._dtype = adapter, scale, dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        a = self._adapter.get(module + A)
        if a is None:
            return self.base[name].to(self._dtype)
        return merge_adapter(self.base.on(a.device, name, self._dtype), a, self._adapter[module + B], self._scale, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def describe_weights(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors with the names and shapes of the weights, without merging any."""
    return weights.base if isinstance(weights, MergedWeights) else weights


# The projections of a model with adapters beside them, and how they begin.

PEFT = "base_model.model."  # begins the names in PEFT's folders


class LoraLinear(torch.nn.Linear):
    """A projection of a model, frozen, with an adapter beside it under PEFT's names; `on` says whether the adapter takes part."""

    def __init__(self, base: torch.nn.Linear, lora: LoRA) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        kind: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": torch.float32}
        self.lora_A = torch.nn.Linear(base.in_features, lora.rank, **kind)
        self.lora_B = torch.nn.Linear(lora.rank, base.out_features, **kind)
        self.scale, self.on = lora.scale, True
        self._in_four_bits = lora.base is not None
        self._four_bits: FourBits | None = None

    def finish_loading(self) -> bool:
        """Keep the matrix, which is in memory now, in 4 bits if the settings say so; return whether this call did it."""
        if not self._in_four_bits or self._four_bits is not None:
            return False
        self._four_bits = FourBits(self.weight, self.weight.dtype)
        del self.weight
        return True

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = super().forward(states) if self._four_bits is None else self._four_bits.linear(states, self.bias)
        return found + linear(linear(states, self.lora_A.weight), self.lora_B.weight) * self.scale if self.on else found


def attach(
    model: torch.nn.Module, layers: torch.nn.Module, lora: LoRA, dtype: torch.dtype, trained_whole: Sequence[torch.nn.Module] = ()
) -> list[LoraLinear]:
    """Freeze a model in `dtype`, on the meta device or in memory, and put adapters beside the targets among its layers; return these.

    Modules that are `trained_whole` are left as they are. Raises DataError for targets that no projection of the layers has.
    """
    kept: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied parameters stay one
    for module in (module for module in model.modules() if module not in trained_whole):
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in kept:
                kept[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            module.register_parameter(name, kept[parameter])
    made = []
    for name, projection in [(name, module) for name, module in layers.named_modules() if type(module) is torch.nn.Linear]:
        if is_target(name, lora):
            parent, _, own = name.rpartition(".")
            made.append(LoraLinear(projection, lora))
            setattr(layers.get_submodule(parent), own, made[-1])
    lacking = (
        [] if lora.targets == ALL_LINEAR else [t for t in lora.targets if not any(n.rpartition(".")[2] == t for n, _ in _linear(layers))]
    )
    if lacking or not made:
        there = sorted({name.rpartition(".")[2] for name, _ in _linear(layers)})
        raise DataError(f"LoRA(targets={list(lora.targets)}): the layers have no projection {lacking[:3]}; they have {there}")
    return made


def is_target(name: str, lora: LoRA) -> bool:
    """Whether the projection of this name gets an adapter."""
    return lora.targets == ALL_LINEAR or name.rpartition(".")[2] in lora.targets


def _linear(layers: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    return ((name, module) for name, module in layers.named_modules() if isinstance(module, torch.nn.Linear) and ".lora_" not in name)


class InitialWeights:
    """The matrices that an adapter begins with, by name, for a model of the folder `model`.

    Each is drawn by a generator of its own, so any number of ranks begin with the same bits. Raises DataError for a folder's adapter
    whose targets are others.
    """

    def __init__(self, lora: LoRA) -> None:
        self._lora = lora
        self._file = None if lora.folder is None else Path(lora.folder) / TENSORS

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Give the whole matrix of this name, float32."""
        if self._file is not None:
            return self._read(name, shape)
        if name.endswith(B):
            return torch.zeros(shape)
        draw = torch.Generator().manual_seed(_seed(self._lora.seed, name))
        bound = 1 / math.sqrt(shape[1])  # kaiming_uniform with a = √5, as PEFT and torch's linear layers begin
        return torch.empty(shape).uniform_(-bound, bound, generator=draw)

    def _read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        assert self._file is not None
        with safe_open(self._file, "pt") as tensors:
            there = tensors.keys()
            own = next((known for known in (PEFT + name, f"{PEFT}model.{name}") if known in there), None)  # the second of a critic
            if own is None:
                raise DataError(f"'{self._file}' has no '{PEFT + name}'; it is an adapter of another model, or of other targets")
            found: torch.Tensor = tensors.get_tensor(own).float()
        if tuple(found.shape) != shape:
            raise DataError(f"'{self._file}': '{own}' has the shape {list(found.shape)}, the model's is {list(shape)}")
        return found


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is a matrix of an adapter."""
    return name.endswith((A, B))


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") % (1 << 63)
