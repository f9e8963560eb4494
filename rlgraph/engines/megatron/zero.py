"""Each parameter's float32 weights and moments on one of the ranks that compute with it for other tokens (ZeRO-1, arXiv 1910.02054).

An owner has whole parameters of a rank, so each stays some boxes of the Hugging Face model. Gradients are added up at their owner, which
takes the step and sends the others the values: as many bytes as to reduce-scatter and to gather. The gradients of an owner's parameters lie
behind each other, and so do their values: each takes one call for an owner, however many parameters it has.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist


def owners(sizes: Mapping[str, int], count: int, first: Collection[str] = ()) -> dict[str, int]:
    """Give each parameter one of `count` owners, which have about equally much; the parameters of `first` go to owner 0.

    >>> owners({"embedding": 6, "up": 4, "down": 4, "norm": 1}, 2)
    {'embedding': 0, 'up': 1, 'down': 1, 'norm': 0}
    """
    loads, found = [0] * count, {}
    for name in sorted(sizes, key=lambda name: (name not in first, -sizes[name])):
        found[name] = 0 if name in first else loads.index(min(loads))
        loads[found[name]] += sizes[name]
    return found


ALIGNED = 64  # numbers between which parameters begin: kernels of products want 16 bytes, and lines of a cache have 128


class Owned:
    """Parameters of the ranks of `group`, in the order of their owners, moved to one memory where there are several owners.

    `tensor_group` are the neighbours that share matrices, whose parameters of the same name have the same owner.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], group: Any, tensor_group: Any, first: Collection[str]) -> None:
        self._group, self._count, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        sizes = {name: one.numel() for name, one in parameters.items()}
        if self._count > 1 and sizes and dist.get_world_size(tensor_group) > 1:  # their words may be fewer
            most = torch.tensor(list(sizes.values()), device=next(iter(parameters.values())).device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=tensor_group)
            sizes = dict(zip(sizes, most.tolist(), strict=True))
        self._owner = owners(sizes, self._count, first)
        self.parameters = {name: parameters[name] for name in sorted(parameters, key=lambda name: self._owner[name])}
        self.names = {name for name, owner in self._owner.items() if owner == self._rank}
        self.elements = sum(one.numel() for one in parameters.values())
        self._parts = self._moved_together() if self._count > 1 and parameters else []

    def _moved_together(self) -> list[torch.Tensor]:
        """Move the parameters to one memory, behind each other, and give the part of each owner."""
        sizes = [-(-one.numel() // ALIGNED) * ALIGNED for one in self.parameters.values()]
        kind = next(iter(self.parameters.values()))
        memory = torch.zeros(sum(sizes), dtype=kind.dtype, device=kind.device)
        parts = [0] * self._count
        for (name, one), size, place in zip(self.parameters.items(), sizes, memory.split(sizes), strict=True):
            parts[self._owner[name]] += size
            one.data = place[: one.numel()].view(one.shape).copy_(one.detach())
        return list(memory.split(parts))

    def add_up(self, gradients: torch.Tensor) -> None:
        """Add up the gradients of all ranks, which lie behind each other as the parameters do, each at its owner; the others' are lost."""
        if self._count > 1:
            sizes = [0] * self._count
            for name, one in self.parameters.items():
                sizes[self._owner[name]] += one.numel()
            parts = gradients.split(sizes)
            sent = [dist.reduce(part, group=self._group, group_dst=to, async_op=True) for to, part in enumerate(parts) if len(part)]
            for work in sent:
                work.wait()

    def publish(self) -> None:
        """Give all ranks the values of the owners."""
        sent = [dist.broadcast(part, group=self._group, group_src=of, async_op=True) for of, part in enumerate(self._parts) if len(part)]
        for work in sent:
            work.wait()
