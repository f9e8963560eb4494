"""Reduce the losses of tokens to one number, the same however the batch is split over micro-batches and ranks.

Each micro-batch divides its own sum by totals of the whole mini-batch, so that the losses of all micro-batches add up to that of the
mini-batch. Where gradients are averaged over D ranks instead of summed, the trainer multiplies by D.
"""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch

from rlgraph.algorithms.inputs import check_choice, check_mask, check_tokens, check_whole
from rlgraph.algorithms.masks import count, lengths, masked_sum
from rlgraph.errors import GraphError, show_value
from rlgraph.settings import OneOf

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
Aggregation: TypeAlias = Annotated[str, OneOf(AGGREGATIONS)]


@dataclass(frozen=True)
class Totals:
    """The size of a whole mini-batch over all ranks: the trained tokens, and the rows with at least one. Micro-batches divide by it.

        >>> Totals.of(torch.tensor([[True, True], [True, False], [False, False]]))
        Totals(tokens=3, rows=2)

    A row that a filter or a rejection masks out counts in no mean over rows: 4 of 8 rows masked give the loss of the other 4.
    """

    tokens: int
    rows: int

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Totals":
        """Count the trained tokens and rows of a mini-batch that is whole on this rank, by its mask `[B, T]`.

        Raises DataError for a mask that is not bool and [B, T].
        """
        check_mask("Totals.of", mask)
        return cls(int(count(mask)), int(count(mask.any(-1))))


def check_aggregation(where: str, mode: str, horizon: int | None) -> None:
    """Raise GraphError for an unknown mode, a missing horizon, or a horizon that the mode does not use."""
    check_choice(where, "aggregation", mode, AGGREGATIONS)
    if mode == "seq-mean-token-sum-norm":
        check_whole(where, "horizon", horizon, 1)
    elif horizon is not None:
        raise GraphError(
            f"{where}(horizon={show_value(horizon)}): only 'seq-mean-token-sum-norm' divides by a horizon, not '{mode}'; leave it out"
        )


def aggregate(
    losses: torch.Tensor, mask: torch.Tensor, totals: Totals, mode: str = "token-mean", horizon: int | None = None
) -> torch.Tensor:
    """Reduce the losses of a micro-batch, `[b, T]` under a bool `mask` `[b, T]`, to its share of the loss of the mini-batch.

        >>> losses, mask = torch.tensor([[1.0, 3.0], [4.0, 9.0]]), torch.tensor([[True, True], [True, False]])
        >>> [float(aggregate(losses, mask, Totals.of(mask), mode)) for mode in ("token-sum", "seq-mean-token-mean")]
        [8.0, 3.0]

    The modes, where means over rows are over the rows that have tokens:

    * `token-mean`: the mean over all tokens.
    * `token-sum`: the sum over all tokens.
    * `seq-mean-token-sum`: the sum of each response, then the mean over rows.
    * `seq-mean-token-sum-norm`: the same divided by `horizon`, a fixed number of tokens such as the longest response allowed
      (Liu et al., 2025, 2503.20783).
    * `seq-mean-token-mean`: the mean of each response, then the mean over rows.

    Losses outside of the mask do not count, and an empty mask gives 0.

    Raises GraphError for an unknown mode, or a horizon that the mode does not use;
    DataError for losses or a mask of another shape or dtype.
    """
    check_aggregation("aggregate", mode, horizon)
    check_tokens("aggregate", mask, losses=losses)
    return (masked_sum(losses, mask, -1) * row_weights(losses, mask, totals, mode, horizon)).sum()


def row_weights(losses: torch.Tensor, mask: torch.Tensor, totals: Totals, mode: str, horizon: int | None) -> torch.Tensor:
    """Compute the factor `[b]` of each row's sum, by which the rows of all micro-batches add up to the loss."""
    if mode == "seq-mean-token-mean":
        return 1 / lengths(mask, losses.dtype) / max(totals.rows, 1)
    scale = {"token-mean": totals.tokens, "token-sum": 1}.get(mode, totals.rows)
    return losses.new_full((len(losses),), 1 / max(scale, 1) / (horizon or 1))
