"""The projections of a model with adapters beside them, and how they begin."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear

from rlgraph.engines.lora.four_bits import FourBits
from rlgraph.engines.lora.merging import A, B
from rlgraph.engines.lora.settings import TENSORS, LoRA
from rlgraph.errors import DataError
from rlgraph.plan.model_shapes import ALL_LINEAR

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

    def settle(self) -> bool:
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


class Beginning:
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
