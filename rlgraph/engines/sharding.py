"""Shards of a model over the ranks of a process group: FSDP2, and the tensors that a rank holds of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlgraph.errors import GraphError


def join(rank: int, world: int) -> bool:
    """Make sure that there is a process group; return whether it was made here, which it is for a world of one.

    Raises GraphError where the group is another one, or there is none for several ranks.
    """
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, world):
            raise GraphError(f"FsdpEngine(rank={rank}, world={world}): the process group has rank {found[0]} of {found[1]}; give the same")
        return False
    if world > 1:
        raise GraphError(f"FsdpEngine(world={world}): call torch.distributed.init_process_group on every rank before")
    dist.init_process_group(backends(), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


def backends() -> str:
    """Return what carries collectives here: gloo for tensors in host memory and, where there are GPUs, NCCL for theirs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def prepare_layers(model: Any, layers: Any, *, recompute: bool, compiled: bool) -> None:
    """Let the layers recompute their activations in the backward pass, or compile them; before they are sharded."""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = recompute  # of the layer alone, not of what is in it: recomputing is off otherwise, dropout stays off
        if compiled:
            layer.compile(dynamic=True)


def shard(whole: torch.nn.Module, layers: Any, mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
    """Shard each layer by itself and the rest as one; passes compute in `dtype`. Return these units."""
    alone = mesh.size() == 1  # then gathered weights are a cast and not a transfer: once a pass is enough
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units: list[Any] = [*layers, whole]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone)
    if not alone:  # losses are normalised by the totals of all ranks, so that gradients are summed and not averaged
        for unit in units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
    return units


def full(value: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a sharded tensor, without a copy."""
    return value.to_local() if isinstance(value, DTensor) else value
