"""The weights that an engine loads of what a feedback edge carries: all of them, or those of its folder with an adapter merged in."""

from collections.abc import Mapping

import torch

from rlgraph.compiler.planned_adapter import PlannedAdapter
from rlgraph.engines.lora.merging import BaseWeights
from rlgraph.graph.nodes import Model


class Merging:
    """Merges each version of an adapter into the base of one model, which is kept."""

    def __init__(self, model: Model | None) -> None:
        self._model = model
        self._base: BaseWeights | None = None

    def weights(self, adapter: PlannedAdapter | None, received: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights of a version: as `received`, unless they are those of an adapter."""
        if adapter is None:
            return received
        assert self._model is not None
        self._base = self._base or BaseWeights(self._model.path)
        return self._base.with_adapter(received, adapter.scale, getattr(torch, self._model.traits.dtype or "float32"))
