"""Advantage estimators: from one reward per response within its group, from rewards of tokens, and from rewards of steps."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rlgraph import settings
from rlgraph.algorithms.inputs import reasons, response_mask_of, rowwise, tensor, tokenwise
from rlgraph.algorithms.masks import (
    EPSILON,
    Groups,
    Packing,
    Totals,
    bits,
    blocks,
    count,
    discounted_sum,
    ends,
    groups_of,
    keep,
    keep_bits,
    running_sum_,
    spread,
    whiten,
    whiten_rows,
)
from rlgraph.algorithms.policy_loss import to_floats
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.settings import Finite, Fraction, Positive

# Advantages from one reward per response, compared within the group of responses to one prompt.
#
# All tokens of a response get the same advantage; it is 0 outside of the response mask. Pass@k needs groups of at least two.

STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(ABC):
    """Base of the estimators that compare the rewards of a group. A subclass implements `scores`: the advantage `[B]` of each response.

    A subclass that sets `by_group = True` works on each chunk of a rollout as it arrives; one that derives from another says so itself.

    * `singleton`: the advantage of a group of one, which has nothing to compare with: "reward" is its reward, "zero" is 0.
    """

    reads: ClassVar[tuple[str, ...]] = ("rewards", "response_mask", "group_ids")
    writes: ClassVar[tuple[str, ...]] = ("advantages",)
    singleton: Literal["reward", "zero"] = "reward"

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` `[B, T]` in the dtype of `rewards` `[B]`.

        Raises DataError for a column that is missing or of another shape or dtype.
        """
        where = type(self).__name__
        mask = response_mask_of(where, batch)
        rewards = rowwise(where, batch, "rewards", mask)
        return {"advantages": spread(self.scores(rewards, mask, groups_of(where, batch, mask)).to(rewards.dtype), mask)}

    @abstractmethod
    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Compute the advantage `[B]` of each response, whose tokens are under the mask `[B, T]`."""

    def subtract_group_means(self, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Subtract from rewards `[B]` the mean of their group, in float64; a group of one is handled as `singleton` says."""
        return self.fill_singletons(groups.center(rewards), rewards, groups)

    def fill_singletons(self, centered: torch.Tensor, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Replace the centered rewards `[B]` of groups of one as `singleton` says."""
        return torch.where(groups.singleton, rewards.double(), centered) if self.singleton == "reward" else centered


@settings.refuse_unknown
@dataclass(frozen=True)
class GRPO(GroupEstimator):
    """The reward minus its group's mean, divided by the group's standard deviation: (R - mean) / (std + 1e-6).

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> GRPO()(batch)["advantages"]
        tensor([[ 0.7071],
                [-0.7071]])

    A group of one has mean 0 and deviation 1.

    * `normalize_std`: divides by the standard deviation; False is Dr. GRPO.
    Source: Shao et al., 2024, 2402.03300; Dr. GRPO: Liu et al., 2025, 2503.20783.
    """

    by_group: ClassVar[bool] = True
    normalize_std: bool = True

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self.divide_by_deviation(rewards, groups)

    def divide_by_deviation(self, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        centered = groups.center(rewards)
        compared = self.fill_singletons(centered, rewards, groups)
        return compared / (groups.std(centered) + STD_EPSILON) if self.normalize_std else compared


@settings.refuse_unknown
@dataclass(frozen=True)
class RLOO(GroupEstimator):
    """The reward minus the mean of the other rewards of its group: n / (n - 1) (R - mean).

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> RLOO()(batch)["advantages"].tolist()
        [[1.0], [-1.0]]

    Source: Ahmadian et al., 2024, 2402.14740.
    """

    by_group: ClassVar[bool] = True

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        size = groups.sizes[groups.index]
        return self.subtract_group_means(rewards, groups) * size / (size - 1).clamp(min=1)


@settings.refuse_unknown
@dataclass(frozen=True)
class OPO(GroupEstimator):
    """The reward minus its group's mean weighted by length: R - sum(n_j R_j) / sum(n_j).

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> OPO()({**batch, "response_mask": torch.tensor([[True, False, False], [True, True, True]])})["advantages"][:, 0].tolist()
        [0.75, -0.25]

    A group without response tokens has no advantages. Source: Hao et al., 2025, 2505.23585.
    """

    by_group: ClassVar[bool] = True

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        lengths = count(mask, -1).double()
        shifted = rewards.double() - groups.min(rewards).double()[groups.index]
        baseline = groups.sum(lengths * shifted) / groups.sum(lengths).clamp(min=1)
        return self.fill_singletons(shifted - baseline[groups.index], rewards, groups)


@settings.refuse_unknown
@dataclass(frozen=True)
class GPG(GroupEstimator):
    """The reward minus its group's mean, scaled up if few rewards of the batch are nonzero.

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> GPG()(batch)["advantages"].tolist()
        [[1.0], [-1.0]]

    It is a (R - mean) / `f_norm`, with a = B / max(#{R != 0}, 1). Source: Chu et al., 2025, 2504.02546.

    * `f_norm`: divides all advantages.
    """

    f_norm: Positive = 1.0

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        scale = len(rewards) / torch.count_nonzero(rewards).clamp(min=1)
        return self.subtract_group_means(rewards, groups) * scale / self.f_norm


@settings.refuse_unknown
@dataclass(frozen=True)
class PassK(GroupEstimator):
    """Reward only the best response of a group, with its lead over the second: (R1 - R2) / (std + 1e-6). It raises pass@k.

        >>> batch = {"rewards": torch.tensor([3.0, 1.0, 0.0]), "response_mask": torch.ones(3, 1).bool(), "group_ids": torch.zeros(3).long()}
        >>> PassK(normalize_std=False)(batch)["advantages"].tolist()
        [[2.0], [0.0], [0.0]]

    A tie for the best yields 0. Raises DataError for a group of one. Source: 2503.19595.

    * `normalize_std`: divides by the standard deviation of the group.
    """

    by_group: ClassVar[bool] = True
    normalize_std: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.singleton != "reward":
            raise GraphError("PassK(singleton='zero'): Pass@k refuses groups of one, so the option has no effect; leave it out")

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        if bool((groups.sizes == 1).any()):
            raise DataError("PassK: a group has one response; Pass@k compares the best with the second: use a group_size of at least 2")
        best = rewards == groups.max(rewards)[groups.index]
        alone = best & (groups.sum(best.long()) == 1)[groups.index]
        second = groups.max(torch.where(best, float("-inf"), rewards))[groups.index]
        ahead = torch.where(alone, rewards.double() - second.double(), 0.0)
        return ahead / (groups.std(groups.center(rewards)) + STD_EPSILON) if self.normalize_std else ahead


@settings.refuse_unknown
@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GroupEstimator):
    """The reward minus its group's mean, whitened over the tokens of the batch.

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> ReinforcePlusPlusBaseline()(batch)["advantages"]
        tensor([[ 0.7071],
                [-0.7071]])

    Raises DataError for a batch of one response token. Source: Hu, 2025, 2501.03262.
    """

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        return whiten_rows(self.subtract_group_means(rewards, groups), count(mask, -1), "ReinforcePlusPlusBaseline")


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class GDPO(GRPO):
    """Apply GRPO to each of several rewards, then whiten their weighted sum over the tokens of the batch. No reward drowns the others.

        >>> GDPO(keys=("accuracy", "format"), weights=(1.0, 0.5)).reads
        ('accuracy', 'format', 'response_mask', 'group_ids')

    Raises DataError for a batch of one response token. Source: 2601.05242.

    * `keys`: the columns `[B]` of the rewards.
    * `weights`: the weights of their sum; None: all 1.
    * `normalize_std`: divides each reward by the standard deviation of its group.
    """

    keys: tuple[str, ...] = ("rewards",)
    weights: tuple[Finite, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise GraphError(
                f"GDPO(keys={show_value(self.keys)}): keys must name at least one column, each once, e.g. keys=('accuracy', 'format')"
            )
        if self.weights is not None and len(self.weights) != len(self.keys):
            raise GraphError(
                f"GDPO(weights={show_value(self.weights)}): weights needs one number for each of the keys {show_value(self.keys)}; "
                "pass a tuple"
            )

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override] # the columns of its keys, where others name them once for the class
        return (*self.keys, "response_mask", "group_ids")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        mask = response_mask_of("GDPO", batch)
        groups = groups_of("GDPO", batch, mask)
        rewards = [rowwise("GDPO", batch, key, mask) for key in self.keys]
        weights = self.weights or (1.0,) * len(rewards)
        scores = torch.stack([w * self.divide_by_deviation(r, groups) for w, r in zip(weights, rewards, strict=True)]).sum(0)
        return {"advantages": spread(whiten_rows(scores, count(mask, -1), "GDPO").to(rewards[0].dtype), mask)}


# Advantages from token rewards: the rewards that follow each token, against a value estimate, a greedy response or the batch.
#
# Tokens outside of the response mask (padding, tool tokens) are skipped: they neither pass rewards on nor add a discount, and their
# advantages and returns are 0.


@settings.refuse_unknown
@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimation: returns against a critic's values, by default whitened over the tokens of the batch.

    A[t] = d[t] + gamma lam A[t+1] with d[t] = r[t] + gamma V[t+1] - V[t]; `returns` are A + V before whitening.

    * `gamma`: the discount of later rewards.
    * `lam`: trades bias (0) against variance (1).
    * `bootstrap`: values the state after a truncated response (`finish_reasons`) like its last token (Pardo et al., 2018, 1712.00378).
      False: the value after the last token is always 0.
    * `whiten`: shifts and scales the advantages to mean 0 and variance 1 over the batch. False: each row depends only on itself, so the
      estimator works on each chunk of a rollout as it arrives.

        >>> GAE(gamma=1.0, lam=0.95, bootstrap=True).reads
        ('token_rewards', 'values', 'response_mask', 'finish_reasons')

    Raises DataError for a batch of one response token, which cannot be whitened. Source: Schulman et al., 2016, 1506.02438.
    """

    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    bootstrap: bool = False
    whiten: bool = True

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def by_group(self) -> bool:
        """Whether it works on chunks."""
        return not self.whiten

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""
        return ("token_rewards", "values", "response_mask", *(("finish_reasons",) if self.bootstrap else ()))

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("GAE", batch)
        rewards, values = (tokenwise("GAE", batch, name, mask) for name in ("token_rewards", "values"))
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        cut = reasons("GAE", batch, mask) != 0 if self.bootstrap else None
        for rows in blocks(mask):
            packing = Packing.of(mask[rows])
            expected = packing.pack(values[rows])
            errors = packing.pack(rewards[rows]) - expected
            errors[:, :-1].add_(expected[:, 1:], alpha=self.gamma)
            if cut is not None:
                last = (count(mask[rows], -1).long() - 1).clamp(min=0)[:, None]  # the value of an empty row is 0 there
                errors.scatter_add_(1, last, self.gamma * expected.gather(1, last) * cut[rows, None])
            ahead = discounted_sum(errors, self.gamma * self.lam)
            returns[rows] = packing.unpack(ahead + expected)
            advantages[rows] = packing.unpack(ahead)
        return {"advantages": whiten(advantages, mask, "GAE") if self.whiten else advantages, "returns": returns}


@settings.refuse_unknown
@dataclass(frozen=True)
class ReinforcePlusPlus:
    """The discounted rewards that follow each token, whitened over the tokens of the batch; needs neither critic nor groups.

        >>> batch = {"token_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.tensor([[True, True]])}
        >>> ReinforcePlusPlus(gamma=0.5)(batch)["returns"]
        tensor([[0.5000, 1.0000]])

    A reward on a token outside of the response mask is lost. Raises DataError for a batch of one response token.
    Source: Hu, 2025, 2501.03262.

    * `gamma`: the discount of later rewards.
    """

    reads: ClassVar[tuple[str, ...]] = ("token_rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")
    gamma: Fraction = 1.0

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("ReinforcePlusPlus", batch)
        rewards = tokenwise("ReinforcePlusPlus", batch, "token_rewards", mask)
        returns = torch.empty_like(rewards)
        for rows in blocks(mask):
            packing = Packing.of(mask[rows])
            returns[rows] = packing.unpack(discounted_sum(packing.pack(rewards[rows]), self.gamma))
        return {"advantages": whiten(returns, mask, "ReinforcePlusPlus"), "returns": returns}


@dataclass(frozen=True)
class ReMax:
    """The rewards that follow each token, minus the reward of the greedy response to the same prompt, `baseline_rewards` `[B]`.

        >>> batch = {"token_rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.tensor([[True, True]])}
        >>> ReMax()({**batch, "baseline_rewards": torch.tensor([0.25])})["advantages"]
        tensor([[0.7500, 0.7500]])

    Source: Li et al., 2023, 2310.10505.
    """

    by_group: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("token_rewards", "baseline_rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("advantages", "returns")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("ReMax", batch)
        rewards = tokenwise("ReMax", batch, "token_rewards", mask)
        baselines = rowwise("ReMax", batch, "baseline_rewards", mask)
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        for rows in blocks(mask):
            tokens = bits(mask[rows], rewards)
            following = discounted_sum(keep_bits(rewards[rows], tokens), 1.0)
            keep_bits(following, tokens, out=returns[rows])
            keep_bits(following.sub_(baselines[rows, None]), tokens, out=advantages[rows])
        return {"advantages": advantages, "returns": returns}


# The baseline of least variance for each token of a group: returns, weighted by the energy of the path up to the token.


@settings.refuse_unknown
@dataclass(frozen=True)
class OptimalTokenBaseline:
    """The rewards G that follow a token, minus a baseline per token: sum(G W) / sum(W) over the group, at the same position.

        >>> OptimalTokenBaseline().reads
        ('token_rewards', 'response_mask', 'group_ids', 'old_log_probs', 'sum_pi_squared')

    W[t] sums 1 - 2 p + sum(p^2) over the tokens up to t, with p the old probability; `sum_pi_squared` `[B, T]` is the sum over
    the vocabulary. A group of one has no baseline.

    * `align`: "column" compares tokens in the same column of the batch. "token" compares the n-th response tokens, which are in different
      columns if there are tool tokens in between (verl's tool-integrated variant).
    * `weighted`: multiplies W's terms by `rollout_is_weights` squared.
    * `zero_tail`: a response that is strictly the longest has no baseline past the second longest.
    verl 0.9.1 finds the tail in the column variant by counting tokens, which is wrong if the mask has gaps; here it begins behind the
    last token of the second longest response.
    """

    by_group: ClassVar[bool] = True
    align: Literal["column", "token"] = "column"
    zero_tail: bool = True
    weighted: bool = False

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads."""
        weights = ("rollout_is_weights",) if self.weighted else ()
        return ("token_rewards", "response_mask", "group_ids", "old_log_probs", "sum_pi_squared", *weights)

    @property
    def writes(self) -> tuple[str, ...]:
        """The columns that it writes."""
        return ("advantages", "returns")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute `advantages` and `returns` `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        where = "OptimalTokenBaseline"
        mask = response_mask_of(where, batch)
        groups = groups_of(where, batch, mask)
        rewards, log_probs, squares = (tokenwise(where, batch, name, mask) for name in ("token_rewards", "old_log_probs", "sum_pi_squared"))
        scale = tokenwise(where, batch, "rollout_is_weights", mask) if self.weighted else None
        returns, advantages = torch.empty_like(rewards), torch.empty_like(rewards)
        weighed, weights = rewards.new_zeros(2, len(groups.sizes), mask.shape[1])  # sums of the groups
        last = torch.empty(len(mask), dtype=torch.int32, device=mask.device)
        packings = [(rows, Packing.of(mask[rows]) if self.align == "token" else Packing.identity(mask[rows])) for rows in blocks(mask)]
        for rows, packing in packings:
            energy = log_probs[rows].exp().mul_(-2).add_(1).add_(squares[rows])
            if scale is not None:
                energy = energy * scale[rows].square()
            weight = running_sum_(packing.pack(energy.to(rewards.dtype)))
            weight = keep_bits(weight, bits(packing.packed, weight))
            following = discounted_sum(packing.pack(rewards[rows]), 1.0)
            weights.index_add_(0, groups.index[rows], weight)
            weighed.index_add_(0, groups.index[rows], weight.mul_(following))
            returns[rows] = packing.unpack(following)
            last[rows] = ends(packing.packed)
        baselines, stops = weighed.div_(weights.add_(EPSILON)), self.stops(last, groups)[:, None]
        places = torch.arange(mask.shape[1], dtype=torch.int32, device=mask.device)
        for rows, packing in packings:
            shared = keep_bits(baselines.index_select(0, groups.index[rows]), bits(places < stops[rows], rewards))
            torch.sub(returns[rows], packing.unpack(shared), out=advantages[rows])
        return {"advantages": advantages, "returns": returns}

    def stops(self, last: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Compute the position `[B]` at which the baselines of each row stop, from the end `[B]` of the row."""
        # As in verl: empty rows are members of a group in the column variant, and not in the other.
        members = groups.sizes if self.align == "column" else groups.sum((last > 0).long())
        stops = torch.where(members[groups.index] > 1, last, 0)
        if not self.zero_tail:
            return stops
        longest = last == groups.max(last)[groups.index]
        alone = longest & (groups.sum(longest.long()) == 1)[groups.index]
        second = groups.max(torch.where(longest, 0, last))[groups.index]
        return torch.where(alone, stops.minimum(second), stops)


# Process rewards: one reward for each step of a response, as a solution's lines. How they are learnt, and how they become advantages.

LABELS = "step_labels"


@dataclass(frozen=True, kw_only=True)
class StepwiseLoss:
    """The loss of a process reward model: cross-entropy of each step's label, good or bad, given its logit.

        >>> rows = {"response_mask": torch.ones(1, 2).bool(), "step_labels": torch.tensor([[1.0, -1.0]])}
        >>> loss, metrics = StepwiseLoss()(torch.tensor([[2.0, 2.0]]), rows, Totals(tokens=2, rows=1))
        >>> round(float(loss), 4), metrics["reward/accuracy"]
        (1.1269, 0.5)

    The mean is over all steps that have a label. One logit s is the same as TRL's two classes with logits 0 and s. Metric:
    `reward/accuracy`, the share of steps on the right side of 0. Source: Lightman et al., 2023, 2305.20050.
    """

    reads: ClassVar[tuple[str, ...]] = (LABELS,)
    optional_reads: ClassVar[tuple[str, ...]] = ()
    needs_entropy: ClassVar[bool] = False

    def __call__(
        self, values: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss from the logits `[b, T]`, which the mask has where a step's label is.

        Raises DataError for a column that is missing or of another shape.
        """
        mask = response_mask_of("StepwiseLoss", batch, values.shape)
        labels = tokenwise("StepwiseLoss", batch, LABELS, mask).to(values)
        each = keep(binary_cross_entropy_with_logits(values, (labels > 0).to(values), reduction="none"), mask)
        right = keep(((values > 0) == (labels > 0)).to(values), mask)
        count = max(totals.tokens, 1)
        return each.sum() / count, to_floats({"reward/accuracy": right.detach().sum() / count})


@settings.refuse_unknown
@dataclass(frozen=True)
class ProcessGRPO:
    """GRPO with process supervision: each token's advantage is the sum of the normalised rewards of the steps that end at it or later.

        >>> rows = {"response_mask": torch.ones(2, 2).bool(), "group_ids": torch.tensor([5, 5])}
        >>> steps = {"step_rewards": torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "step_mask": torch.ones(2, 2).bool()}
        >>> ProcessGRPO(normalize_std=False)({**rows, **steps})["advantages"]
        tensor([[ 1.0000,  0.5000],
                [-1.0000, -0.5000]])

    A step's reward is normalised by mean and standard deviation of all steps of its group: (r - mean) / (std + 1e-6). `step_rewards` `[B,
    T]` has values where `step_mask` `[B, T]` is true, at the last token of each step. `judge.step_rewards(rollout)` or a custom node writes
    both. Source: Shao et al., 2024, 2402.03300, section 4.1.3.

    * `normalize_std`: divides by the standard deviation of the group's steps.
    """

    by_group: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("step_rewards", "step_mask", "response_mask", "group_ids")
    writes: ClassVar[tuple[str, ...]] = ("advantages",)
    normalize_std: bool = True

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute the advantages `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("ProcessGRPO", batch)
        rewards, ends = tokenwise("ProcessGRPO", batch, "step_rewards", mask).double(), tensor("ProcessGRPO", batch, "step_mask")
        if ends.dtype is not torch.bool or ends.shape != mask.shape:
            raise DataError(f"ProcessGRPO: column 'step_mask' is {ends.dtype} of shape {list(ends.shape)}; it is bool and [B, T]")
        groups = groups_of("ProcessGRPO", batch, mask)
        row, column = ends.nonzero(as_tuple=True)
        of_steps = Groups(groups.index[row], torch.bincount(groups.index[row], minlength=len(groups.sizes)).clamp(min=1))
        centered = of_steps.center(rewards[row, column])
        scaled = centered / (of_steps.std(centered) + STD_EPSILON) if self.normalize_std else centered
        placed = torch.zeros_like(rewards)
        placed[row, column] = scaled
        following = placed.flip(-1).cumsum(-1).flip(-1)
        return {"advantages": keep(following.to(tensor("ProcessGRPO", batch, "step_rewards").dtype), mask)}
