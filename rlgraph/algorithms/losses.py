"""Policy losses that treat each token by itself: clipped ratios, and plain policy gradients. Trainers minimise them."""

from dataclasses import dataclass
from typing import Annotated

import torch

from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens
from rlgraph.setting_types import Range
from rlgraph.settings import AtLeastZero, Fraction, Positive, refuse_unknown


@refuse_unknown
@dataclass(frozen=True)
class ClippedLoss(PolicyLoss):
    """PPO's clipped loss: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)), and at most -A clip_c where A < 0.

    r is the ratio of new to old probability. `clip_high` above `clip_low` is DAPO's clip-higher; `clip_c` bounds the loss of
    tokens with a negative advantage and a large ratio (dual clip), and None leaves that out.

        >>> from rlgraph.algorithms import Totals
        >>> columns = {"old_log_probs": torch.zeros(1, 2), "advantages": torch.ones(1, 2), "response_mask": torch.ones(1, 2).bool()}
        >>> loss, metrics = ClippedLoss()(torch.tensor([[0.0, 0.5]]), columns, Totals(tokens=2, rows=1))  # the second ratio is clipped
        >>> print(f"{float(loss):.2f}", metrics["actor/pg_clipfrac"])
        -1.10 0.5

    Source: Schulman et al., 2017, 1707.06347; dual clip: Ye et al., 2019, 1912.09729; clip-higher: Yu et al., 2025, 2503.14476.
    """

    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2
    clip_c: Annotated[float, Range(above=1)] | None = 3.0

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        ratio, positive, negative = tokens.ratio, tokens.advantages > 0, tokens.advantages < 0
        # The sign of A decides which bound applies, so one clamp of the ratio replaces the minimum of two products.
        too_high, too_low = positive & (ratio > 1 + self.clip_high), negative & (ratio < 1 - self.clip_low)
        far_too_high = negative & (ratio > (self.clip_c or float("inf")))
        bounded = torch.where(negative, ratio.clamp(1 - self.clip_low, self.clip_c), ratio.clamp(max=1 + self.clip_high))
        gains = bounded.mul_(tokens.advantages)
        metrics = {
            "actor/pg_clipfrac": tokens.fraction(too_high | too_low),
            "actor/pg_clipfrac_lower": tokens.fraction(far_too_high),
            "actor/ppo_kl": tokens.approximate_kl,
        }
        return gains, torch.where(tokens.safe & ~(too_high | too_low | far_too_high), gains, 0.0), metrics


@refuse_unknown
@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """The policy gradient weighted by the clipped ratio, which itself has no gradient: -sg(clip(r)) A log p.

        >>> CISPO(clip_high=0.28).reads
        ('old_log_probs', 'advantages')

    Unlike in PPO, a clipped token still has a gradient. Source: MiniMax, 2025, 2506.13585.
    """

    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        bounded = tokens.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"actor/pg_clipfrac": tokens.fraction(tokens.ratio != bounded), "actor/ppo_kl": tokens.approximate_kl}
        weights = bounded.mul_(tokens.advantages)
        return weights * tokens.given, weights, metrics


@refuse_unknown
@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient: -A log p. It is the loss of GPG, and of off-policy REINFORCE where importance weights are given.

        >>> Reinforce(kl_coef=0.01).reads  # there is no ratio, so no old log-probs
        ('advantages', 'ref_log_probs')

    Source: Williams, 1992; GPG: Chu et al., 2025, 2504.02546.
    """

    ratio = False

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        return tokens.advantages * tokens.given, tokens.advantages, {}


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    """The policy gradient with a quadratic pull towards the old policy: -(A log p - beta / 2 (log p - log p_old)^2).

        >>> DRO(beta=0.1).reads
        ('old_log_probs', 'advantages')

    Source: Richemond et al., 2024, 2405.19107.
    """

    beta: Positive

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        pull = self.beta * tokens.log_ratio
        gains = tokens.advantages * tokens.given - 0.5 * pull * tokens.log_ratio
        return gains, tokens.advantages - pull, {"actor/ppo_kl": -tokens.mean(tokens.log_ratio)}
