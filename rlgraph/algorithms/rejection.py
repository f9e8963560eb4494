"""Reject tokens or whole responses on which trainer and engine differ too much."""

import math
import re
from dataclasses import dataclass
from typing import Annotated

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import check_choice
from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import keep, masked_mean
from rlgraph.algorithms.rollout_correction import masked_log_ratio
from rlgraph.errors import GraphError, shown
from rlgraph.setting_types import OneOf
from rlgraph.settings import Positive

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

    With l the log-ratio of trainer over engine, clamped to [-20, 20]: k2 = l^2 / 2 and k3 = exp(l) - 1 - l are kept up to `high`.
    k1 keeps ratios exp(l) within [`low`, `high`], where `low` is 1 / `high` unless given: those of tokens, their product
    (`seq_sum_k1`) or their geometric mean (`seq_mean_k1`) over the response.

    verl's documentation gives the same bounds, but its code keeps ratios within [1 / high, 1 / low]: `Rejection.from_verl` converts
    its settings. Source: "When Speed Kills Stability", richardli.xyz/rl-collapse.
    """

    statistic: Annotated[str, OneOf(STATISTICS)]
    high: Positive
    low: Positive | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        if self.low is None:
            return
        if not self.statistic.endswith("k1"):
            raise GraphError(f"Rejection({shown(self.statistic)}, low={shown(self.low)}): only k1 has a lower bound; leave it out")
        if self.low > self.high:
            raise GraphError(f"Rejection(low={shown(self.low)}, high={shown(self.high)}): the lower bound is above the upper; swap them")

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
        kept = self.within(distance)
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

    def within(self, distance: torch.Tensor) -> torch.Tensor:
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
    return GraphError(f"Rejection.from_verl({shown(option)}, {shown(threshold)}): the threshold of this option is {form}")
