"""Expert parallel: ranks hold whole experts of each layer and send each other the tokens of these, in both directions.

A pass of a rank has tokens of its own. In a layer of experts it sends each token to the ranks of its experts, which compute with the
model's own module and send the results back; the rank weighs and sums them (Lepikhin et al. 2020, arXiv:2006.16668). An expert's
gradient so is the sum over the tokens of all ranks that sent it any; FSDP adds those of the ranks that hold the same experts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from rlgraph.engines.forward.collectives import exchanged, own_part, ranks_in, sent_rows
from rlgraph.engines.forward.grouped_experts import experts_of, grouped, inverse, spread, takes
from rlgraph.errors import GraphError


def share_experts(model: Any, mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
    """Cut the experts of a model over the ranks of "ep", and shard each part over those of "fsdp"; call it before the rest is sharded.

    Returns the modules of experts, each a unit of FSDP. Raises GraphError for sizes that the ranks do not divide.
    """
    found = experts_of(model)
    for module in found:
        _share(module, mesh["ep"])
        _shard(module, mesh["fsdp"], dtype)
    return found


def _share(module: Any, mesh: DeviceMesh) -> None:
    """Make DTensors of a module's parameters, by experts, and let the module send tokens."""
    module.num_experts //= mesh.size()  # of this rank
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)  # each takes its own: nothing is sent
        module.register_parameter(name, torch.nn.Parameter(whole, parameter.requires_grad))
    module.forward = _sending(module, module.forward, mesh.get_group())


def _shard(module: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard this rank's experts: whole ones if the ranks divide their number, else rows of each."""
    ranks = mesh.size()
    dim = 0 if module.num_experts % ranks == 0 else 1
    for name, parameter in module.named_parameters(recurse=False):
        size = parameter.shape[dim]
        if dim and size % ranks:
            raise GraphError(
                f"FsdpEngine(expert_parallel=…): {ranks} ranks hold the same {module.num_experts} experts, and share neither these nor "
                f"the {size} rows of '{name}' evenly; choose an expert_parallel with fewer ranks for the same experts"
            )
    # Inputs stay as they are: a router's weights may be float32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Also a rank alone with its experts lets go of their cast after a layer: of 30B with expert_parallel=2 it has 29 GB.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True, shard_placement_fn=lambda parameter: Shard(dim))
    if ranks > 1:  # as in `sharding.shard`: gradients are summed
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _sending(module: Any, forward: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    """Compute the experts of tokens where they are; takes and gives what transformers' modules of experts do."""

    def run(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        chosen, each = top_k_index.shape[-1], module.num_experts
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        back = inverse(order)
        every = torch.arange(each * ranks_in(group) + 1, device=experts.device)
        counts = torch.searchsorted(experts, every).diff().view(-1, each)  # [ranks, experts of one]; the host waits for it once, below
        taken = exchanged(counts, group)
        sent, received = torch.stack([counts.sum(1), taken.sum(1)]).tolist()
        numbers = every[:each].repeat(len(received)).repeat_interleave(taken.flatten(), output_size=sum(received))
        rows = sent_rows(spread(hidden_states, order, back, chosen), sent, received, group)
        results = sent_rows(_computed(module, forward, rows, numbers), received, sent, group)
        found = spread(results, back, order) * top_k_weights.reshape(-1, 1)
        return found.view(-1, chosen, found.shape[-1]).sum(1).to(hidden_states.dtype)  # as transformers': in a fixed order

    return run


def _computed(module: Any, forward: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute rows `[n, H]`, each by one of this rank's experts `[n]`: grouped, or by the module's own forward."""
    count = len(rows)
    if not count:  # no token chose an expert of this rank, and kernels need not take none: its weights get a gradient all the same, 0
        rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
    kept = dict(module._parameters)
    module._parameters.update({name: own_part(one) for name, one in kept.items() if one is not None})
    try:
        found = grouped(module, rows, experts) if takes(module) else forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
        return found[:count]
    finally:
        module._parameters.update(kept)
