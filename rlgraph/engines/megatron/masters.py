"""The float32 weights of a rank and their gradients, which lie behind each other in one memory: ranks add them up in one call."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.channels.weights.shards import copy_all
from rlgraph.engines.fsdp.grad_norm import TINY
from rlgraph.engines.megatron.pieces import PieceTable, is_expert, sees_own
from rlgraph.engines.megatron.zero import Owned


class Masters:
    """Float32 weights of the parameters that this rank owns: the parameters that passes compute with, or where these are of another dtype,
    copies. Of the ranks that compute with the same parameters for other tokens each owns some; see `zero`.

    Gradients of all micro-batches add up in float32.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], table: PieceTable) -> None:
        ranks, self._table = table.ranks, table
        tied = ("embedding.weight", "output.weight") if table.tied else ()  # the same owner in the first and the last stage
        common = {name: one for name, one in parameters.items() if not is_expert(name)}
        experts = {name: one for name, one in parameters.items() if is_expert(name)}
        self._common = Owned(common, ranks.data_group, ranks.tensor_group, tied)
        self._experts = Owned(experts, ranks.expert_data_group, ranks.tensor_group, ())
        self._parameters = self._common.parameters | self._experts.parameters
        own = {name: one for name, one in self._parameters.items() if name in self._common.names | self._experts.names}
        self.weights = {name: one if one.dtype == torch.float32 else _copy(one) for name, one in own.items()}
        self._all: torch.Tensor | None = None
        self._gradients: dict[str, torch.Tensor] = {}  # of what this rank owns

    def begin(self) -> None:
        """Set all gradients to 0; their memory is made at the first call."""
        if self._all is None:
            sizes = [one.numel() for one in self._parameters.values()]
            self._all = torch.zeros(sum(sizes), device=next(iter(self._parameters.values())).device)
            for (name, parameter), part in zip(self._parameters.items(), self._all.split(sizes), strict=True):
                gradient = part.view(parameter.shape)
                if parameter.dtype == torch.float32:
                    parameter.grad = gradient
                else:
                    parameter.register_post_accumulate_grad_hook(_into(gradient))
                if name in self.weights:
                    self.weights[name].grad = self._gradients[name] = gradient
        self._all.zero_()

    def add_up(self) -> None:
        """Add up the gradients of the ranks that computed with other tokens, other heads, or the same embeddings elsewhere."""
        ranks, table = self._table.ranks, self._table
        assert self._all is not None
        self._common.add_up(self._all[: self._common.elements])
        self._experts.add_up(self._all[self._common.elements :])
        if ranks.tensor > 1:
            _together([g for name, g in self._gradients.items() if sees_own(name)], ranks.tensor_group)
        if table.tied and ranks.pipeline > 1 and ranks.tied_group is not None:
            name = "embedding.weight" if ranks.is_first else "output.weight"
            if name in self._gradients:
                dist.all_reduce(self._gradients[name], group=ranks.tied_group)

    def clip(self, most: float) -> float:
        """Scale the gradients down to a norm of `most` over all ranks, and return the norm before; what several ranks hold counts once."""
        assert self._all is not None
        once = [g for name, g in self._gradients.items() if self._table.replica(name) == 0]
        total = torch.stack(torch._foreach_norm(once)).square().sum() if once else self._all.new_zeros(())
        if self._table.ranks.world > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        self._all.mul_((most / (norm + TINY)).clamp(max=1.0))
        return float(norm)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the weights to the parameters that passes compute with, on all ranks."""
        copied = [name for name, weight in self.weights.items() if self._parameters[name] is not weight]
        copy_all([self._parameters[name] for name in copied], [self.weights[name] for name in copied])
        self._common.publish()
        self._experts.publish()


def _copy(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().float())


def _into(gradient: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def add(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient.add_(parameter.grad)
        parameter.grad = None

    return add


def _together(gradients: Iterable[torch.Tensor], group: Any) -> None:
    """Add up some gradients over a group in one call."""
    own = list(gradients)
    if own:
        flat = torch.cat([gradient.flatten() for gradient in own])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
            gradient.copy_(part.view(gradient.shape))
