"""Losses that need no rollout: SFT, preference pairs, reward models and critics."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch.nn.functional import logsigmoid

from rlgraph import settings
from rlgraph.algorithms.inputs import response_mask_of, rowwise, tokenwise
from rlgraph.algorithms.masks import Aggregation, Totals, aggregate, check_aggregation, count, keep, row_weights
from rlgraph.algorithms.policy_loss import WholeLoss, to_floats, with_gradient
from rlgraph.columns import Columns
from rlgraph.errors import DataError
from rlgraph.settings import AtLeastZero, Count, Positive, refuse_unknown

# The loss of supervised fine-tuning: imitate the tokens that are marked.


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SFTLoss:
    """The negative log-likelihood of the tokens to learn, by default the mean over all of them, as in TRL and most trainers.

        >>> columns = {"response_mask": torch.tensor([[True, True]])}
        >>> round(float(SFTLoss()(torch.tensor([[-1.0, -3.0]]), columns, Totals(tokens=2, rows=1))[0]), 3)
        2.0

    The metric `actor/nll` is the negative log-likelihood per token, with and without `dft`. Oracle: TRL's `SFTTrainer`.

    * `dft`: weights each token with its probability, without gradient: dynamic fine-tuning (Wu et al., 2025, 2508.05629).
    * `aggregation`: reduces token losses, by "token-mean" or as in `rg.ClippedLoss`.
    * `horizon`: the tokens that "seq-mean-token-sum-norm" divides by.
    """

    dft: bool = False
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    additive: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        settings.check(self)
        check_aggregation("SFTLoss", self.aggregation, self.horizon)

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss and of the metrics from log-probs `[b, T]`.

        Raises DataError for a mask that is missing, or of another shape.
        """
        mask = response_mask_of("SFTLoss", batch, log_probs.shape)
        nll = -keep(log_probs, mask)
        weighted = nll * log_probs.detach().exp() if self.dft else nll
        loss = aggregate(weighted, mask, totals, self.aggregation, self.horizon)
        return loss, to_floats({"actor/sft_loss": loss, "actor/nll": nll.detach().sum() / max(totals.tokens, 1)})


# Losses of preferences: pairs of a chosen and a rejected response, and single responses that are good or bad.


class Pairs:
    """The pairs of a mini-batch: sums over the tokens of each response `[pairs]`, chosen and rejected.

    A pair is two adjacent rows, the chosen one first. Those without a preference (0), or without a token on one side, are left out.
    """

    def __init__(self, where: str, scores: torch.Tensor, batch: Columns, *, reference: bool) -> None:
        mask = response_mask_of(where, batch, scores.shape)
        preferences = rowwise(where, batch, "preferences", mask)
        if len(mask) % 2 or not bool((preferences[0::2] == -preferences[1::2]).all()) or bool((preferences[0::2] < 0).any()):
            raise DataError(
                f"{where}: the rows of this mini-batch are not pairs; a pair is two adjacent rows with the preferences 1 and -1. Pass the "
                "output of rg.pairs or rg.preferred, and choose mini_batches that divide the number of pairs"
            )
        whole = mask.any(-1)
        kept = ((preferences != 0) & whole)[0::2] & whole[1::2]
        self.places = kept.nonzero()[:, 0]
        self._sums = keep(scores, mask).sum(-1)
        self._lengths = mask.sum(-1).clamp(min=1)
        self._reference = keep(tokenwise(where, batch, "ref_log_probs", mask), mask).sum(-1) if reference else torch.zeros(len(mask))

    @property
    def count(self) -> int:
        """The number of pairs."""
        return len(self.places)

    def chosen(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the numbers of chosen responses `[pairs]` from those of all rows `[B]`."""
        return rows[0::2][self.places]

    def rejected(self, rows: torch.Tensor) -> torch.Tensor:
        """Pick the numbers of rejected responses `[pairs]` from those of all rows `[B]`."""
        return rows[1::2][self.places]

    @cached_property
    def log_probs(self) -> torch.Tensor:
        """The log-prob of each response `[B]`."""
        return self._sums

    @cached_property
    def ratios(self) -> torch.Tensor:
        """The log-prob of each response less the reference's `[B]`."""
        return self._sums - self._reference

    def per_token(self, rows: torch.Tensor) -> torch.Tensor:
        """Divide the number of each response `[B]` by its tokens."""
        return rows / self._lengths

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average over the pairs; without any it is 0."""
        return values.sum() / max(self.count, 1) + self._sums.sum() * 0


@dataclass(frozen=True, kw_only=True)
class PairLoss(WholeLoss):
    """Base of the losses of pairs. Metrics: `preference/accuracy`, the share of pairs whose chosen response has the higher implicit reward;
    `preference/margin`, `chosen` and `rejected`, these rewards; `preference/pairs`."""

    scores: ClassVar[Literal["log_probs", "values"] | None] = "log_probs"
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = "pairs"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences", "ref_log_probs")

    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the mean loss of the pairs and its metrics. Raises DataError for rows that are not pairs."""
        pairs = Pairs(type(self).__name__, scores, batch, reference="ref_log_probs" in self.reads)
        losses, rewards = self.pair_losses(pairs)
        loss = pairs.mean(losses) + self.more(pairs, scores, batch)
        chosen, rejected = pairs.chosen(rewards.detach()), pairs.rejected(rewards.detach())
        metrics = {
            "preference/accuracy": pairs.mean((chosen > rejected).to(scores.dtype)),
            "preference/margin": pairs.mean(chosen - rejected),
            "preference/chosen": pairs.mean(chosen),
            "preference/rejected": pairs.mean(rejected),
            "preference/pairs": torch.tensor(float(pairs.count)),
        }
        return loss, to_floats(metrics)

    @abstractmethod
    def pair_losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss of each pair `[pairs]`, and the implicit reward of each response `[B]`."""

    def more(self, pairs: Pairs, scores: torch.Tensor, batch: Columns) -> torch.Tensor:
        """Compute a further term, added to the mean over pairs."""
        return scores.new_zeros(())


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """Direct preference optimisation: -log sigmoid(beta (r_chosen - r_rejected)), r the log-ratio of a response to the reference.

        >>> rows = {"response_mask": torch.ones(2, 1).bool(), "preferences": torch.tensor([1.0, -1.0]), "ref_log_probs": torch.zeros(2, 1)}
        >>> round(float(DPO(beta=1.0)(torch.tensor([[0.0], [0.0]]), rows)[0]), 4)
        0.6931

    r is summed over tokens. Source: Rafailov et al., 2023, 2305.18290. Oracle: TRL's `DPOTrainer`, `loss_type="sigmoid"`.

    * `beta`: the scale of the log-ratios; higher keeps the policy closer to the reference.
    """

    beta: Positive = 0.1

    def pair_losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = self.beta * pairs.ratios
        return -logsigmoid(pairs.chosen(rewards) - pairs.rejected(rewards)), rewards


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class IPO(PairLoss):
    """Identity preference optimisation: (r_chosen - r_rejected - 1 / (2 beta))^2, r the log-ratio to the reference for each token.

        >>> IPO(beta=0.2).reads
        ('preferences', 'ref_log_probs')

    Source: Azar et al., 2023, 2310.12036; its authors confirm that r is a mean over tokens. Oracle: TRL's `loss_type="ipo"`.

    * `beta`: sets the target of the difference, 1 / (2 beta); higher keeps the policy closer to the reference.
    """

    beta: Positive = 0.1

    def pair_losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        ratios = pairs.per_token(pairs.ratios)
        return (pairs.chosen(ratios) - pairs.rejected(ratios) - 1 / (2 * self.beta)).square(), self.beta * pairs.ratios


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """Simple preference optimisation, without a reference: -log sigmoid(beta (l_chosen - l_rejected) - gamma), l the mean log-prob.

        >>> SimPO(beta=2.5, gamma=1.0).reads
        ('preferences',)

    Source: Meng et al., 2024, 2405.14734. Oracle: TRL's `CPOTrainer`, `loss_type="simpo"`, `cpo_alpha=0`.

    * `beta`: the scale of the mean log-probs.
    * `gamma`: the margin by which the chosen response should be better.
    """

    beta: Positive = 2.0
    gamma: AtLeastZero = 0.5

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences",)

    def pair_losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        rewards = self.beta * pairs.per_token(pairs.log_probs)
        return -logsigmoid(pairs.chosen(rewards) - pairs.rejected(rewards) - self.gamma), rewards


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """Odds-ratio preference optimisation, without a reference: the chosen responses' log-likelihood, and the odds of chosen over rejected.

        >>> ORPO(beta=0.1).reads
        ('preferences',)

    The loss is -beta log sigmoid(log odds(chosen) - log odds(rejected)), plus the negative log-likelihood per token of the chosen responses
    (TRL also counts prompt tokens). odds = p / (1 - p), and log p is the mean log-prob of a response.

    * `beta`: the weight of the odds-ratio term.

    Source: Hong et al., 2024, 2403.07691. Oracle: TRL's `ORPOTrainer`.
    """

    beta: Positive = 0.1

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences",)

    def pair_losses(self, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        log_p = pairs.per_token(pairs.log_probs)
        chosen, rejected = pairs.chosen(log_p), pairs.rejected(log_p)
        log_odds = chosen - rejected - (_log_1m_exp(chosen) - _log_1m_exp(rejected))
        return -self.beta * logsigmoid(log_odds), self.beta * log_p

    def more(self, pairs: Pairs, scores: torch.Tensor, batch: Columns) -> torch.Tensor:
        mask = response_mask_of("ORPO", batch, scores.shape)[0::2][pairs.places]
        return -keep(scores[0::2][pairs.places], mask).sum() / mask.sum().clamp(min=1)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class KTO(WholeLoss):
    """Kahneman-Tversky optimisation, of single responses: 1 - sigmoid(beta (r - z)) of good ones, 1 - sigmoid(beta (z - r)) of bad ones.

        >>> KTO(beta=0.1, undesirable=1.5).reads
        ('preferences', 'ref_log_probs')

    r is the log-ratio of a response to the reference. z is the mean of r over the rows whose response belongs to another prompt, at least 0
    and without gradient. These rows have the preference 0; `rg.examples(label=…, mismatched=True)` makes them.
    Source: Ethayarajh et al., 2024, 2402.01306. Oracle: TRL's `KTOTrainer`.

    * `beta`: the scale of the log-ratios; higher keeps the policy closer to the reference.
    * `desirable`: the weight of good responses.
    * `undesirable`: the weight of bad responses.
    """

    beta: Positive = 0.1
    desirable: Positive = 1.0
    undesirable: Positive = 1.0
    scores: ClassVar[Literal["log_probs", "values"] | None] = "log_probs"
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = "mismatched"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences", "ref_log_probs")

    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the mean loss of the good and the bad responses. Raises DataError if no row has a response of another prompt."""
        mask = response_mask_of("KTO", batch, scores.shape)
        preferences = rowwise("KTO", batch, "preferences", mask)
        ratios = keep(scores - tokenwise("KTO", batch, "ref_log_probs", mask), mask).sum(-1)
        whole = mask.any(-1)
        others, good, bad = (preferences == 0) & whole, (preferences > 0) & whole, (preferences < 0) & whole
        if not bool(others.any()):
            raise DataError(
                "KTO: this mini-batch has no mismatched row (a prompt with the response of another prompt), which the loss requires; "
                "declare the source with rg.examples(label=…, mismatched=True)"
            )
        kl = ratios[others].mean().clamp(min=0).detach()
        losses = torch.cat(
            [
                self.desirable * (1 - torch.sigmoid(self.beta * (ratios[good] - kl))),
                self.undesirable * (1 - torch.sigmoid(self.beta * (kl - ratios[bad]))),
            ]
        )
        loss = losses.sum() / max(len(losses), 1) + ratios.sum() * 0
        rewards = self.beta * ratios.detach()
        metrics = {"preference/kl": kl, "preference/chosen": _mean(rewards[good]), "preference/rejected": _mean(rewards[bad])}
        return loss, to_floats(metrics)


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.sum() / max(len(values), 1)


def _log_1m_exp(x: torch.Tensor) -> torch.Tensor:
    """Compute log(1 - exp(x)) of x < 0 without cancellation: by expm1 near 0, else by log1p (Maechler, 2012)."""
    x = torch.minimum(x, x.new_tensor(-torch.finfo(x.dtype).eps))
    near = x > -0.693
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))


# Losses of reward models, which learn from pairs.


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class BradleyTerry(WholeLoss):
    """The loss of a reward model on pairs: -log sigmoid(reward of the chosen - reward of the rejected - margin).

        >>> rows = {"response_mask": torch.ones(2, 1).bool(), "preferences": torch.tensor([1.0, -1.0])}
        >>> round(float(BradleyTerry()(torch.zeros(2, 1), rows)[0]), 4)
        0.6931

    The margin is the pair's `margins` if `rg.pairs(margin=…)` writes them, else 0. Metrics: `reward/accuracy` and `reward/margin`.
    Source: Ouyang et al., 2022, 2203.02155; margin: Touvron et al., 2023, 2307.09288. Oracle: TRL's `RewardTrainer`.

    * `center`: the weight of (sum of both rewards)^2, which keeps the rewards around 0; 0 leaves it out.
    """

    center: AtLeastZero = 0.0
    optional_reads: ClassVar[tuple[str, ...]] = ("margins",)
    scores: ClassVar[Literal["log_probs", "values"] | None] = "values"
    rows: ClassVar[Literal["pairs", "mismatched"] | None] = "pairs"

    @property
    def reads(self) -> tuple[str, ...]:
        return ("preferences",)

    def __call__(self, scores: torch.Tensor, batch: Columns) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute the mean loss of the pairs from the score of each response: the sum of `[B, T]`, which has one token under the mask."""
        pairs = Pairs("BradleyTerry", scores, batch, reference=False)
        chosen, rejected = pairs.chosen(pairs.log_probs), pairs.rejected(pairs.log_probs)
        mask = response_mask_of("BradleyTerry", batch, scores.shape)
        margins = pairs.chosen(rowwise("BradleyTerry", batch, "margins", mask)) if "margins" in batch else 0.0
        losses = -logsigmoid(chosen - rejected - margins) + self.center * (chosen + rejected).square()
        metrics = {
            "reward/accuracy": pairs.mean((chosen > rejected).to(scores.dtype)),
            "reward/margin": pairs.mean(chosen - rejected),
            "preference/pairs": torch.tensor(float(pairs.count)),
        }
        return pairs.mean(losses), to_floats(metrics)


# The critic's loss.


@settings.refuse_unknown
@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss: half the squared error of the values, or of values clipped to `clip` around the old values if that is larger.

        >>> columns = {"returns": torch.tensor([[1.0]]), "values": torch.tensor([[0.0]]), "response_mask": torch.tensor([[True]])}
        >>> float(ValueLoss(clip=0.5)(torch.tensor([[1.0]]), columns, Totals(tokens=1, rows=1))[0])  # clipped to 0.5, so half of 0.5^2
        0.125

    1/2 max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2).

    Source: Schulman et al., 2017, 1707.06347, as implemented for language models by TRL.

    * `clip`: how far values may move from the old values; None leaves out the clipped term.
    * `aggregation`: reduces token losses, by "token-mean" or as in `rg.ClippedLoss`.
    * `horizon`: the tokens that "seq-mean-token-sum-norm" divides by.
    """

    clip: Positive | None = 0.5
    aggregation: Aggregation = "token-mean"
    horizon: Count | None = None
    additive: ClassVar[bool] = True
    needs_entropy: ClassVar[bool] = False
    optional_reads: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        check_aggregation("ValueLoss", self.aggregation, self.horizon)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the new values and the response mask."""
        return ("returns",) if self.clip is None else ("values", "returns")

    def __call__(self, values: torch.Tensor, batch: Columns, totals: Totals) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss (a scalar with gradient) and of the metrics, from new `values` `[b, T]`.

        Raises DataError for a column that is missing or of another shape or dtype.
        """
        mask = response_mask_of("ValueLoss", batch, values.shape)
        tokens = max(totals.tokens, 1)
        with torch.no_grad():
            new, returns = keep(values, mask), keep(tokenwise("ValueLoss", batch, "returns", mask), mask)
            slopes = new - returns
            losses = slopes.square()
            metrics = {"critic/vpred_mean": new.sum() / tokens}
            if self.clip is not None:
                old = keep(tokenwise("ValueLoss", batch, "values", mask), mask)
                clipped = (torch.minimum(torch.maximum(new, old - self.clip), old + self.clip) - returns).square()
                larger = clipped > losses
                metrics["critic/vf_clipfrac"] = count(larger & mask) / tokens
                # Where the clipped error is larger, the value is at its bound and has no slope.
                losses, slopes = torch.maximum(losses, clipped), keep(slopes, ~larger)
            loss = 0.5 * aggregate(losses, mask, totals, self.aggregation, self.horizon)
            gradient = slopes.mul_(row_weights(losses, mask, totals, self.aggregation, self.horizon)[:, None])
        return with_gradient(values, loss, gradient), to_floats({"critic/vf_loss": loss, **metrics})
