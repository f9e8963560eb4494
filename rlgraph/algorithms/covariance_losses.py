"""Losses that keep the entropy up: they restrain the few tokens whose log-prob and advantage have the largest covariance.

They choose these tokens within each micro-batch, so these two losses, and no others, depend on how a batch is split.
"""

from dataclasses import dataclass

import torch

from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import count, keep, masked_mean
from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens
from rlgraph.errors import GraphError, shown
from rlgraph.settings import AtLeastZero, Finite, Fraction, Natural, Positive, PositiveFraction, refuse_unknown


def covariances(tokens: Tokens) -> torch.Tensor:
    """Compute (A - mean A)(log p - mean log p) of each token `[b, T]`; -inf outside of the mask."""
    log_probs, advantages = tokens.given, tokens.advantages
    products = (advantages - masked_mean(advantages, tokens.mask)) * (log_probs - masked_mean(log_probs, tokens.mask))
    return torch.where(tokens.mask, products, float("-inf"))


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Find the indices of the `count` largest values of a vector."""
    if not count:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    # The `count` largest block maxima bound the result from below, which leaves few candidates: an eighth of topk's time.
    block = max(len(values) // (4 * count), 1)
    maxima = values[: len(values) // block * block].view(-1, block).amax(-1)
    candidates = (values >= maxima.topk(count).values[-1]).nonzero().flatten()
    return candidates[values[candidates].topk(count).indices]


@refuse_unknown
@dataclass(frozen=True)
class ClipCov(PolicyLoss):
    """PPO's clipped loss, without a few random tokens whose covariance is between `low` and `high`.

        >>> ClipCov(fraction=1e-3, seed=1).reads
        ('old_log_probs', 'advantages')

    It drops at most `fraction` of the micro-batch's tokens, and at least one, drawn by a generator seeded with `seed`: the same
    micro-batch always drops the same tokens. There is no dual clip. Source: Cui et al., 2025, 2505.22617.
    """

    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2
    fraction: PositiveFraction = 2e-4
    low: Finite = 1.0
    high: Finite = 5.0
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise GraphError(f"ClipCov(low={shown(self.low)}, high={shown(self.high)}): no covariance is between them; swap them")

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        plain = tokens.advantages * tokens.ratio
        lesser = torch.minimum(plain, tokens.advantages * tokens.ratio.clamp(1 - self.clip_low, 1 + self.clip_high))
        clipped = lesser < plain
        dropped = self.dropped(tokens, clipped)
        metrics = {"actor/pg_clipfrac": tokens.fraction(dropped), "actor/ppo_kl": tokens.approximate_kl}
        return keep(lesser, ~dropped), keep(plain, tokens.safe & ~(dropped | clipped)), metrics

    def dropped(self, tokens: Tokens, clipped: torch.Tensor) -> torch.Tensor:
        """Choose the tokens `[b, T]` to drop, as flags."""
        covariance = covariances(tokens)
        candidates = ((covariance > self.low) & (covariance < self.high) & ~clipped).flatten().nonzero().flatten()
        most = max(int(self.fraction * int(count(tokens.mask))), 1)
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(self.seed))[:most]
        dropped = torch.zeros_like(tokens.mask).flatten()
        dropped[candidates[order.to(candidates.device)]] = True
        return dropped.view_as(tokens.mask)


@refuse_unknown
@dataclass(frozen=True)
class KlCov(PolicyLoss):
    """The unclipped policy gradient -A r, plus `coef` |log r| on the tokens of largest covariance.

        >>> KlCov(coef=0.2).reads
        ('old_log_probs', 'advantages')

    The penalty applies to `fraction` of the micro-batch's tokens, and to at least one. Source: Cui et al., 2025, 2505.22617.
    """

    fraction: PositiveFraction = 2e-4
    coef: Positive = 0.1

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        distance = tokens.log_ratio.clamp(-CLAMP, CLAMP)
        covariance = covariances(tokens).flatten()
        most = min(max(int(self.fraction * int(count(tokens.mask))), 1), len(covariance))
        chosen = largest(covariance, most)
        gains = tokens.advantages * tokens.ratio
        slopes = keep(gains, tokens.safe)
        gains.view(-1)[chosen] -= self.coef * distance.view(-1)[chosen].abs()
        slopes.view(-1)[chosen] -= self.coef * distance.view(-1)[chosen].sign() * tokens.safe.view(-1)[chosen]
        return gains, slopes, {"actor/ppo_kl": tokens.approximate_kl, "actor/ppo_kl_abs": tokens.mean(distance.abs())}
