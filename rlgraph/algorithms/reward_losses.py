"""Losses of reward models, which learn from pairs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from rlgraph.algorithms.inputs import masked, rowwise
from rlgraph.algorithms.policy_loss import to_floats
from rlgraph.algorithms.preferences import Pairs
from rlgraph.algorithms.whole_loss import WholeLoss
from rlgraph.columns import Columns
from rlgraph.settings import AtLeastZero, refuse_unknown


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class BradleyTerry(WholeLoss):
    """The loss of a reward model on pairs: -log sigmoid(reward of the chosen - reward of the rejected - margin).

        >>> rows = {"response_mask": torch.ones(2, 1).bool(), "preferences": torch.tensor([1.0, -1.0])}
        >>> round(float(BradleyTerry()(torch.zeros(2, 1), rows)[0]), 4)
        0.6931

    The margin is the pair's `margins`, where `rg.pairs(margin=…)` gives them, else 0. `center` times (sum of both rewards)^2 keeps the
    rewards around 0. Metrics: `reward/accuracy` and `reward/margin`. Source: Ouyang et al., 2022, 2203.02155; margin: Touvron et al.,
    2023, 2307.09288. Oracle: TRL's `RewardTrainer`.
    """

    center: AtLeastZero = 0.0
    optional_reads: ClassVar[tuple[str, ...]] = ("margins",)
    scores: ClassVar[Literal["log_probs", "values"] | None] = "values"
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = "pairs"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences",)

    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the mean loss of the pairs from the score of each response: the sum of `[B, T]`, which has one token under the mask."""
        pairs = Pairs("BradleyTerry", scores, batch, reference=False)
        chosen, rejected = pairs.chosen(pairs.log_probs), pairs.rejected(pairs.log_probs)
        mask = masked("BradleyTerry", batch, scores.shape)
        margins = pairs.chosen(rowwise("BradleyTerry", batch, "margins", mask)) if "margins" in batch else 0.0
        losses = -logsigmoid(chosen - rejected - margins) + self.center * (chosen + rejected).square()
        metrics = {
            "reward/accuracy": pairs.mean((chosen > rejected).to(scores.dtype)),
            "reward/margin": pairs.mean(chosen - rejected),
            "preference/pairs": torch.tensor(float(pairs.count)),
        }
        return pairs.mean(losses), to_floats(metrics)
