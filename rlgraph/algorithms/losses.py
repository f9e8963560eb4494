"""Policy losses of one token each: clipped ratios, and plain policy gradients. All are to be minimised."""

from dataclasses import dataclass
from typing import Annotated

import torch

from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens
from rlgraph.kinds import Range
from rlgraph.settings import AtLeastZero, Fraction, Positive


@dataclass(frozen=True)
class ClippedLoss(PolicyLoss):
    """PPO's clipped loss: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)), and at most -A clip_c where A < 0.

    r is the ratio of new to old probability. `clip_high` above `clip_low` is DAPO's clip-higher; `clip_c` bounds the loss of
    tokens with a negative advantage and a large ratio (dual clip), None leaves that out.

    Source: Schulman et al., 2017, 1707.06347; dual clip: Ye et al., 2019, 1912.09729; clip-higher: Yu et al., 2025, 2503.14476.
    """

    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2
    clip_c: Annotated[float, Range(above=1)] | None = 3.0

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        ratio, positive, negative = tokens.ratio, tokens.advantages > 0, tokens.advantages < 0
        # The sign of A decides which bound can bind, so that one clamp of the ratio stands for the minimum of two products.
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


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """The policy gradient weighted by the clipped ratio, which has no gradient itself: -sg(clip(r)) A log p.

    Unlike in PPO, a clipped token still has a gradient. Source: MiniMax, 2025, 2506.13585.
    """

    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        bounded = tokens.ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        metrics = {"actor/pg_clipfrac": tokens.fraction(tokens.ratio != bounded), "actor/ppo_kl": tokens.approximate_kl}
        weights = bounded.mul_(tokens.advantages)
        return weights * tokens.given, weights, metrics


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """The plain policy gradient: -A log p. GPG's loss, and with importance weights that of an off-policy REINFORCE.

    Source: Williams, 1992; GPG: Chu et al., 2025, 2504.02546.
    """

    ratio = False

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        return tokens.advantages * tokens.given, tokens.advantages, {}


@dataclass(frozen=True, kw_only=True)
class DRO(PolicyLoss):
    """The policy gradient with a quadratic pull to the old policy: -(A log p - beta / 2 (log p - log p_old)^2).

    Source: Richemond et al., 2024, 2405.19107.
    """

    beta: Positive

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        pull = self.beta * tokens.log_ratio
        gains = tokens.advantages * tokens.given - 0.5 * pull * tokens.log_ratio
        return gains, tokens.advantages - pull, {"actor/ppo_kl": -tokens.mean(tokens.log_ratio)}
