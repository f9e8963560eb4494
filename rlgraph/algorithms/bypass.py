"""Losses that take the engine's policy as the old one: no pass for old log-probs, and the correction inside of the loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.aggregation import Totals
from rlgraph.algorithms.diagnostics import partial_diagnostics
from rlgraph.algorithms.inputs import masked, tokenwise
from rlgraph.algorithms.losses import ClippedLoss
from rlgraph.algorithms.policy_loss import PolicyLoss
from rlgraph.algorithms.presets import RolloutCorrection
from rlgraph.columns import Columns
from rlgraph.errors import GraphError


@settings.refuse_unknown
@dataclass(frozen=True)
class Bypass:
    """Wrap a policy loss: its old policy is the engine's, and `correction` weighs or rejects tokens inside of the loss.

        >>> Bypass(ClippedLoss(clip_high=0.28)).reads
        ('rollout_log_probs', 'advantages')

    Weights and rejections come from the log-probs being trained, without gradient, at every micro-batch. Rejected tokens still
    count in the mini-batch's totals, so the loss shrinks as more are rejected. The entropy and KL terms leave them out too.
    A loss with a ratio corrects for the engine by that ratio: giving it importance weights as well is an error.

    Its metrics include those `rollout_corr/...` diagnostics that add up over micro-batches: KL, k3, chi-squared, perplexities, the mean
    weight, fractions beyond bounds and rejected.

    Source: Li et al., "When Speed Kills Stability", richardli.xyz/rl-collapse; verl's bypass mode.
    """

    optional_reads: ClassVar[tuple[str, ...]] = ()
    loss: PolicyLoss = field(default_factory=ClippedLoss)
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)

    def __post_init__(self) -> None:
        settings.check(self)
        if self.loss.ratio and self.correction.weights is not None:
            raise GraphError(
                f"Bypass: {type(self.loss).__name__} takes ratios against the rollout already, so importance weights would correct twice; "
                "leave the weights out, or use Reinforce()"
            )
        if self.correction.weights is not None and self.correction.weights.normalize:
            raise GraphError(
                "Bypass: weights are computed in each micro-batch, so normalize=True would depend on how the batch is split; "
                "leave normalize out, or correct in a node with old log-probs"
            )

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the log-probs and the response mask."""
        return ("rollout_log_probs", *(column for column in self.loss.reads if column != "old_log_probs"))

    @property
    def needs_entropy(self) -> bool:
        """Whether the caller has to give the entropy of each token's distribution."""
        return self.loss.needs_entropy

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss and of the metrics. Raises the errors of the inner loss."""
        mask = masked("Bypass", batch, log_probs.shape)
        rollout = tokenwise("Bypass", batch, "rollout_log_probs", mask)
        kept = self.correction.kept(log_probs.detach(), rollout, mask)
        columns: Mapping[str, torch.Tensor | list[str]] = {
            **{name: column for name, column in batch.items() if name != "rollout_is_weights"},
            "old_log_probs": rollout,
            "response_mask": kept,
        }
        if self.correction.weights is not None:
            columns = {**columns, "rollout_is_weights": self.correction.weights(log_probs.detach(), rollout, mask)}
        loss, metrics = self.loss(log_probs, columns, totals, entropy)
        return loss, metrics | partial_diagnostics(log_probs.detach(), rollout, mask, totals, self.correction, kept)
