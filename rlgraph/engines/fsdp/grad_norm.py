"""The norm of all gradients, and clipping by it."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlgraph.engines.fsdp.sharding import full, local, replica
from rlgraph.engines.fsdp.whole import is_part

TINY = 1e-6  # added to the norm, as torch does


def clipped(parameters: Iterable[torch.nn.Parameter], most: float) -> float:
    """Scale the gradients down to a norm of `most` over all ranks, and return the norm before; every rank calls it."""
    learnt = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in learnt if isinstance(parameter.grad, DTensor)]
    if not any(map(is_part, learnt)) and all(grad.device_mesh.ndim == 1 for grad in grads):
        return float(full(torch.nn.utils.clip_grad_norm_(learnt, most)))
    # torch knows nothing of the ranks that `cut` a parameter, and sums each dim of a mesh by itself, one gradient after the other: here one
    # sum over all ranks. It also adds up experts, which some ranks share, and the rest of a model, which all share.
    norms = torch.stack(torch._foreach_norm([local(grad) for grad in grads]))
    alone = torch.tensor([replica(parameter) == 0 for parameter in learnt], device=norms.device)  # what several ranks hold counts once
    total = (norms.square() * alone).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_([local(grad) for grad in grads], (most / (norm + TINY)).clamp(max=1.0))
    return float(norm)
