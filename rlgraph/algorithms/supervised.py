"""The loss of supervised fine-tuning: imitate the tokens that are marked."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.aggregation import Aggregation, Totals, aggregate, check_aggregation
from rlgraph.algorithms.inputs import masked
from rlgraph.algorithms.masks import keep
from rlgraph.algorithms.policy_loss import to_floats
from rlgraph.columns import Columns
from rlgraph.settings import Count


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SFTLoss:
    """The negative log-likelihood of the tokens to learn, by default the mean over all of them, as TRL and most trainers take it.

        >>> columns = {"response_mask": torch.tensor([[True, True]])}
        >>> round(float(SFTLoss()(torch.tensor([[-1.0, -3.0]]), columns, Totals(tokens=2, rows=1))[0]), 3)
        2.0

    `dft=True` weights each token by its own probability, without gradient: dynamic fine-tuning (Wu et al., 2025, 2508.05629). The metric
    `actor/nll` is the negative log-likelihood of a token either way. Oracle: TRL's `SFTTrainer`.
    """

    dft: bool = False
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    reads: ClassVar[tuple[str, ...]] = ()
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        settings.check(self)
        check_aggregation("SFTLoss", self.aggregation, self.horizon)

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss and of the metrics from log-probs `[b, T]`.

        Raises DataError for a mask that is missing, or of another shape.
        """
        mask = masked("SFTLoss", batch, log_probs.shape)
        nll = -keep(log_probs, mask)
        weighted = nll * log_probs.detach().exp() if self.dft else nll
        loss = aggregate(weighted, mask, totals, self.aggregation, self.horizon)
        return loss, to_floats({"actor/sft_loss": loss, "actor/nll": nll.detach().sum() / max(totals.tokens, 1)})
