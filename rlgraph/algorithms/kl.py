"""The KL divergence of two policies: estimators for each token, and its coefficient in the reward; and other shaping of rewards.

DAPO's penalty applies to long responses, and its dynamic sampling drops groups.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from rlgraph import settings
from rlgraph.algorithms.inputs import check_choice, check_number, check_tokens, response_mask_of, rowwise
from rlgraph.algorithms.masks import Groups, ends, keep, masked_mean
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError
from rlgraph.notices import old_attribute
from rlgraph.settings import AtLeastZero, Count, OneOf, Positive

KL_ESTIMATORS = ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+")
KlEstimator: TypeAlias = Annotated[str, OneOf(KL_ESTIMATORS)]
CLAMP = 20.0
LARGEST = 10.0  # of k3


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: str = "k3") -> torch.Tensor:
    """Estimate KL(policy, reference) for each token, from the log-probs `[B, T]` of tokens that the policy sampled.

        >>> kl_penalty(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), "k1")
        tensor([[0.5000, 0.0000]])

    With d the log-ratio: k1 = d, which has no useful gradient as a loss; abs = |d|; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, which is
    at least 0 and has the expectation of k1. k3 clamps d to [-20, 20] and its value to at most 10. A name that ends in + has the value
    of the estimator and the gradient of k2, which equals the gradient of the KL. Source: Schulman, 2020, "Approximating KL divergence".

    Raises GraphError for an unknown estimator, DataError for log-probs of different shapes.
    """
    check_choice("kl_penalty", "estimator", estimator, KL_ESTIMATORS)
    if log_probs.shape != ref_log_probs.shape:
        raise DataError(
            f"kl_penalty: the log-probs have shape {list(log_probs.shape)}, the reference's {list(ref_log_probs.shape)}; pass "
            "both for the same tokens, [B, T]"
        )
    return kl_of_log_ratio(log_probs - ref_log_probs, estimator)


def kl_of_log_ratio(log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate the KL as `kl_penalty` does, from the log-ratio of policy to reference."""
    result: torch.Tensor = _KL.apply(log_ratio, estimator)  # type: ignore[no-untyped-call] # torch's has no types
    return result


class _KL(torch.autograd.Function):
    """An estimate and its slope, computed together, so that one tensor is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, log_ratio: torch.Tensor, estimator: str) -> torch.Tensor:
        value, slope = _value_and_slope(log_ratio, estimator.removesuffix("+"))
        ctx.save_for_backward(log_ratio if estimator.endswith("+") else slope)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (slope,) = ctx.saved_tensors
        return upstream * slope, None


def _value_and_slope(log_ratio: torch.Tensor, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    if estimator == "k1":
        return log_ratio.clone(), torch.ones_like(log_ratio)
    if estimator == "abs":
        return log_ratio.abs(), log_ratio.sign()
    if estimator == "k2":
        return 0.5 * log_ratio.square(), log_ratio
    safe = log_ratio.clamp(-CLAMP, CLAMP)
    slope = torch.expm1(-safe).neg_()
    value = safe.sub_(slope)
    # A value or a log-ratio at its bound has no slope.
    moving = (value <= LARGEST) & (log_ratio.abs() <= CLAMP)
    return value.clamp_(max=LARGEST), keep(slope, moving)


@settings.refuse_unknown
@dataclass(frozen=True)
class FixedKL:
    """A constant coefficient of the KL in the reward.

    * `coef`: the weight of the KL.

    >>> FixedKL(0.05).advance(kl=0.3, rows=64)
    FixedKL(coef=0.05)
    """

    coef: AtLeastZero = 0.001

    def __post_init__(self) -> None:
        settings.check(self)

    updated = old_attribute("updated", "advance")

    def advance(self, kl: float, rows: int) -> "FixedKL":
        """Return the coefficient for the next batch, which is the same."""
        return self


@settings.refuse_unknown
@dataclass(frozen=True)
class AdaptiveKL:
    """A coefficient that follows the KL: it rises while the KL is above its target, and falls while it is below.

        >>> AdaptiveKL(coef=0.1, target=0.1, horizon=100).advance(kl=0.3, rows=100).coef
        0.12

    * `coef`: the weight of the KL in the first batch.
    * `target`: the KL to keep, in nats per token.
    * `horizon`: the responses over which the coefficient changes by at most 20 %.

    Source: Ziegler et al., 2019, 1909.08593.
    """

    coef: Positive = 0.001
    target: Positive = 0.1
    horizon: Count = 10_000

    def __post_init__(self) -> None:
        settings.check(self)

    updated = old_attribute("updated", "advance")

    def advance(self, kl: float, rows: int) -> "AdaptiveKL":
        """Compute the coefficient for the next batch, after a batch of `rows` responses whose KL was `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * rows / self.horizon))


@torch.no_grad()
def penalize_rewards(
    token_rewards: torch.Tensor,
    old_log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    mask: torch.Tensor,
    coef: float,
    estimator: str = "k1",
) -> tuple[torch.Tensor, float]:
    """Subtract `coef` times the KL of each token from token rewards `[B, T]`; also return the KL, the mean over rows of their token means.

        >>> rewards, old, reference = torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([[-2.0, -2.0]])
        >>> penalize_rewards(rewards, old, reference, torch.tensor([[True, True]]), coef=0.5)
        (tensor([[-0.5000,  1.0000]]), 0.5)

    The coefficient of a batch is known before its KL: pass the KL to `advance` of `AdaptiveKL` for the coefficient of the next batch.
    Source: Ouyang et al., 2022, 2203.02155, equation 2.

    Raises GraphError for an unknown estimator or a negative coefficient, DataError for columns of another shape or dtype.
    """
    check_number("penalize_rewards", "coef", coef, least=0)
    check_tokens("penalize_rewards", mask, token_rewards=token_rewards, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs)
    kl = keep(kl_penalty(old_log_probs, ref_log_probs, estimator), mask)
    return token_rewards - coef * kl, float(masked_mean(kl, mask, -1).sum() / max(len(mask), 1))


# DAPO's penalty on long responses, and the groups that its dynamic sampling drops.


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Lower the reward of a response that is nearly as long as allowed.

        >>> OverlongPenalty(max_tokens=10, buffer_tokens=4).penalties(torch.tensor([7, 8, 10]))
        tensor([-0.2500, -0.5000, -1.0000])

    The penalty grows from 0 to `factor` over the buffer: min(-(n - (max - buffer)) / buffer x factor, 0). n counts all tokens up
    to the last of the response, tool tokens included. Source: Yu et al., 2025, 2503.14476.

    * `max_tokens`: the length with the full penalty, usually `max_tokens` of the sampling.
    * `buffer_tokens`: the last tokens before it, over which the penalty grows.
    * `factor`: the full penalty.
    """

    reads: ClassVar[tuple[str, ...]] = ("rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("rewards",)
    max_tokens: Count
    buffer_tokens: Count
    factor: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)
        if self.buffer_tokens > self.max_tokens:
            raise GraphError(f"OverlongPenalty(buffer_tokens={self.buffer_tokens}): it must be at most max_tokens={self.max_tokens}")

    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Add the penalty to `rewards` `[B]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("OverlongPenalty", batch)
        rewards = rowwise("OverlongPenalty", batch, "rewards", mask)
        return {"rewards": rewards + self.penalties(ends(mask)).to(rewards.dtype)}

    def penalties(self, lengths: torch.Tensor) -> torch.Tensor:
        """Compute the penalties `[B]`, 0 or less, of responses with `lengths` `[B]` tokens."""
        exceeded = lengths - (self.max_tokens - self.buffer_tokens)
        return (-exceeded / self.buffer_tokens * self.factor).clamp(max=0)


def constant_groups(metric: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Flag the rows `[B]` whose group, of two or more, has one and the same value of the metric `[B]`: it contributes no gradient.

        >>> constant_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_ids=torch.tensor([3, 3, 5, 5]))
        tensor([ True,  True, False, False])

    DAPO's dynamic sampling drops such groups and samples others. Equality is exact; a group of one is never constant.
    Source: Yu et al., 2025, 2503.14476.

    Raises DataError unless there is one int64 id for each value of the metric.
    """
    if group_ids.dtype is not torch.int64 or metric.ndim != 1 or group_ids.shape != metric.shape:
        raise DataError(
            f"constant_groups: 'group_ids' is {group_ids.dtype} of shape {list(group_ids.shape)}, the metric has shape "
            f"{list(metric.shape)}; pass one number and one int64 id for each response, [B]"
        )
    groups = Groups.of(group_ids)
    constant = (groups.min(metric) == groups.max(metric)) & (groups.sizes > 1)
    return constant[groups.index]
