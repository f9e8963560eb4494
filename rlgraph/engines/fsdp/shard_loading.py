"""Load a sharded model: each rank reads its own boxes of the weights, and never holds more than these and a piece of a file."""

import torch
from torch.distributed.tensor import DTensor

from rlgraph.engines.forward.head import Head
from rlgraph.engines.fsdp.sharding import local, placed
from rlgraph.engines.fsdp.whole import remembered
from rlgraph.engines.lora.modules import LoraLinear
from rlgraph.engines.lora.shared_base import SharedBase


def load_shards(head: Head, device: torch.device, shared_base: SharedBase | None = None) -> None:
    """Make the parameters of a sharded head, which are on the meta device, in memory of `device`, and fill them from its folder.

    Frozen ones are those of a `shared_base`, where the folder has them as they are.
    """
    with torch.no_grad(), remembered(head):
        made = {} if shared_base is None else _shared(head, shared_base)  # tied parameters stay one
        for place, module in head.named_modules():
            own = dict(module.named_parameters(recurse=False))
            for name, parameter in own.items():
                if parameter not in made:
                    made[parameter] = _read(head, f"{place}.{name}", parameter, device)
                module.register_parameter(name, made[parameter])
            for name, buffer in module.named_buffers(recurse=False):
                real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                head.fill(f"{place}.{name}", (0,) * buffer.dim(), real)
                module.register_buffer(name, real, persistent=name not in module._non_persistent_buffers_set)
            if isinstance(module, LoraLinear) and module.settle():
                del made[own["weight"]]  # else the matrices of all layers would be in memory until the last is read
        head.folder = None
        head.to(device)  # lets FSDP2 find the new tensors, as after any change of them


def _shared(head: Head, base: SharedBase) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Find for each whole and frozen parameter the one that other models hold as well."""
    names: dict[str, tuple[str, torch.nn.Parameter]] = {}  # by the name in the folder
    for name, parameter in head.named_parameters():
        source = head.source(name)
        if source is not None and not parameter.requires_grad and not isinstance(parameter, DTensor):
            names[source] = name, parameter
    wanted = {source: (tuple(parameter.shape), parameter.dtype) for source, (_, parameter) in names.items()}
    found = base.take(wanted, lambda source, out: _fill(head, names[source][0], out))
    return {parameter: torch.nn.Parameter(found[source], requires_grad=False) for source, (_, parameter) in names.items()}


def _fill(head: Head, name: str, out: torch.Tensor) -> None:
    head.fill(name, (0,) * out.dim(), out)


def _read(head: Head, name: str, parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    out = torch.empty_like(local(parameter.detach()), device=device)
    head.fill(name, placed(parameter)[0], out)
    if isinstance(parameter, DTensor):
        return torch.nn.Parameter(DTensor(out, parameter._spec, requires_grad=False), parameter.requires_grad)
    return torch.nn.Parameter(out, parameter.requires_grad)
