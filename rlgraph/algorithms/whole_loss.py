"""Losses of a whole mini-batch: a row's share depends on other rows, which may be in other passes and on other ranks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.aggregation import Totals
from rlgraph.algorithms.inputs import tensor, tokenwise
from rlgraph.algorithms.policy_loss import with_gradient
from rlgraph.columns import Columns

GRADIENTS = "loss_gradients"  # the column with the slope of a whole loss in the score of each token


@dataclass(frozen=True, kw_only=True)
class WholeLoss(ABC):
    """Base of the losses that compare rows, as pairs: called once with the scores of a whole mini-batch, whatever its passes and ranks.

    The update computes the scores of the mini-batch without gradients, takes the loss's slope in each of them, and sends these slopes
    through the model in passes. The gradient is exact for any number of passes and ranks; it costs one more forward pass.

        >>> class Spread(WholeLoss):
        ...     reads = ()
        ...     def __call__(self, scores, batch):
        ...         return scores.var(), {"actor/spread": float(scores.detach().var())}
        >>> float(Spread()(torch.tensor([[1.0, 3.0]]), {})[0])
        2.0
    """

    HOW: ClassVar[str] = "give a loss object such as rg.DPO()"
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False
    scores: ClassVar[Literal["log_probs", "values"] | None] = None  # what it takes; None: either
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = None  # what the preferences of its rows are; None: anything

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the scores and the response mask."""

    @abstractmethod
    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss of the mini-batch from its scores `[B, T]`, with a gradient by torch's autograd, and its metrics."""


@dataclass(frozen=True, kw_only=True)
class SlopedLoss:
    """A loss whose value, metrics and slopes are known: each pass adds its rows' share."""

    value: float
    metrics: dict[str, float]
    needs_entropy: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = (GRADIENTS,)

    def __call__(
        self, scores: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Give this pass's share of the loss, by its rows, with the slopes in the column `loss_gradients` as the gradient."""
        mask = tensor("SlopedLoss", batch, "response_mask")
        share = int(mask.any(-1).sum()) / max(totals.rows, 1)
        slopes = tokenwise("SlopedLoss", batch, GRADIENTS, mask)
        loss = with_gradient(scores, scores.new_tensor(self.value * share), slopes.to(scores))
        return loss, {name: value * share for name, value in self.metrics.items()}
