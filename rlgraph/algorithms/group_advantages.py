"""Advantages from one reward per response, compared within the group of responses to one prompt.

All tokens of a response get the same advantage; it is 0 outside of the response mask. A group of one has nothing to compare with:
`singleton="reward"` takes its reward as the advantage, and `singleton="zero"` gives 0. Pass@k needs groups of at least two.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rlgraph import settings
from rlgraph.algorithms.groups import Groups, groups_of
from rlgraph.algorithms.inputs import masked, rowwise
from rlgraph.algorithms.masks import count, spread, whiten_rows
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, shown
from rlgraph.settings import Finite, Positive

EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class GroupEstimator(ABC):
    """Base of the estimators that compare the rewards of a group. A subclass implements `scores`: the advantage `[B]` of each response."""

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
        mask = masked(where, batch)
        rewards = rowwise(where, batch, "rewards", mask)
        return {"advantages": spread(self.scores(rewards, mask, groups_of(where, batch, mask)).to(rewards.dtype), mask)}

    @abstractmethod
    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Compute the advantage `[B]` of each response, whose tokens are under the mask `[B, T]`."""

    def compared(self, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Subtract from rewards `[B]` the mean of their group, in float64; a group of one is handled as `singleton` says."""
        return self.settled(groups.centered(rewards), rewards, groups)

    def settled(self, centered: torch.Tensor, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
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

    `normalize_std=False` leaves the division out, which is Dr. GRPO. A group of one has mean 0 and deviation 1.

    Source: Shao et al., 2024, 2402.03300; Dr. GRPO: Liu et al., 2025, 2503.20783.
    """

    normalize_std: bool = True

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        return self.normalized(rewards, groups)

    def normalized(self, rewards: torch.Tensor, groups: Groups) -> torch.Tensor:
        centered = groups.centered(rewards)
        compared = self.settled(centered, rewards, groups)
        return compared / (groups.std(centered) + EPSILON) if self.normalize_std else compared


@settings.refuse_unknown
@dataclass(frozen=True)
class RLOO(GroupEstimator):
    """The reward minus the mean of the other rewards of its group: n / (n - 1) (R - mean).

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> RLOO()(batch)["advantages"].tolist()
        [[1.0], [-1.0]]

    Source: Ahmadian et al., 2024, 2402.14740.
    """

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        size = groups.sizes[groups.index]
        return self.compared(rewards, groups) * size / (size - 1).clamp(min=1)


@settings.refuse_unknown
@dataclass(frozen=True)
class OPO(GroupEstimator):
    """The reward minus its group's mean weighted by length: R - sum(n_j R_j) / sum(n_j).

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> OPO()({**batch, "response_mask": torch.tensor([[True, False, False], [True, True, True]])})["advantages"][:, 0].tolist()
        [0.75, -0.25]

    A group without any response token has no weights, and no token for its advantages. Source: Hao et al., 2025, 2505.23585.
    """

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        lengths = count(mask, -1).double()
        shifted = rewards.double() - groups.min(rewards).double()[groups.index]
        baseline = groups.sum(lengths * shifted) / groups.sum(lengths).clamp(min=1)
        return self.settled(shifted - baseline[groups.index], rewards, groups)


@settings.refuse_unknown
@dataclass(frozen=True)
class GPG(GroupEstimator):
    """The reward minus its group's mean, scaled up where few rewards of the batch are not 0.

        >>> batch = {"rewards": torch.tensor([1.0, 0.0]), "response_mask": torch.ones(2, 1).bool(), "group_ids": torch.tensor([5, 5])}
        >>> GPG()(batch)["advantages"].tolist()
        [[1.0], [-1.0]]

    It is a (R - mean) / `f_norm`, with a = B / max(#{R != 0}, 1). Source: Chu et al., 2025, 2504.02546.
    """

    f_norm: Positive = 1.0

    def scores(self, rewards: torch.Tensor, mask: torch.Tensor, groups: Groups) -> torch.Tensor:
        scale = len(rewards) / torch.count_nonzero(rewards).clamp(min=1)
        return self.compared(rewards, groups) * scale / self.f_norm


@settings.refuse_unknown
@dataclass(frozen=True)
class PassK(GroupEstimator):
    """Give an advantage to the best response of a group alone, its lead over the second: (R1 - R2) / (std + 1e-6). It raises pass@k.

        >>> batch = {"rewards": torch.tensor([3.0, 1.0, 0.0]), "response_mask": torch.ones(3, 1).bool(), "group_ids": torch.zeros(3).long()}
        >>> PassK(normalize_std=False)(batch)["advantages"].tolist()
        [[2.0], [0.0], [0.0]]

    A tie for the best gives 0. Raises DataError for a group of one. Source: 2503.19595.
    """

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
        return ahead / (groups.std(groups.centered(rewards)) + EPSILON) if self.normalize_std else ahead


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
        return whiten_rows(self.compared(rewards, groups), count(mask, -1), "ReinforcePlusPlusBaseline")


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class GDPO(GRPO):
    """Apply GRPO to each of several rewards, then whiten their weighted sum over the tokens of the batch. No reward drowns the others.

        >>> GDPO(keys=("accuracy", "format"), weights=(1.0, 0.5)).reads
        ('accuracy', 'format', 'response_mask', 'group_ids')

    `keys` name columns `[B]`, and `weights` are theirs, all 1 by default.
    Raises DataError for a batch of one response token. Source: 2601.05242.
    """

    keys: tuple[str, ...] = ("rewards",)
    weights: tuple[Finite, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.keys or len(set(self.keys)) < len(self.keys):
            raise GraphError(f"GDPO(keys={shown(self.keys)}): keys name one column or more, each once, as in keys=('accuracy', 'format')")
        if self.weights is not None and len(self.weights) != len(self.keys):
            raise GraphError(
                f"GDPO(weights={shown(self.weights)}): there is one weight for each of the keys {shown(self.keys)}; give a tuple of them"
            )

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*self.keys, "response_mask", "group_ids")

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        mask = masked("GDPO", batch)
        groups = groups_of("GDPO", batch, mask)
        rewards = [rowwise("GDPO", batch, key, mask) for key in self.keys]
        weights = self.weights or (1.0,) * len(rewards)
        scores = torch.stack([w * self.normalized(r, groups) for w, r in zip(weights, rewards, strict=True)]).sum(0)
        return {"advantages": spread(whiten_rows(scores, count(mask, -1), "GDPO").to(rewards[0].dtype), mask)}
