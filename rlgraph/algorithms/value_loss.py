"""The critic's loss."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.aggregation import Aggregation, Totals, aggregate, check_aggregation, row_weights
from rlgraph.algorithms.inputs import masked, tokenwise
from rlgraph.algorithms.masks import count, keep
from rlgraph.algorithms.policy_loss import to_floats, with_gradient
from rlgraph.columns import Columns
from rlgraph.settings import Count, Positive


@settings.refuse_unknown
@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss: half the squared error of the values, or that of values clipped to `clip` around the old, if that is larger.

        >>> columns = {"returns": torch.tensor([[1.0]]), "values": torch.tensor([[0.0]]), "response_mask": torch.tensor([[True]])}
        >>> float(ValueLoss(clip=0.5)(torch.tensor([[1.0]]), columns, Totals(tokens=1, rows=1))[0])  # clipped to 0.5, so half of 0.5^2
        0.125

    1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2); `clip=None` leaves the second out.

    Source: Schulman et al., 2017, 1707.06347, as implemented for language models by TRL.
    """

    clip: Positive | None = 0.5
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    needs_entropy: ClassVar[bool] = False
    optional_reads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        check_aggregation("ValueLoss", self.aggregation, self.horizon)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the new values and the response mask."""
        return ("returns",) if self.clip is None else ("values", "returns")

    def __call__(self, values: torch.Tensor, batch: Columns, totals: Totals) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss (a scalar with gradient) and of the metrics, from new `values` `[b, T]`.

        Raises DataError for a column that is missing or of another shape or dtype.
        """
        mask = masked("ValueLoss", batch, values.shape)
        tokens = max(totals.tokens, 1)
        with torch.no_grad():
            new, returns = keep(values, mask), keep(tokenwise("ValueLoss", batch, "returns", mask), mask)
            slopes = new - returns
            losses = slopes.square()
            metrics = {"critic/vpred_mean": new.sum() / tokens}
            if self.clip is not None:
                old = keep(tokenwise("ValueLoss", batch, "values", mask), mask)
                clipped = (torch.minimum(torch.maximum(new, old - self.clip), old + self.clip) - returns).square()
                larger = clipped > losses
                metrics["critic/vf_clipfrac"] = count(larger & mask) / tokens
                # Where the clipped error is larger, the value is at its bound and has no slope.
                losses, slopes = torch.maximum(losses, clipped), keep(slopes, ~larger)
            loss = 0.5 * aggregate(losses, mask, totals, self.aggregation, self.horizon)
            gradient = slopes.mul_(row_weights(losses, mask, totals, self.aggregation, self.horizon)[:, None])
        return with_gradient(values, loss, gradient), to_floats({"critic/vf_loss": loss, **metrics})
