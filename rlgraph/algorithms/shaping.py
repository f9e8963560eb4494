"""DAPO's reward shaping and group filtering."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.groups import Groups
from rlgraph.algorithms.inputs import masked, rowwise
from rlgraph.algorithms.masks import ends
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError
from rlgraph.settings import Count, Positive


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Take from the reward of a response that runs into the last `buffer_tokens` of the `max_tokens` it may have.

    The penalty grows from 0 to `factor` over the buffer: min(-(n - (max - buffer)) / buffer x factor, 0). n counts all tokens up
    to the response's last, those of tools between included. Source: Yu et al., 2025, 2503.14476.
    """

    reads: ClassVar[tuple[str, ...]] = ("rewards", "response_mask")
    writes: ClassVar[tuple[str, ...]] = ("rewards",)
    max_tokens: Count
    buffer_tokens: Count
    factor: Positive = 1.0

    def __post_init__(self) -> None:
        settings.check(self)
        if self.buffer_tokens > self.max_tokens:
            raise GraphError(
                f"OverlongPenalty(buffer_tokens={self.buffer_tokens}): it is a part of max_tokens={self.max_tokens}; make it smaller"
            )

    def __call__(self, batch: Columns) -> dict[str, torch.Tensor]:
        """Return `rewards` `[B]` with the penalty. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = masked("OverlongPenalty", batch)
        rewards = rowwise("OverlongPenalty", batch, "rewards", mask)
        return {"rewards": rewards + self.penalties(ends(mask)).to(rewards.dtype)}

    def penalties(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the penalties `[B]`, 0 or less, of responses of `lengths` `[B]` tokens."""
        exceeded = lengths - (self.max_tokens - self.buffer_tokens)
        return (-exceeded / self.buffer_tokens * self.factor).clamp(max=0)


def constant_groups(metric: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Return which rows `[B]` belong to a group of two or more with one value of the metric `[B]`: it teaches nothing.

    DAPO's dynamic sampling drops such groups and samples others. Equality is exact; a group of one is never constant.
    Source: Yu et al., 2025, 2503.14476.

    Raises DataError unless there is one int64 id for each value of the metric.
    """
    if group_ids.dtype is not torch.int64 or metric.ndim != 1 or group_ids.shape != metric.shape:
        raise DataError(
            f"constant_groups: 'group_ids' is {group_ids.dtype} of shape {list(group_ids.shape)}, the metric has shape "
            f"{list(metric.shape)}; give one number and one int64 id for each response, [B]"
        )
    groups = Groups.of(group_ids)
    constant = (groups.min(metric) == groups.max(metric)) & (groups.sizes > 1)
    return constant[groups.index]
