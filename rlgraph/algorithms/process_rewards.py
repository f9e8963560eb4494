"""Process rewards: one reward for each step of a response, as a solution's lines. How they are learnt, and how they become advantages."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from rlgraph import settings
from rlgraph.algorithms.aggregation import Totals
from rlgraph.algorithms.group_advantages import EPSILON
from rlgraph.algorithms.groups import Groups, groups_of
from rlgraph.algorithms.inputs import masked, tensor, tokenwise
from rlgraph.algorithms.masks import keep
from rlgraph.algorithms.policy_loss import to_floats
from rlgraph.columns import Columns
from rlgraph.errors import DataError

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
        mask = masked("StepwiseLoss", batch, values.shape)
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

    A step's reward is normalised by mean and standard deviation of all steps of its group: (r - mean) / (std + 1e-6). `step_rewards`
    `[B, T]` are where `step_mask` `[B, T]` is true, at the last token of each step: `judge.step_rewards(rollout)` gives both, and a
    node of yours may. Source: Shao et al., 2024, 2402.03300, section 4.1.3.
    """

    reads: ClassVar[tuple[str, ...]] = ("step_rewards", "step_mask", "response_mask", "group_ids")
    writes: ClassVar[tuple[str, ...]] = ("advantages",)
    normalize_std: bool = True

    def __post_init__(self) -> None:
        settings.check(self)

    @torch.no_grad()
    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Compute the advantages `[B, T]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = masked("ProcessGRPO", batch)
        rewards, ends = tokenwise("ProcessGRPO", batch, "step_rewards", mask).double(), tensor("ProcessGRPO", batch, "step_mask")
        if ends.dtype is not torch.bool or ends.shape != mask.shape:
            raise DataError(f"ProcessGRPO: column 'step_mask' is {ends.dtype} of shape {list(ends.shape)}; it is bool and [B, T]")
        groups = groups_of("ProcessGRPO", batch, mask)
        row, column = ends.nonzero(as_tuple=True)
        of_steps = Groups(groups.index[row], torch.bincount(groups.index[row], minlength=len(groups.sizes)).clamp(min=1))
        centered = of_steps.centered(rewards[row, column])
        scaled = centered / (of_steps.std(centered) + EPSILON) if self.normalize_std else centered
        placed = torch.zeros_like(rewards)
        placed[row, column] = scaled
        following = placed.flip(-1).cumsum(-1).flip(-1)
        return {"advantages": keep(following.to(tensor("ProcessGRPO", batch, "step_rewards").dtype), mask)}
