"""Shards of a model over the ranks of a process group: FSDP2, and the tensors that a rank holds of it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlgraph.channels.weights.shards import WeightShard
from rlgraph.engines.fsdp.whole import as_whole, remembered, spec_of, whole_shape
from rlgraph.errors import GraphError
from rlgraph.plan.memory_laws import UNIT_PARAMETERS


def join(rank: int, world: int) -> bool:
    """Make sure that a process group exists. Return whether this call made it, which it does for a world of one.

    Raises GraphError if the group has another rank or size, or if there is none for several ranks.
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
    """The backends of collectives: gloo for tensors in host memory and, on a machine with GPUs, NCCL for theirs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def shard(whole: torch.nn.Module, layers: Any, mesh: DeviceMesh, dtype: torch.dtype, embedding: Any = None) -> list[Any]:
    """Shard the layers in units, and the rest as one unit; passes compute in `dtype`. Returns the first module of each unit.

    A large `embedding` with a matrix of its own, and not the head's, is a unit too: else it would be gathered around the whole pass, and
    its gradient and the head's summed at once, which takes 12 GB of 32B.
    """
    alone = mesh.size() == 1  # then gathered weights are a cast and not a transfer: once a pass is enough
    frozen = {parameter for parameter in whole.parameters() if not parameter.requires_grad} if alone else set()  # used as they are
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units: list[list[Any]] = [*together(layers), *([[embedding]] if not alone and _apart(whole, embedding) else []), [whole]]
    with remembered(whole):
        for unit in units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=not alone, ignored_params=frozen)
    firsts = [unit[0] for unit in units]
    if not alone:  # losses are normalised by the totals of all ranks, so that gradients are summed and not averaged
        for first in firsts:
            first.set_gradient_divide_factor(1.0)
            first.set_force_sum_reduction_for_comms(True)
    return firsts


def _apart(whole: torch.nn.Module, embedding: Any) -> bool:
    if embedding is None:
        return False
    weight = embedding.weight
    uses = sum(parameter is weight for _, parameter in whole.named_parameters(remove_duplicate=False))
    return uses == 1 and weight.requires_grad and weight.numel() >= UNIT_PARAMETERS and not isinstance(weight, DTensor)


def keep(units: Iterable[Any], more: bool, *, casts: bool = True) -> None:
    """Before a pass of a rank alone: if `more` passes follow, units add up gradients where they are, and keep `casts` of weights for them.

    The sums have the same bits. Without it a pass casts all weights, and copies all gradients twice before they are added.
    """
    for unit in units:
        unit.set_requires_gradient_sync(not more, recurse=False)
        if casts:
            unit.set_reshard_after_backward(not more, recurse=False)


def together(layers: Iterable[torch.nn.Module]) -> list[list[torch.nn.Module]]:
    """Group the layers, in order: a group ends where it has `UNIT_PARAMETERS`."""
    units: list[list[torch.nn.Module]] = []
    size = UNIT_PARAMETERS
    for layer in layers:
        if size >= UNIT_PARAMETERS:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(parameter.numel() for parameter in layer.parameters())
    return units


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Group parameters by the ranks that share them: an operation of torch on several DTensors takes those of one mesh."""
    found: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(found.values())


def full(value: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Gather the whole of a sharded tensor; a `parameter` says what it is sharded as, where ranks `cut` it."""
    found = value if parameter is None else as_whole(value, parameter)
    return found.full_tensor() if isinstance(found, DTensor) else found


def placed(value: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Compute the offsets of this rank's box of a tensor, and its number among equal boxes of several ranks.

    A DTensor may be sharded along any dims of any mesh; of a part that `whole.cut` made it is the box of the whole. Raises GraphError for
    a partial tensor, whose ranks hold summands.
    """
    spec = spec_of(value)
    if spec is None:
        return (0,) * value.dim(), replica(value)
    if any(placement.is_partial() for placement in spec.placements):
        raise GraphError(f"a tensor with placements {spec.placements} is a sum over ranks and no shard: reduce it before it is published")
    _, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    return tuple(offsets), replica(value)


def replica(value: torch.Tensor) -> int:
    """Number this rank among those that hold the same box of a tensor."""
    spec, found = spec_of(value), 0
    if spec is None:
        return dist.get_rank() if dist.is_initialized() else 0
    for dim, placement in enumerate(spec.placements):
        if placement.is_replicate():
            found = found * spec.mesh.size(dim) + spec.mesh.get_local_rank(dim)
    return found


def memory(value: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's shard: the same object until the shard gets other memory."""
    return value._local_tensor if isinstance(value, DTensor) else value


def own_box(name: str, parameter: torch.Tensor) -> WeightShard:
    """This rank's box of a parameter, live."""
    offsets, number = placed(parameter)
    return WeightShard(name, whole_shape(parameter), offsets, local(parameter.detach()), number)


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor, without a copy."""
    return value.to_local() if isinstance(value, DTensor) else value
