"""The whole parameters that ranks cut among them: a pass computes with plain tensors, and at rest a tensor is a box of its whole.

Tensor parallel parameters that are DTensors in a pass cost the host a dispatch in Python for each parameter, layer and direction. So a
rank's part is a plain parameter, which FSDP2 shards as it would on a rank alone, and the parameter carries what it is a part of. Boxes,
checkpoints, gathered matrices and the norm of gradients ask for it here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Numbers: TypeAlias = tuple[int, ...]
NAME = "rlgraph_whole"  # of the attribute of a parameter


@torch.no_grad()
def cut(parameter: torch.nn.Parameter, mesh: DeviceMesh, dim: int | None) -> torch.nn.Parameter:
    """Take this rank's part of a parameter that the ranks of "tp" cut along `dim`, and those of "fsdp" will shard by rows.

    All ranks of "tp" hold it alike where `dim` is None. Nothing is sent.
    """
    ranks, rank = mesh["tp"].size(), mesh["tp"].get_local_rank()
    # A copy: a view would keep the whole in memory.
    own = parameter.detach() if dim is None else parameter.detach().chunk(ranks, dim)[rank].clone(memory_format=torch.contiguous_format)
    of_tp: Placement = Replicate() if dim is None else Shard(dim)
    of_fsdp: Placement = _StridedShard(0, split_factor=ranks) if dim == 0 else Shard(0)  # rows of this rank's rows
    meta = TensorMeta(parameter.shape, parameter.stride(), parameter.dtype)
    part = torch.nn.Parameter(own, parameter.requires_grad)
    setattr(part, NAME, DTensorSpec(mesh, (of_fsdp, of_tp), tensor_meta=meta))
    return part


def spec_of(value: torch.Tensor) -> DTensorSpec | None:
    """What a tensor is a shard of; None for a tensor that is whole."""
    cut_by: DTensorSpec | None = getattr(value, NAME, None)
    return cut_by or (value._spec if isinstance(value, DTensor) else None)


def is_part(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a part that `cut` made."""
    return hasattr(parameter, NAME)


def whole_shape(parameter: torch.Tensor) -> Numbers:
    """The shape of the whole that a parameter is a shard of."""
    spec = spec_of(parameter)
    return tuple(parameter.shape if spec is None else spec.shape)


def as_whole(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """View a tensor that is sharded as a parameter, such as a moment, as a DTensor of the whole; without `cut` it is one already."""
    if not is_part(parameter):
        return value
    own = value._local_tensor if isinstance(value, DTensor) else value
    return DTensor(own.detach(), getattr(parameter, NAME), requires_grad=False)


@contextmanager
def remembered(model: torch.nn.Module) -> Iterator[None]:
    """Let the parameters that something puts in place of a model's parts know what they are parts of."""
    places = [
        (module, name, getattr(parameter, NAME))
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if is_part(parameter)
    ]
    yield
    for module, name, spec in places:
        setattr(module.get_parameter(name), NAME, spec)
