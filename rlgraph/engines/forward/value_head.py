"""The head of a critic: one number for each token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rlgraph.algorithms.aggregation import Totals
from rlgraph.batching.packing import MicroBatch
from rlgraph.columns import Columns
from rlgraph.engines.api import ValueLossFn
from rlgraph.engines.forward.head import ChosenTokens, Head
from rlgraph.engines.hf_models.backbone import load_headless, predicting_states
from rlgraph.engines.hf_models.folder_weights import FolderWeights
from rlgraph.engines.hf_models.pretrained import value_head
from rlgraph.errors import DataError


class ValueHead(Head):
    """A model whose head is one linear map to a number: the return that is expected before a token is written, `[N]` float32.

    The map begins as what the folder holds as `score.weight` (a reward model's), else as 0: values begin at 0, whatever the seed.
    """

    prefix, loss_name = "critic", "critic/vf_loss"

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.model = load_headless(path)
        self.folder = FolderWeights(path, self.model)
        weight = value_head(path)
        size = self.model.config.hidden_size
        if weight is None:
            weight = torch.zeros(1, size)
        if tuple(weight.shape) != (1, size):
            raise DataError(f"model '{path}': score.weight has shape {tuple(weight.shape)}; a critic's head is one number over {size}")
        self.score = torch.nn.Linear(size, 1, bias=False, device="meta")
        self._begins = weight

    @property
    def backbone(self) -> Any:
        return self.model

    @property
    def unadapted_modules(self) -> tuple[torch.nn.Module, ...]:
        return (self.score,)

    def fill(self, name: str, offsets: Sequence[int], out: torch.Tensor) -> bool:
        if name != "score.weight":
            return super().fill(name, offsets, out)
        out.copy_(self._begins[tuple(slice(at, at + size) for at, size in zip(offsets, out.shape, strict=True))])
        return True

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        squares: bool = False,
        tokens: ChosenTokens | None = None,
    ) -> tuple[torch.Tensor, ...]:
        # In float32: a sum over hidden units that is rounded to bfloat16 is a return to two digits.
        return (torch.mv(predicting_states(self.model, micro_batch).float(), self.score.weight.float()[0]),)

    def loss(
        self, loss: ValueLossFn, scores: tuple[torch.Tensor, ...], rows: Columns, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return loss(scores[0], rows, totals)
