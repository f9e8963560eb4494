"""The rule of dynamic sampling: which groups of the data order make a batch, and when the next one is drawn."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlgraph.nodes.rollout.decode_loop import Outcome, Task


@dataclass(eq=False)
class Group:
    """The tasks of one prompt, their responses by request id, and their rewards once all responses are there."""

    position: int
    item: Mapping[str, Any]
    tasks: Sequence[Task]
    responses: dict[str, Outcome] = field(default_factory=dict)
    rewards: torch.Tensor | None = None
    constant: bool = False  # whether all rewards are there and exactly equal

    @property
    def running(self) -> int:
        """The number of responses that still decode."""
        return len(self.tasks) - len(self.responses)

    def score(self, rewards: torch.Tensor) -> None:
        """Take the rewards of the responses, [group_size]."""
        self.rewards, self.constant = rewards, bool((rewards == rewards[0]).all())


def batches(groups: Sequence[Group], wanted: int, most: int) -> Iterator[Sequence[Group]]:
    """Cut groups in the data order into batches: each ends with its `wanted`-th group that differs, or with its `most`-th of all.

    A group that still decodes is taken to differ. If it turns out constant, the ends of its batch and of later ones move on, never back;
    so a group is at last in the batch that it is in now, or in an earlier one.
    """
    begin = differing = 0
    for place, group in enumerate(groups):
        differing += not group.constant
        if differing == wanted or place + 1 - begin == most:
            yield groups[begin : place + 1]
            begin, differing = place + 1, 0


def batch_of_next(groups: Sequence[Group], wanted: int, most: int) -> int:
    """Compute the batch of the group that would be drawn next, counted from the one that is due. It ends up in none that is later."""
    return sum(1 for _ in batches(groups, wanted, most))


def kept(batch: Sequence[Group], wanted: int) -> list[Group]:
    """Choose the groups of a complete batch that are trained, in the data order: those that differ, and the earliest constant ones
    where too few do."""
    constant = [group for group in batch if group.constant]
    filling = set(map(id, constant[: wanted - (len(batch) - len(constant))]))
    return [group for group in batch if not group.constant or id(group) in filling]
