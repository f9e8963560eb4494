"""The float32 weights of a rank and their gradients, which lie behind each other in one memory: ranks add them up in one call."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from rlgraph.engines.fsdp.grad_norm import TINY
from rlgraph.engines.megatron.pieces import PieceTable, is_expert, sees_own


class Masters:
    """Float32 weights of the parameters that passes compute with: the parameters themselves, or where these are of another dtype, copies.

    Gradients of all micro-batches add up in float32.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], table: PieceTable) -> None:
        experts = {name: one for name, one in parameters.items() if is_expert(name)}
        self._parameters, self._table = {**{n: one for n, one in parameters.items() if n not in experts}, **experts}, table
        self._shared = sum(one.numel() for name, one in parameters.items() if name not in experts)  # the first gradients; then the experts'
        self.weights = {name: one if one.dtype == torch.float32 else _copy(one) for name, one in self._parameters.items()}
        self._all: torch.Tensor | None = None
        self._gradients: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Set all gradients to 0; their memory is made at the first call."""
        if self._all is None:
            sizes = [one.numel() for one in self.weights.values()]
            self._all = torch.zeros(sum(sizes), device=next(iter(self.weights.values())).device)
            for (name, weight), part in zip(self.weights.items(), self._all.split(sizes), strict=True):
                weight.grad = self._gradients[name] = part.view(weight.shape)
                if self._parameters[name] is not weight:
                    self._parameters[name].register_post_accumulate_grad_hook(_into(weight.grad))
        self._all.zero_()

    def add_up(self) -> None:
        """Add up the gradients of the ranks that computed with other tokens, other heads, or the same embeddings elsewhere."""
        ranks, table = self._table.ranks, self._table
        assert self._all is not None
        if ranks.data > 1:
            dist.all_reduce(self._all[: self._shared], group=ranks.data_group)
        if self._shared < len(self._all) and dist.get_world_size(ranks.expert_data_group) > 1:
            dist.all_reduce(self._all[self._shared :], group=ranks.expert_data_group)
        if ranks.tensor > 1:
            _together([g for name, g in self._gradients.items() if sees_own(name)], ranks.tensor_group)
        if table.tied and ranks.pipeline > 1 and ranks.tied_group is not None:
            name = "embedding.weight" if ranks.is_first else "output.weight"
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
        """Copy the weights to the parameters that passes compute with."""
        for name, weight in self.weights.items():
            if self._parameters[name] is not weight:
                self._parameters[name].copy_(weight)


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
