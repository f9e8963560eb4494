"""What ranks that share matrices send each other in a layer that is compiled: operations of torch, which a compiler passes on as they are.

A compiler sees shapes alone, and knows a group by its name. Each of the two operations is the other's backward pass.
"""

from typing import Any

import torch

from rlgraph.engines.forward import collectives

_groups: dict[str, Any] = {}


def register_group(group: Any) -> str:
    """Make a group known to the operations, and give its name; call it on each rank before a layer is compiled."""
    name: str = group.group_name
    _groups[name] = group
    return name


def _ranks(group: str) -> int:
    """Count the ranks of a group; an argument of this number would be a symbol in a layer that is compiled for rows of any length."""
    return collectives.ranks_in(_groups[group])


@torch.library.custom_op("rlgraph::gathered_rows", mutates_args=())
def gathered_rows(part: torch.Tensor, group: str) -> torch.Tensor:
    """Gather the rows `[1, l, H]` of all ranks as `[1, L, H]`, and sum the gradients that each rank has of them."""
    return collectives.all_rows(part, _groups[group])


@gathered_rows.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty((1, _ranks(group) * part.shape[1], *part.shape[2:]))


@torch.library.custom_op("rlgraph::scattered_sum", mutates_args=())
def scattered_sum(part: torch.Tensor, group: str) -> torch.Tensor:
    """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows `[1, l, H]`."""
    return collectives.sum_of_rows(part, _groups[group])


@scattered_sum.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty((1, part.shape[1] // _ranks(group), *part.shape[2:]))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _backward_gather(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return scattered_sum(grad, ctx.group), None


def _backward_scatter(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gathered_rows(grad, ctx.group), None


gathered_rows.register_autograd(_backward_gather, setup_context=_keep)
scattered_sum.register_autograd(_backward_scatter, setup_context=_keep)
