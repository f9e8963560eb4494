"""Rollout correction: trainer and engine give different log-probs to the same tokens, so tokens are weighted or rejected."""

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import check_choice, check_mask
from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import keep, masked_mean
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.notices import accept_old_methods, old_attribute
from rlgraph.settings import OneOf, Positive

# Importance weights of the trainer's policy over the engine's, since the two give different log-probs to the same tokens.


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ImportanceWeights(ABC):
    """Base of the importance weights: the ratio of the trainer's to the engine's probability, of each token or each whole response.

    Log-ratios are clamped to [-20, 20].

    * `level`: "token" has little variance and a bias; "sequence" multiplies the ratios of a response, and only its bounds add a bias.
    * `normalize`: divides the weights by their mean over the batch.

    Custom weights derive from it:

        >>> class Unbounded(ImportanceWeights):
        ...     def bound(self, weights):
        ...         return weights
        ...     def bounds(self):
        ...         return 0.0, float("inf")
        >>> Unbounded()(torch.tensor([[-1.0]]), torch.tensor([[-3.0]]), torch.tensor([[True]]))
        tensor([[7.3891]])

    Source: "When Speed Kills Stability", richardli.xyz/rl-collapse; Yao et al., 2025, fengyao.notion.site/off-policy-rl.
    """

    HOW: ClassVar[str] = "give an object such as rg.estimators.TruncatedIS()"
    level: Literal["token", "sequence"] = "token"
    normalize: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_methods(cls, bounded="bound")

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute weights `[B, T]`, 0 outside of the mask, from the trainer's and the engine's log-probs `[B, T]`.

        Raises DataError for tensors of different shapes, or a mask that is not bool.
        """
        log_ratio = masked_log_ratio(type(self).__name__, old_log_probs, rollout_log_probs, response_mask)
        weights = self.bound(self.raw(log_ratio, response_mask))
        return weights / self.scale(weights, response_mask) if self.normalize else weights

    def raw(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the weights `[B, T]` before they are bounded, from log-ratios that are 0 outside of the mask."""
        if self.level == "sequence":
            return keep(log_ratio.sum(-1, keepdim=True).clamp(-CLAMP, CLAMP).exp(), mask)
        return keep(log_ratio.clamp(-CLAMP, CLAMP).exp(), mask)

    @abstractmethod
    def bound(self, weights: torch.Tensor) -> torch.Tensor:
        """Bound the weights."""

    bounded = old_attribute("bounded", "bound")

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

    * `level`: bounds the ratio of each "token", or of the "sequence", with one ratio for all of its tokens.
    * `normalize`: divides by the mean weight of the batch.
    """

    threshold: Positive = 2.0

    def bound(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.clamp(max=self.threshold)

    def bounds(self) -> tuple[float, float]:
        return 1 / self.threshold, self.threshold


@settings.refuse_unknown
@dataclass(frozen=True)
class IcePop(ImportanceWeights):
    """Importance weights that are 0 if they are out of bounds; such tokens still count in means.

        >>> IcePop(high=5.0)(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2).bool())
        tensor([[1.6487, 0.0000]])

    * `low`: the least weight.
    * `high`: the largest weight.

    Source: Ling team, 2025.
    """

    low: Positive = 0.5
    high: Positive = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise GraphError(
                f"IcePop(low={show_value(self.low)}, high={show_value(self.high)}): the lower bound is above the upper; swap them"
            )

    def bound(self, weights: torch.Tensor) -> torch.Tensor:
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
            f"{where}: log-probs have shape {list(log_probs.shape)}, the rollout's {list(rollout_log_probs.shape)}, the mask "
            f"{list(mask.shape)}; all three are [B, T]"
        )
    return keep(log_probs - rollout_log_probs, mask)


# Reject tokens or whole responses on which trainer and engine differ too much.

STATISTICS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)


@settings.refuse_unknown
@dataclass(frozen=True)
class Rejection:
    """Keep tokens, or whole responses, whose distance between trainer and engine is within bounds.

        >>> Rejection("token_k1", high=2.0)(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]]), torch.ones(1, 2).bool())
        tensor([[ True, False]])

    With l the log-ratio of trainer over engine, clamped to [-20, 20]: k2 = l^2 / 2 and k3 = exp(l) - 1 - l have an upper bound.
    k1 bounds ratios exp(l) on both sides: the ratios of tokens, their product ("seq_sum_k1") or their geometric mean ("seq_mean_k1")
    over the response.

    verl's documentation has the same bounds, but its code keeps ratios within [1 / high, 1 / low]: `Rejection.from_verl` converts
    its settings. Source: "When Speed Kills Stability", richardli.xyz/rl-collapse.

    * `statistic`: the bounded statistic, e.g. "token_k1" or "seq_mean_k3": of tokens, or the sum, mean or maximum over a response.
    * `high`: the upper bound.
    * `low`: the lower bound of k1; None: 1 / `high`.
    """

    statistic: Annotated[str, OneOf(STATISTICS)]
    high: Positive
    low: Positive | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.low is None:
            return
        if not self.statistic.endswith("k1"):
            raise GraphError(
                f"Rejection({show_value(self.statistic)}, low={show_value(self.low)}): only k1 has a lower bound; leave it out"
            )
        if self.low > self.high:
            raise GraphError(
                f"Rejection(low={show_value(self.low)}, high={show_value(self.high)}): the lower bound is above the upper; swap them"
            )

    @classmethod
    def from_verl(cls, option: str, threshold: str | float) -> "Rejection":
        """Convert verl 0.9's settings `rollout_rs=option` and its threshold to a rejection that does the same.

            >>> Rejection.from_verl("token_k1", "0.5_2.0")  # verl bounds the ratio of engine over trainer
            Rejection(statistic='token_k1', high=2.0, low=0.5)
            >>> Rejection.from_verl("seq_mean_k3", 0.01)
            Rejection(statistic='seq_mean_k3', high=0.01, low=None)

        Raises GraphError for an unknown option, and for a threshold that verl refuses, with its format.
        """
        check_choice("Rejection", "statistic", option, STATISTICS)
        two_sided = option.endswith("k1")
        numbers = _verl_numbers(threshold)
        if numbers is None or len(numbers) > 1 + two_sided:
            raise _not_verl(option, threshold)
        if not two_sided:
            return cls(option, numbers[0])
        low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
        if low > high:
            raise _not_verl(option, threshold)
        return cls(option, high=1 / low if len(numbers) == 2 else high, low=1 / high)

    @property
    def by_token(self) -> bool:
        """Whether it rejects single tokens, rather than whole responses."""
        return self.statistic.startswith("token")

    @torch.no_grad()
    def __call__(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute the mask `[B, T]` of the tokens that are kept, from the trainer's and the engine's log-probs `[B, T]`.

        Raises DataError for tensors of different shapes, or a mask that is not bool.
        """
        distance = self.distance(masked_log_ratio("Rejection", old_log_probs, rollout_log_probs, response_mask), response_mask)
        kept = self.accepts(distance)
        return response_mask & (kept if self.by_token else kept[:, None])

    def distance(self, log_ratio: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Compute the distance of each token `[B, T]` or response `[B]`, from log-ratios that are 0 outside of the mask."""
        safe = log_ratio.clamp(-CLAMP, CLAMP)
        level, _, kind = self.statistic.rpartition("_")
        tokens = {"k1": lambda: -safe, "k2": lambda: 0.5 * safe.square(), "k3": lambda: safe.exp() - 1 - safe}[kind]()
        if level == "token":
            return tokens
        if level == "seq_mean":
            return masked_mean(tokens, mask, -1)
        # k2 and k3 are at least 0, so the 0 outside of the mask changes no maximum.
        return keep(tokens, mask).sum(-1) if level == "seq_sum" else keep(tokens, mask).amax(-1)

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest distance that is kept. The distance of k1 is the log of engine over trainer."""
        if not self.statistic.endswith("k1"):
            return float("-inf"), self.high
        low = 1 / self.high if self.low is None else self.low
        return -math.log(self.high), -math.log(low)

    def accepts(self, distance: torch.Tensor) -> torch.Tensor:
        """Flag the distances that are kept."""
        low, high = self.bounds()
        return (distance >= low) & (distance <= high)


# float() takes underscores inside of a number: "2_5" would be 25.
_NUMBER = re.compile(r"\s*\+?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.IGNORECASE)


def _verl_numbers(threshold: object) -> list[float] | None:
    """Read the numbers of a threshold, which underscores separate; None unless all are finite and above 0."""
    if isinstance(threshold, bool) or not isinstance(threshold, str | int | float):
        return None
    found = [float(text) if _NUMBER.fullmatch(text) else 0.0 for text in str(threshold).split("_")]
    return found if all(0 < number < math.inf for number in found) else None


def _not_verl(option: str, threshold: object) -> GraphError:
    form = "'lower_upper' as '0.5_2.0', or the upper bound alone, at least 1" if option.endswith("k1") else "one number above 0, as 0.01"
    return GraphError(f"Rejection.from_verl({show_value(option)}, {show_value(threshold)}): the threshold of this option is {form}")


# Rollout correction: importance weights together with rejections, and verl's presets by name.


@settings.refuse_unknown
@dataclass(frozen=True)
class RolloutCorrection:
    """Correct for the difference between trainer and engine, by importance weights and rejections; a token is kept if all keep it.

        >>> correction = RolloutCorrection(TruncatedIS(threshold=2.0), (Rejection("token_k3", 0.5),))
        >>> correction(torch.tensor([[0.0, -1.0, -5.0]]), torch.tensor([[0.0, -1.5, -1.0]]), torch.ones(1, 3).bool())
        tensor([[1.0000, 1.6487, 0.0000]])

    A call returns weights that are 0 on rejected tokens. These still count in the loss's denominators, so that rejecting does not
    scale up the rest (as in AReaL). `acceptance_mask` returns a mask instead: used as the new `response_mask` it removes rejected
    tokens from the denominators too, and from advantages computed later (as in verl).

    * `weights`: the importance weights, e.g. `TruncatedIS()`; None: no weights.
    * `rejections`: `Rejection`s; a token is kept if all of them keep it.
    """

    weights: ImportanceWeights | None = None
    rejections: tuple[Rejection, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        if len(set(self.rejections)) < len(self.rejections):
            raise GraphError(f"RolloutCorrection(rejections={show_value(self.rejections)}): it contains a rejection twice; leave one out")

    @torch.no_grad()
    def __call__(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute weights `[B, T]`: 0 on rejected tokens and outside of the mask, and 1 on the others if there are no importance weights.

        Raises DataError for tensors of different shapes, or a mask that is not bool.
        """
        check_mask("RolloutCorrection", response_mask)
        kept = self.acceptance_mask(old_log_probs, rollout_log_probs, response_mask)
        if self.weights is None:
            return kept.to(old_log_probs.dtype)
        return torch.where(kept, self.weights(old_log_probs, rollout_log_probs, response_mask), 0.0)

    kept = old_attribute("kept", "acceptance_mask")

    def acceptance_mask(self, old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
        """Compute the mask `[B, T]` of the tokens that no rejection removes."""
        kept = response_mask
        for rejection in self.rejections:
            kept = kept & rejection(old_log_probs, rollout_log_probs, response_mask)
        return kept


_TOKEN, _SEQUENCE = TruncatedIS(level="token", threshold=2.0), TruncatedIS(level="sequence", threshold=2.0)
_ICEPOP = IcePop(level="token", low=0.5, high=5.0)
_PRODUCT = (Rejection.from_verl("seq_sum_k1", "0.5_2.0"),)
_GEOMETRIC = (Rejection.from_verl("seq_mean_k1", "0.999_1.001"),)
_K3 = (Rejection("seq_mean_k3", 0.01),)

# Decoupled presets have `old_log_probs` of the trainer. Bypass presets are part of a loss with ratios against the rollout: see `bypass`.
DECOUPLED: dict[str, RolloutCorrection] = {
    "decoupled_token_is": RolloutCorrection(_TOKEN),
    "decoupled_seq_is": RolloutCorrection(_SEQUENCE),
    "decoupled_token_icepop": RolloutCorrection(_ICEPOP),
    "decoupled_seq_is_rs": RolloutCorrection(_SEQUENCE, _PRODUCT),
    "decoupled_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "decoupled_geo_rs_seq_tis": RolloutCorrection(_SEQUENCE, _GEOMETRIC),
    "decoupled_geo_rs_token_tis": RolloutCorrection(_TOKEN, _GEOMETRIC),
    "decoupled_k3_rs": RolloutCorrection(None, _K3),
    "decoupled_k3_rs_seq_tis": RolloutCorrection(_SEQUENCE, _K3),
    "decoupled_k3_rs_token_tis": RolloutCorrection(_TOKEN, _K3),
    "disabled": RolloutCorrection(),
}
BYPASS: dict[str, RolloutCorrection] = {
    "bypass_ppo_clip": RolloutCorrection(),
    "bypass_ppo_clip_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "bypass_ppo_clip_k3_rs": RolloutCorrection(None, _K3),
    "bypass_pg_is": RolloutCorrection(_SEQUENCE),
    "bypass_pg_token_icepop": RolloutCorrection(_ICEPOP),
    "bypass_pg_geo_rs": RolloutCorrection(None, _GEOMETRIC),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrection(_SEQUENCE, _GEOMETRIC),
    "bypass_pg_geo_rs_token_tis": RolloutCorrection(_TOKEN, _GEOMETRIC),
}
