"""Merge an adapter into its base: the one definition of the arithmetic, and a model's weights with an adapter merged in.

A merged matrix is always made of the base that is kept, never of an earlier merge: the thousandth version has no more error than the first.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from rlgraph.engines.hf_models.pretrained import check_model, parameter_shapes
from rlgraph.engines.lora.four_bits import rounded
from rlgraph.errors import DataError

A, B = ".lora_A.weight", ".lora_B.weight"  # end the names of an adapter's matrices, behind the name of their projection


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Compute `base + scale · b a` in float32 and round it once, to `dtype`. `a` is [rank, in], `b` is [out, rank], both float32.

    >>> merged(torch.ones(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [0.0]]), 0.5, torch.float32)
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
            self._on_device[name] = rounded(tensor, dtype) if self._rounds else tensor
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
        return merged(self.base.on(a.device, name, self._dtype), a, self._adapter[module + B], self._scale, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)


def as_described(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Tensors with the names and shapes of the weights, without merging any."""
    return weights.base if isinstance(weights, MergedWeights) else weights
