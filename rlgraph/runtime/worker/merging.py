"""The weights that an engine loads of what a feedback edge carries: all of them, or those of its folder with an adapter merged in."""

from collections.abc import Mapping
from pathlib import Path

import torch

from rlgraph.engines.lora.modules import A, B, BaseWeights
from rlgraph.engines.lora.peft_folder import read_adapter
from rlgraph.graph.nodes import Model
from rlgraph.plan.model_shapes import ALL_LINEAR, PROJECTIONS
from rlgraph.plan.plan import PlannedAdapter


class Merging:
    """Merges each version of an adapter into the base of one model, which is kept."""

    def __init__(self, model: Model | None) -> None:
        self._model = model
        self._base: BaseWeights | None = None

    def weights(self, adapter: PlannedAdapter | None, received: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights of a version: as `received`, unless they are those of an adapter."""
        if adapter is None:
            return received
        return self._merged(adapter, received)

    def beginning(self, adapter: PlannedAdapter, device: torch.device) -> Mapping[str, torch.Tensor] | None:
        """The weights with what an adapter begins with, merged on `device`; None if those of the folder are the same."""
        if adapter.folder is not None:
            return self._merged(adapter, {name: tensor.to(device) for name, tensor in read_adapter(Path(adapter.folder)).items()})
        if adapter.base is None:
            return None
        targets = PROJECTIONS if adapter.targets == ALL_LINEAR else adapter.targets
        base = self._kept(adapter)
        changed = [name.removesuffix(".weight") for name in base if name.endswith(tuple(f".{target}.weight" for target in targets))]
        nothing = {name + A: torch.zeros(1, base[name + ".weight"].shape[1], device=device) for name in changed}
        return self._merged(adapter, nothing | {name + B: torch.zeros(len(base[name + ".weight"]), 1, device=device) for name in changed})

    def _merged(self, adapter: PlannedAdapter, matrices: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        assert self._model is not None
        return self._kept(adapter).with_adapter(matrices, adapter.scale, getattr(torch, self._model.traits.dtype or "float32"))

    def _kept(self, adapter: PlannedAdapter) -> BaseWeights:
        assert self._model is not None
        self._base = self._base or BaseWeights(self._model.path, adapter.base)
        return self._base
