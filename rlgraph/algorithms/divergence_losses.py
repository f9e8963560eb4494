"""DPPO: the policy gradient on tokens whose divergence from the old policy is within bounds, and none on the others."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens
from rlgraph.setting_types import Range
from rlgraph.settings import AtLeastZero, refuse_unknown


@refuse_unknown
@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-A sg(min(r, clip_c)) log p, without the tokens that have moved too far in the direction in which A pushes them.

        >>> DPPO("kl", high=0.05).reads
        ('old_log_probs', 'advantages')

    The distance of a token is the total variation ("tv") or the KL ("kl") between the two-valued distributions "this token or
    not"; `high` bounds it where A > 0, `low` otherwise. Source: 2602.04879.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: AtLeastZero = 0.2
    high: AtLeastZero = 0.2
    clip_c: Annotated[float, Range(above=1)] = 20.0

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        within = self.within(tokens)
        metrics = {
            "actor/pg_clipfrac": tokens.fraction(~within),
            "actor/pg_clipfrac_lower": tokens.fraction(within & (tokens.ratio > self.clip_c)),
            "actor/ppo_kl": tokens.approximate_kl,
        }
        weights = torch.where(within, tokens.ratio.clamp(max=self.clip_c), 0.0).mul_(tokens.advantages)
        return weights * tokens.given, weights, metrics

    def within(self, tokens: Tokens) -> torch.Tensor:
        """Flag the tokens `[b, T]` that are within bounds, or that move back towards the old policy."""
        assert tokens.old is not None
        new, old = tokens.given.exp(), tokens.old.exp()
        if self.divergence == "tv":
            return torch.where(tokens.advantages > 0, new - old <= self.high, new - old >= -self.low)
        kl = old * (tokens.old - tokens.given) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        return torch.where(tokens.advantages > 0, (kl <= self.high) | (new <= old), (kl <= self.low) | (new >= old))
