"""Policy losses: of tokens, of whole responses, with bounds on entropy or divergence, and with the engine's policy as the old one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.correction import RolloutCorrection, TruncatedIS
from rlgraph.algorithms.diagnostics import partial_diagnostics
from rlgraph.algorithms.inputs import check_choice, response_mask_of, tensor, tokenwise
from rlgraph.algorithms.kl import CLAMP
from rlgraph.algorithms.masks import Aggregation, Totals, count, keep, lengths, masked_mean
from rlgraph.algorithms.policy_loss import Metrics, PolicyLoss, Tokens, with_gradient
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.settings import AtLeastZero, Finite, Fraction, Natural, Positive, PositiveFraction, Range, refuse_unknown

# Policy losses that treat each token by itself: clipped ratios, and plain policy gradients. Trainers minimise them.


@refuse_unknown
@dataclass(frozen=True)
class ClippedLoss(PolicyLoss):
    """PPO's clipped loss: -min(A r, A clip(r, 1 - clip_low, 1 + clip_high)), and at most -A clip_c where A < 0.

    r is the ratio of new to old probability. With `clip_high` above `clip_low` it is DAPO's clip-higher.

    * `clip_low`: how far below 1 a ratio may go.
    * `clip_high`: how far above 1 a ratio may go.
    * `clip_c`: the bound of the loss where the advantage is negative (dual clip), e.g. 3.0; None: no bound.

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

    * `clip_low`: the ratio is clipped below at 1 - `clip_low`.
    * `clip_high`: the ratio is clipped above at 1 + `clip_high`.
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
    """The plain policy gradient: -A log p. It is the loss of GPG, and of off-policy REINFORCE if there are importance weights.

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

    * `beta`: the strength of the pull.

    Source: Richemond et al., 2024, 2405.19107.
    """

    beta: Positive

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        pull = self.beta * tokens.log_ratio
        gains = tokens.advantages * tokens.given - 0.5 * pull * tokens.log_ratio
        return gains, tokens.advantages - pull, {"actor/ppo_kl": -tokens.mean(tokens.log_ratio)}


# Policy losses with one ratio, or one mean, for each response.

LARGEST_LOG_RATIO = 10.0


@refuse_unknown
@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """PPO's clipped loss with one ratio for a response: the geometric mean of its tokens' ratios. Clip bounds are small.

        >>> GSPO(clip_low=3e-4, clip_high=4e-4).aggregation
        'seq-mean-token-mean'

    The gradient of a token is the gradient of its log-prob, times the ratio of the response, whose log is at most 10.
    Source: Zheng et al., 2025, 2507.18071 (which clips at 3e-4 below and 4e-4 above).

    * `clip_low`: how far below 1 the ratio of a response may go.
    * `clip_high`: how far above 1 the ratio of a response may go.
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

    * `tau_pos`: the temperature of the gate where the advantage is positive.
    * `tau_neg`: the temperature of the gate where the advantage is negative.
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

    * `clip_low`: how far below 0 the log of a token's ratio may go.
    * `clip_high`: how far above 0 the log of a token's ratio may go.
    """

    only_aggregation = "seq-mean-token-mean"
    additive = True
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


# Losses that keep the entropy up: they restrain the few tokens whose log-prob and advantage have the largest covariance.
#
# They choose these tokens within each micro-batch, so these two losses, and no others, depend on how a batch is split.


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

    The same micro-batch always drops the same tokens. There is no dual clip. Source: Cui et al., 2025, 2505.22617.

    * `fraction`: the largest share of the micro-batch's tokens that it drops; it drops at least one.
    * `low`: the smallest covariance of a token that may be dropped.
    * `high`: the largest covariance of a token that may be dropped.
    * `seed`: the seed of the random choice.
    * `clip_low`: the ratio is clipped below at 1 - `clip_low`.
    * `clip_high`: the ratio is clipped above at 1 + `clip_high`.
    """

    additive = False  # it chooses tokens within each micro-batch
    clip_low: Fraction = 0.2
    clip_high: AtLeastZero = 0.2
    fraction: PositiveFraction = 2e-4
    low: Finite = 1.0
    high: Finite = 5.0
    seed: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low >= self.high:
            raise GraphError(f"ClipCov(low={show_value(self.low)}, high={show_value(self.high)}): low must be below high; swap them")

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        plain = tokens.advantages * tokens.ratio
        lesser = torch.minimum(plain, tokens.advantages * tokens.ratio.clamp(1 - self.clip_low, 1 + self.clip_high))
        clipped = lesser < plain
        dropped = self.choose_drops(tokens, clipped)
        metrics = {"actor/pg_clipfrac": tokens.fraction(dropped), "actor/ppo_kl": tokens.approximate_kl}
        return keep(lesser, ~dropped), keep(plain, tokens.safe & ~(dropped | clipped)), metrics

    def choose_drops(self, tokens: Tokens, clipped: torch.Tensor) -> torch.Tensor:
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

    Source: Cui et al., 2025, 2505.22617.

    * `fraction`: the share of the micro-batch's tokens with a penalty, at least one token.
    * `coef`: the weight of the penalty.
    """

    additive = False
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


# DPPO: the policy gradient on tokens whose divergence from the old policy is within bounds, and none on the others.


@refuse_unknown
@dataclass(frozen=True)
class DPPO(PolicyLoss):
    """-A sg(min(r, clip_c)) log p, without the tokens that have moved too far in the direction in which A pushes them.

        >>> DPPO("kl", high=0.05).reads
        ('old_log_probs', 'advantages')

    The distance of a token is the total variation or the KL between the two-valued distributions "this token or not".
    Source: 2602.04879.

    * `divergence`: the distance of the two policies: "tv" or "kl".
    * `low`: the largest distance where the advantage is not positive.
    * `high`: the largest distance where the advantage is positive.
    * `clip_c`: the largest ratio by which a token's gradient is multiplied.
    """

    divergence: Literal["tv", "kl"] = "tv"
    low: AtLeastZero = 0.2
    high: AtLeastZero = 0.2
    clip_c: Annotated[float, Range(above=1)] = 20.0

    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        within = self.in_bounds(tokens)
        metrics = {
            "actor/pg_clipfrac": tokens.fraction(~within),
            "actor/pg_clipfrac_lower": tokens.fraction(within & (tokens.ratio > self.clip_c)),
            "actor/ppo_kl": tokens.approximate_kl,
        }
        weights = torch.where(within, tokens.ratio.clamp(max=self.clip_c), 0.0).mul_(tokens.advantages)
        return weights * tokens.given, weights, metrics

    def in_bounds(self, tokens: Tokens) -> torch.Tensor:
        """Flag the tokens `[b, T]` that are within bounds, or that move back towards the old policy."""
        assert tokens.old is not None
        new, old = tokens.given.exp(), tokens.old.exp()
        if self.divergence == "tv":
            return torch.where(tokens.advantages > 0, new - old <= self.high, new - old >= -self.low)
        kl = old * (tokens.old - tokens.given) + (1 - old) * torch.log((1 - old + 1e-8) / (1 - new + 1e-8))
        return torch.where(tokens.advantages > 0, (kl <= self.high) | (new <= old), (kl <= self.low) | (new >= old))


# Proximal policies: a clipped ratio against a policy that is interpolated between the engine's and the current one, without a pass.


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
            f"proximal_log_probs: log-probs have shape {list(log_probs.shape)}, the rollout's {list(rollout_log_probs.shape)}, "
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
    """Decoupled PPO without a forward pass for old log-probs: w ClippedLoss(r), with r against an interpolated proximal policy.

        >>> ProximalLoss(clip_high=0.28).reads
        ('rollout_log_probs', 'weight_version', 'current_version', 'advantages')

    r = p / p_prox is clipped, w = sg(p_prox / p_rollout) multiplies, and is truncated at `threshold`. `current_version` `[B]` is the
    version of the weights at the start of the update. If every token is one version old, r is the ratio to the rollout's policy
    and w is 1. If you can afford the forward pass, use ClippedLoss with `old_log_probs` and the weights of a rollout correction.

    * `method`: how the proximal policy is interpolated by version, in log-probs ("loglinear") or in probabilities ("linear").
    * `clip_low`: how far below 1 the ratio r may go.
    * `clip_high`: how far above 1 the ratio r may go.
    * `clip_c`: the bound of the loss where the advantage is negative (dual clip); None: no bound.
    * `threshold`: the largest w.

    Source: Hilton et al., 2021, 2110.00641 (decoupled PPO); AReaL, 2505.24298 (interpolation).
    Raises DataError if a log-prob under the mask is not finite.
    """

    optional_reads = ()
    additive = True
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
        mask = response_mask_of("ProximalLoss", batch, log_probs.shape)
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


# Losses that take the engine's policy as the old one: no pass for old log-probs, and the correction inside of the loss.


@settings.refuse_unknown
@dataclass(frozen=True)
class Bypass:
    """Wrap a policy loss: its old policy is the engine's, and `correction` weighs or rejects tokens inside of the loss.

        >>> Bypass(ClippedLoss(clip_high=0.28)).reads
        ('rollout_log_probs', 'advantages')

    Weights and rejections come from the log-probs being trained, without gradient, at every micro-batch. Rejected tokens still
    count in the mini-batch's totals, so the loss shrinks as more are rejected. The entropy and KL terms leave them out too.
    A loss with a ratio corrects for the engine by that ratio: giving it importance weights as well is an error.

    Its metrics include the `rollout_corr/...` diagnostics that add up over micro-batches: KL, k3, chi-squared, perplexities, the mean
    weight, fractions beyond bounds and rejected.

    * `loss`: the policy loss that reads the corrected batch.
    * `correction`: an `rg.estimators.RolloutCorrection`.

    Source: Li et al., "When Speed Kills Stability", richardli.xyz/rl-collapse; verl's bypass mode.
    """

    optional_reads: ClassVar[tuple[str, ...]] = ()
    loss: PolicyLoss = field(default_factory=ClippedLoss)
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)

    def __post_init__(self) -> None:
        settings.check(self)
        if self.loss.ratio and self.correction.weights is not None:
            raise GraphError(
                f"Bypass: {type(self.loss).__name__} already computes ratios against the rollout, so weights would correct twice; "
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
        mask = response_mask_of("Bypass", batch, log_probs.shape)
        rollout = tokenwise("Bypass", batch, "rollout_log_probs", mask)
        kept = self.correction.acceptance_mask(log_probs.detach(), rollout, mask)
        columns: Mapping[str, torch.Tensor | list[str]] = {
            **{name: column for name, column in batch.items() if name != "rollout_is_weights"},
            "old_log_probs": rollout,
            "response_mask": kept,
        }
        if self.correction.weights is not None:
            columns = {**columns, "rollout_is_weights": self.correction.weights(log_probs.detach(), rollout, mask)}
        loss, metrics = self.loss(log_probs, columns, totals, entropy)
        return loss, metrics | partial_diagnostics(log_probs.detach(), rollout, mask, totals, self.correction, kept)
