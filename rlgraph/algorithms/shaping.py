"""DAPO's penalty on long responses, and the groups that its dynamic sampling drops."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlgraph import settings
from rlgraph.algorithms.inputs import response_mask_of, rowwise
from rlgraph.algorithms.masks import Groups, ends
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError
from rlgraph.settings import Count, Positive


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Lower the reward of a response that reaches into the last `buffer_tokens` of its `max_tokens`.

        >>> OverlongPenalty(max_tokens=10, buffer_tokens=4).penalties(torch.tensor([7, 8, 10]))
        tensor([-0.2500, -0.5000, -1.0000])

    The penalty grows from 0 to `factor` over the buffer: min(-(n - (max - buffer)) / buffer x factor, 0). n counts all tokens up
    to the last of the response, tool tokens included. Source: Yu et al., 2025, 2503.14476.
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
        """Add the penalty to `rewards` `[B]`. Raises DataError for a column that is missing or of another shape or dtype."""
        mask = response_mask_of("OverlongPenalty", batch)
        rewards = rowwise("OverlongPenalty", batch, "rewards", mask)
        return {"rewards": rewards + self.penalties(ends(mask)).to(rewards.dtype)}

    def penalties(self, lengths: torch.Tensor) -> torch.Tensor:
        """Compute the penalties `[B]`, 0 or less, of responses with `lengths` `[B]` tokens."""
        exceeded = lengths - (self.max_tokens - self.buffer_tokens)
        return (-exceeded / self.buffer_tokens * self.factor).clamp(max=0)


def constant_groups(metric: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """Flag the rows `[B]` whose group, of two or more, has one and the same value of the metric `[B]`: it gives no gradient.

        >>> constant_groups(torch.tensor([1.0, 1.0, 0.0, 1.0]), group_ids=torch.tensor([3, 3, 5, 5]))
        tensor([ True,  True, False, False])

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
