"""Importance weights of the trainer's policy over the engine's, since the two give different log-probs to the same tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import check_mask
from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import keep, masked_mean
from rlgraph.errors import DataError, GraphError, shown
from rlgraph.settings import Positive


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ImportanceWeights(ABC):
    """Base of the importance weights: the ratio of the trainer's to the engine's probability, of each token or each whole response.

    `level="token"` has little variance and a bias; `"sequence"` multiplies the ratios of a response, and only its bounds add a bias.
    `normalize` divides by the mean over the batch. Log-ratios are clamped to [-20, 20]. Weights of your own derive from it:

        >>> class Unbounded(ImportanceWeights):
        ...     def bounded(self, weights):
        ...         return weights
        ...     def bounds(self):
        ...         return 0.0, float("inf")
        >>> Unbounded()(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]]))
        tensor([[7.3891]])

    Source: "When Speed Kills Stability", richardli.xyz/rl-collapse; Yao et al., 2025, fengyao.notion.site/off-policy-rl.
    """

    HOW: ClassVar[str] = "give an object such as rg.TruncatedIS()"
    level: Literal["token", "sequence"] = "token"
    normalize: bool = False

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute weights `[B, T]`, 0 outside of the mask, from the trainer's and the engine's log-probs `[B, T]`.

        Raises DataError for tensors of different shapes, or a mask that is not bool.
        """
        log_ratio = masked_log_ratio(type(self).__name__, old_log_probs, rollout_log_probs, response_mask)
        weights = self.bounded(self.raw(log_ratio, response_mask))
        return weights / self.scale(weights, response_mask) if self.normalize else weights

    def raw(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the weights `[B, T]` before they are bounded, from log-ratios that are 0 outside of the mask."""
        if self.level == "sequence":
            return keep(log_ratio.sum(-1, keepdim=True).clamp(-CLAMP, CLAMP).exp(), mask)
        return keep(log_ratio.clamp(-CLAMP, CLAMP).exp(), mask)

    @abstractmethod
    def bounded(self, weights: torch.Tensor) -> torch.Tensor:
        """Bound the weights."""

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Return the ratios below and above which the diagnostics count a weight as extreme."""

    def scale(self, weights: torch.Tensor, mask: torch.Tensor) -> float:
        """Compute the divisor of `normalize`: the mean weight over tokens, or over the rows that have tokens; 1 where that is 0."""
        if self.level == "token":
            mean = masked_mean(weights, mask)
        else:
            rows = mask.any(-1)
            mean = (masked_mean(weights, mask, -1) * rows).sum() / rows.sum().clamp(min=1)
        return float(mean) if mean > 1e-8 else 1.0


@settings.refuse_unknown
@dataclass(frozen=True)
class TruncatedIS(ImportanceWeights):
    """Importance weights of at most `threshold`: min(w, threshold).

        >>> TruncatedIS(threshold=2.0)(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2).bool())
        tensor([[1.6487, 2.0000]])

    Source: Ionides, 2008; Yao et al., 2025.
    """

    threshold: Positive = 2.0

    def bounded(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.clamp(max=self.threshold)

    def bounds(self) -> tuple[float, float]:
        return 1 / self.threshold, self.threshold


@settings.refuse_unknown
@dataclass(frozen=True)
class IcePop(ImportanceWeights):
    """Importance weights within [`low`, `high`], and 0 for those outside; such tokens still count in means.

        >>> IcePop(high=5.0)(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2).bool())
        tensor([[1.6487, 0.0000]])

    Source: Ling team, 2025.
    """

    low: Positive = 0.5
    high: Positive = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise GraphError(f"IcePop(low={shown(self.low)}, high={shown(self.high)}): the lower bound is above the upper; swap them")

    def bounded(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.where((weights >= self.low) & (weights <= self.high), weights, 0.0)

    def bounds(self) -> tuple[float, float]:
        return self.low, self.high


def masked_log_ratio(where: str, log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the log-ratio `[B, T]` of the trainer's to the engine's probability, 0 outside of the mask.

    Raises DataError for tensors of different shapes, or a mask that is not bool.
    """
    check_mask(where, mask)
    if not log_probs.shape == rollout_log_probs.shape == mask.shape:
        raise DataError(
            f"{where}: log-probs have shape {list(log_probs.shape)}, those of the rollout {list(rollout_log_probs.shape)}, the mask "
            f"{list(mask.shape)}; all three are [B, T]"
        )
    return keep(log_probs - rollout_log_probs, mask)
