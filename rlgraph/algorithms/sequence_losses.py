"""Policy losses with one ratio, or one mean, for each response."""

from dataclasses import dataclass

import torch

from rlgraph.algorithms.aggregation import Aggregation
from rlgraph.algorithms.masks import count, keep, lengths, masked_mean
from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens, with_gradient
from rlgraph.settings import AtLeastZero, Fraction, Positive, refuse_unknown

LARGEST_LOG_RATIO = 10.0


@refuse_unknown
@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO's clipped loss with one ratio for a response: the geometric mean of its tokens' ratios. Clip bounds are small.

        >>> GSPO(clip_low=3e-4, clip_high=4e-4).aggregation
        'seq-mean-token-mean'

    The gradient of a token is that of its own log-prob, times the ratio of the response, whose log is at most 10.
    Source: Zheng et al., 2025, 2507.18071 (which clips at 3e-4 below and 4e-4 above).
    """

    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        counts = count(tokens.mask, -1)[:, None].clamp(min=1)
        log_ratio = tokens.log_ratio.sum(-1, keepdim=True) / counts
        ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
        positive, negative = tokens.advantages > 0, tokens.advantages < 0
        clipped = (positive & (ratio > 1 + self.clip_high)) | (negative & (ratio < 1 - self.clip_low))
        bounded = torch.where(negative, ratio.clamp(min=1 - self.clip_low), ratio.clamp(max=1 + self.clip_high))
        gains = bounded.mul_(tokens.advantages)
        metrics = {"actor/pg_clipfrac": tokens.fraction(clipped), "actor/ppo_kl": -tokens.mean(tokens.log_ratio)}
        return gains, torch.where(clipped | (log_ratio > LARGEST_LOG_RATIO), 0.0, gains), metrics


@refuse_unknown
@dataclass(frozen=True)
class SAPO(PolicyLoss):
    """PPO with a soft gate in place of the clip: -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg.

        >>> SAPO(tau_neg=1.1).reads
        ('old_log_probs', 'advantages')

    Defined for the mean of each response's mean. Source: 2511.20347.
    """

    only_aggregation = "seq-mean-token-mean"
    aggregation: Aggregation = "seq-mean-token-mean"
    tau_pos: Positive = 1.0
    tau_neg: Positive = 1.05

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        positive, negative = (tokens.ratio.new_tensor(tau) for tau in (self.tau_pos, self.tau_neg))
        tau = torch.where(tokens.advantages > 0, positive, negative)
        gate = (tokens.ratio - 1).mul_(tau).sigmoid_()
        gains = (gate * tokens.advantages).mul_(4)
        slopes = keep((1 - gate).mul_(gains).mul_(tokens.ratio), tokens.safe)
        return gains.div_(tau), slopes, {"actor/ppo_kl": tokens.approximate_kl}


@refuse_unknown
@dataclass(frozen=True)
class GMPO(PolicyLoss):
    """The geometric mean rho of a response's ratios, whose logs are clipped to [-clip_low, clip_high]: the mean over rows of -A rho.

        >>> GMPO(clip_low=0.4, clip_high=0.4).reads
        ('old_log_probs', 'advantages')

    A is the mean advantage of the response; importance weights enter by their geometric mean. The mean is over the rows that have
    tokens. Source: Zhao et al., 2025, 2507.20673 (which clips at 0.4 on both sides).
    """

    only_aggregation = "seq-mean-token-mean"
    aggregation: Aggregation = "seq-mean-token-mean"
    clip_low: AtLeastZero = 0.2
    clip_high: AtLeastZero = 0.2

    def policy_term(self, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        with torch.no_grad():
            gains, slopes, metrics = self.gains(tokens)
            if tokens.weights is not None:
                weights = masked_mean((tokens.weights + 1e-10).log(), tokens.mask, -1).exp()
                gains, slopes = gains * weights, slopes * weights[:, None]
            rows = max(tokens.totals.rows, 1)
            loss, gradient = -gains.sum() / rows, slopes.div_(-rows)
        return with_gradient(tokens.given, loss, gradient), metrics

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Compute the gain of each response `[b]`, its slopes in the tokens' log-probs `[b, T]`, and the metrics of this micro-batch."""
        log_ratio, positive, negative = tokens.log_ratio, tokens.advantages > 0, tokens.advantages < 0
        high, low = log_ratio > self.clip_high, log_ratio < -self.clip_low
        moving = ((positive & ~high) | (negative & ~low)) & tokens.mask
        bounded = torch.where(positive, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low))
        counts = lengths(tokens.mask, log_ratio.dtype)
        ratios = (keep(bounded, positive | negative).sum(-1) / counts).exp()
        gains = masked_mean(tokens.advantages, tokens.mask, -1) * ratios
        clipped = high | low
        metrics = {
            "actor/pg_clipfrac": tokens.fraction(clipped & positive),
            "actor/pg_clipfrac_lower": tokens.fraction(clipped & negative),
            "actor/ppo_kl": -tokens.mean(log_ratio),
        }
        return gains, torch.where(moving, (gains / counts)[:, None], 0.0), metrics
