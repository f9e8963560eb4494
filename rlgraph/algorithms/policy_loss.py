"""The base of every policy loss: checked inputs, importance weights, aggregation, entropy bonus, KL term and metrics."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch.autograd.function import once_differentiable

from rlgraph import settings
from rlgraph.algorithms.inputs import response_mask_of, tensor, tokenwise
from rlgraph.algorithms.kl import CLAMP, KlEstimator, kl_of_log_ratio
from rlgraph.algorithms.masks import Aggregation, Totals, aggregate, check_aggregation, count, keep, row_weights
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError
from rlgraph.settings import AtLeastZero, Count, Finite

Metrics = dict[str, torch.Tensor]
# Metrics that are reduced as the loss is.
AGGREGATED = ("actor/pg_loss", "actor/entropy", "actor/kl_loss", "actor/sft_loss", "critic/vf_loss")


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens `[b, T]` of a micro-batch as a loss reads them: `given` are the log-probs being trained, `old` the old ones."""

    given: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    totals: Totals
    old: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    @cached_property
    def log_ratio(self) -> torch.Tensor:
        """The log of new over old probability, 0 outside of the mask."""
        assert self.old is not None
        return keep(self.given - self.old, self.mask)

    @cached_property
    def ratio(self) -> torch.Tensor:
        """The ratio of new to old probability, its log clamped to [-20, 20] so that it is finite; 1 outside of the mask."""
        return self.log_ratio.clamp(-CLAMP, CLAMP).exp_()

    @cached_property
    def safe(self) -> torch.Tensor:
        """Flags of the tokens whose ratio is not clamped, so that it has a slope."""
        return self.log_ratio.abs() <= CLAMP

    @cached_property
    def approximate_kl(self) -> torch.Tensor:
        """This micro-batch's share of the mean log of old over new probability, clamped like the ratio."""
        return -self.mean(self.log_ratio.clamp(-CLAMP, CLAMP))

    def fraction(self, flags: torch.Tensor) -> torch.Tensor:
        """Compute this micro-batch's share of the fraction of the mini-batch's tokens whose flag is set."""
        return count(flags & self.mask) / max(self.totals.tokens, 1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Compute this micro-batch's share of the mean over the mini-batch's tokens, of values that are 0 outside of the mask."""
        return values.sum() / max(self.totals.tokens, 1)


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class PolicyLoss(ABC):
    """Base of the policy losses: policy term - `entropy_coef` x entropy + `kl_coef` x KL to the reference, all aggregated in the same way.

    A trainer calls it for each micro-batch, with log-probs `[b, T]` under the weights being trained, the columns of the micro-batch,
    and the totals of the whole mini-batch over all ranks. The losses and the metrics of all micro-batches add up to the loss and metrics
    of the mini-batch. A custom loss derives from it and implements `gains`:

        >>> class SquaredRatio(PolicyLoss):
        ...     def gains(self, tokens):
        ...         gains = tokens.advantages * tokens.ratio**2
        ...         return gains, 2 * gains, {}  # the slope in the log-prob
        >>> SquaredRatio(kl_coef=0.01).reads
        ('old_log_probs', 'advantages', 'ref_log_probs')

    If a loss overrides more than `gains`, it sets `additive`: whether the loss and the metrics of a mini-batch are sums over its rows, the
    losses and `AGGREGATED` divided as the aggregation says, other metrics by the number of tokens. `policy.update(streamed=True)` needs it.

    * `aggregation`: reduces token losses over all tokens, "token-mean" or "token-sum", or per response first, "seq-mean-token-sum",
      "seq-mean-token-mean" or "seq-mean-token-sum-norm".
    * `horizon`: the fixed number of tokens that "seq-mean-token-sum-norm" divides by.
    * `entropy_coef`: the weight of the entropy, which the loss rewards.
    * `kl_coef`: the weight of the KL divergence from `ref_log_probs`; 0: no KL term.
    * `kl_estimator`: how the KL is estimated from log-probs: see `rlgraph.algorithms.kl_penalty`.
    """

    HOW: ClassVar[str] = "give a loss object such as rg.ClippedLoss()"
    ratio: ClassVar[bool] = True
    optional_reads: ClassVar[tuple[str, ...]] = ("rollout_is_weights",)
    only_aggregation: ClassVar[str | None] = None
    additive: ClassVar[bool] = True
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    entropy_coef: Finite = 0.0
    kl_coef: AtLeastZero = 0.0
    kl_estimator: KlEstimator = "k3"

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if "additive" not in cls.__dict__:
            cls.additive = cls.additive and {"policy_term", "aggregate", "__call__"}.isdisjoint(cls.__dict__)

    def __post_init__(self) -> None:
        settings.check(self)
        where = type(self).__name__
        check_aggregation(where, self.aggregation, self.horizon)
        if self.only_aggregation is not None and self.aggregation != self.only_aggregation:
            raise GraphError(
                f"{where}(aggregation={self.aggregation!r}): this loss only supports '{self.only_aggregation}'; leave the option out"
            )
        if self.kl_coef == 0 and self.kl_estimator != "k3":
            raise GraphError(f"{where}(kl_estimator={self.kl_estimator!r}): without kl_coef there is no KL term; set it, or leave this out")

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the log-probs and the response mask."""
        return (*(("old_log_probs",) if self.ratio else ()), "advantages", *(("ref_log_probs",) if self.kl_coef else ()))

    @property
    def needs_entropy(self) -> bool:
        """Whether the caller has to give the entropy of each token's distribution."""
        return self.entropy_coef != 0

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss (a scalar with gradient) and of the metrics.

        `entropy` `[b, T]` is that of each token's distribution. Raises DataError for a column that is missing or of another shape or
        dtype, and if entropy is needed and not given.
        """
        tokens = self._tokens(log_probs, batch, totals)
        loss, metrics = self.policy_term(tokens)
        metrics = {"actor/pg_loss": loss, **metrics}
        if entropy is not None:
            bonus = self.aggregate(tokenwise(type(self).__name__, {"entropy": entropy}, "entropy", tokens.mask), tokens)
            metrics["actor/entropy"] = bonus
            loss = loss - self.entropy_coef * bonus if self.needs_entropy else loss
        elif self.needs_entropy:
            raise DataError(f"{type(self).__name__}: entropy_coef is {self.entropy_coef}, but there is no entropy; pass entropy [b, T]")
        if self.kl_coef:
            difference = keep(log_probs - tokenwise(type(self).__name__, batch, "ref_log_probs", tokens.mask), tokens.mask)
            kl = self.aggregate(kl_of_log_ratio(difference, self.kl_estimator), tokens)
            metrics["actor/kl_loss"] = kl
            loss = loss + self.kl_coef * kl
        return loss, to_floats(metrics)

    def policy_term(self, tokens: Tokens) -> tuple[torch.Tensor, Metrics]:
        """Compute the aggregated policy term and its metrics."""
        with torch.no_grad():
            gains, slopes, metrics = self.gains(tokens)
            if tokens.weights is not None:
                gains, slopes = gains * tokens.weights, slopes * tokens.weights
            loss = -self.aggregate(gains, tokens)
            rows = row_weights(gains, tokens.mask, tokens.totals, self.aggregation, self.horizon)
            gradient = keep(slopes, tokens.mask).mul_(-rows[:, None])
        return with_gradient(tokens.given, loss, gradient), metrics

    @abstractmethod
    def gains(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, Metrics]:
        """Compute the gain of each token `[b, T]`, its slope in the token's log-prob `[b, T]`, and the metrics of this micro-batch.

        Training maximises the gains. Values outside of the mask are ignored later. It is called without gradients: the loss returns its
        slopes itself, so that only one tensor is kept for the backward pass.
        """

    def aggregate(self, losses: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Aggregate losses `[b, T]` as the options say, to this micro-batch's share."""
        return aggregate(losses, tokens.mask, tokens.totals, self.aggregation, self.horizon)

    def _tokens(self, log_probs: torch.Tensor, batch: Columns, totals: Totals) -> Tokens:
        where = type(self).__name__
        mask = response_mask_of(where, batch, log_probs.shape)
        old = tokenwise(where, batch, "old_log_probs", mask) if self.ratio else None
        weights = tokenwise(where, batch, "rollout_is_weights", mask) if "rollout_is_weights" in batch else None
        return Tokens(log_probs, tokenwise(where, batch, "advantages", mask), mask, totals, old, weights)


def to_floats(metrics: Metrics) -> dict[str, float]:
    """Convert metrics to numbers, fetched from the device in one copy."""
    values: list[float] = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


def with_gradient(log_probs: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Make the scalar `loss` a function of `log_probs` whose gradient is `gradient`, of the same shape."""
    result: torch.Tensor = _Given.apply(log_probs, loss, gradient)  # type: ignore[no-untyped-call] # torch's has no types
    return result


class _Given(torch.autograd.Function):
    """A value with a gradient that was computed beforehand."""

    @staticmethod
    def forward(ctx: Any, log_probs: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream * gradient, None, None


# Losses of a whole mini-batch: a row's share depends on other rows, which may be in other passes and on other ranks.

GRADIENTS = "loss_gradients"  # the column with the slope of a whole loss in the score of each token


@dataclass(frozen=True, kw_only=True)
class WholeLoss(ABC):
    """Base of the losses that compare rows, e.g. pairs. It is called once with the scores of a whole mini-batch.

    The update computes the scores of the mini-batch without gradients, computes the loss's slope in each of them, and sends these slopes
    through the model in micro-batches. The gradient is exact with any number of micro-batches and ranks; it costs one more forward pass.

        >>> class Spread(WholeLoss):
        ...     reads = ()
        ...     def __call__(self, scores, batch):
        ...         return scores.var(), {"actor/spread": float(scores.detach().var())}
        >>> float(Spread()(torch.tensor([[1.0, 3.0]]), {})[0])
        2.0
    """

    HOW: ClassVar[str] = "give a loss object such as rg.DPO()"
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False
    scores: ClassVar[Literal["log_probs", "values"] | None] = None  # what it takes; None: either
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = None  # what the preferences of its rows are; None: anything

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the scores and the response mask."""

    @abstractmethod
    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the loss of the mini-batch from its scores `[B, T]`, with a gradient by torch's autograd, and its metrics."""


@dataclass(frozen=True, kw_only=True)
class SlopedLoss:
    """A loss whose value, metrics and slopes are known: each pass adds its rows' share."""

    value: float
    metrics: dict[str, float]
    needs_entropy: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = (GRADIENTS,)

    def __call__(
        self, scores: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Give this pass's share of the loss, by its rows, with the slopes in the column `loss_gradients` as the gradient."""
        mask = tensor("SlopedLoss", batch, "response_mask")
        share = int(mask.any(-1).sum()) / max(totals.rows, 1)
        slopes = tokenwise("SlopedLoss", batch, GRADIENTS, mask)
        loss = with_gradient(scores, scores.new_tensor(self.value * share), slopes.to(scores))
        return loss, {name: value * share for name, value in self.metrics.items()}
