"""Proximal policies: a clipped ratio against a policy that is interpolated between the engine's and the current one, without a pass."""

from dataclasses import dataclass
from typing import Literal

import torch

from rlgraph.algorithms.aggregation import Totals
from rlgraph.algorithms.inputs import check_choice, masked, tensor, tokenwise
from rlgraph.algorithms.losses import ClippedLoss
from rlgraph.algorithms.masks import keep
from rlgraph.algorithms.rollout_correction import TruncatedIS
from rlgraph.columns import Columns
from rlgraph.errors import DataError
from rlgraph.settings import Positive, refuse_unknown


@torch.no_grad()
def proximal_log_probs(
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    weight_version: torch.Tensor,
    current_version: torch.Tensor | int,
    method: Literal["loglinear", "linear"] = "loglinear",
) -> torch.Tensor:
    """Interpolate log-probs `[B, T]` between the policy that sampled each token and the current one, to one version behind the latter.

        >>> new, rollout = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-3.0, -3.0]])
        >>> proximal_log_probs(new, rollout, weight_version=torch.tensor([[6, 8]]), current_version=8)
        tensor([[-2., -3.]])

    With v_b the version that sampled a token and v the current one, alpha = clamp((v - 1 - v_b) / (v - v_b), 0, 1), and 0 for tokens
    of version v or without one (below 0). "loglinear" mixes log-probs, "linear" probabilities. There is no gradient.
    Source: AReaL, `prox_logp_method`; Fu et al., 2025, 2505.24298.

    Raises GraphError for an unknown method, DataError for tensors of different shapes.
    """
    check_choice("proximal_log_probs", "method", method, ("loglinear", "linear"))
    if not log_probs.shape == rollout_log_probs.shape == weight_version.shape:
        raise DataError(
            f"proximal_log_probs: log-probs have shape {list(log_probs.shape)}, those of the rollout {list(rollout_log_probs.shape)}, "
            f"'weight_version' {list(weight_version.shape)}; all three are [B, T]"
        )
    lag = current_version - weight_version
    alpha = torch.where((weight_version >= 0) & (lag > 0), (lag - 1) / lag.clamp(min=1), 0.0).to(log_probs.dtype)
    if method == "loglinear":
        return rollout_log_probs + alpha * (log_probs - rollout_log_probs)
    return torch.log((1 - alpha) * rollout_log_probs.exp() + alpha * log_probs.exp() + 1e-10)


@refuse_unknown
@dataclass(frozen=True)
class ProximalLoss(ClippedLoss):
    """Decoupled PPO without a pass for old log-probs: w ClippedLoss(r), with r against an interpolated proximal policy.

        >>> ProximalLoss(clip_high=0.28).reads
        ('rollout_log_probs', 'weight_version', 'current_version', 'advantages')

    r = p / p_prox is clipped, w = sg(p_prox / p_rollout) multiplies, and is truncated at `threshold`. `current_version` `[B]` is the
    version of the weights at the start of the update. Where every token is one version old, r is taken against the rollout
    and w is 1. With a pass, give ClippedLoss `old_log_probs` and the weights of a rollout correction instead.

    Source: Hilton et al., 2021, 2110.00641 (decoupled PPO); AReaL, 2505.24298 (interpolation).
    Raises DataError where a log-prob under the mask is not finite.
    """

    optional_reads = ()
    method: Literal["loglinear", "linear"] = "loglinear"
    threshold: Positive = 5.0

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the log-probs and the response mask."""
        others = tuple(column for column in super().reads if column != "old_log_probs")
        return ("rollout_log_probs", "weight_version", "current_version", *others)

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mask = masked("ProximalLoss", batch, log_probs.shape)
        rollout = keep(tokenwise("ProximalLoss", batch, "rollout_log_probs", mask), mask)
        versions = tensor("ProximalLoss", batch, "weight_version")
        current = tensor("ProximalLoss", batch, "current_version")
        if versions.shape != mask.shape or current.shape != mask.shape[:1]:
            raise DataError(
                f"ProximalLoss: 'weight_version' has shape {list(versions.shape)} and 'current_version' {list(current.shape)}; beside a "
                f"mask of shape {list(mask.shape)} they are [B, T] and [B]"
            )
        proximal = proximal_log_probs(keep(log_probs.detach(), mask), rollout, versions, current[:, None], self.method)
        if not bool(proximal.isfinite().all()):
            raise DataError("ProximalLoss: the proximal log-probs are not finite; a log-prob of the rollout or of the trainer is not")
        weights = TruncatedIS(threshold=self.threshold)(proximal, rollout, mask)
        return super().__call__(log_probs, {**batch, "old_log_probs": proximal, "rollout_is_weights": weights}, totals, entropy)
