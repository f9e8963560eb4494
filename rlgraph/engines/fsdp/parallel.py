"""Ranks that share each layer: tensor and expert parallel, by the plans of transformers that are known here.

In a compiled layer they send each other rows by operations of torch, which a compiler passes on as they are. A compiler sees only shapes,
and knows a group by its name. Each of the two operations is the backward pass of the other.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import embedding, linear

from rlgraph.engines.forward import collectives
from rlgraph.engines.forward.collectives import VocabularyShard, exchange_parts, own_part, ranks_in, sent_rows
from rlgraph.engines.forward.experts import experts_of, inverse, multiply_grouped, spread, takes
from rlgraph.engines.forward.head import Head, PolicyHead
from rlgraph.engines.fsdp.sharding import cut_parameter, local
from rlgraph.engines.hf.model_files import FamilyOptions, text_config
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import GraphError, show_value
from rlgraph.plan.estimates import find_undivided_size, ring_ranks

# What ranks that share matrices send each other in a layer that is compiled: operations of torch, which a compiler passes on as they are.

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
def trace_row_gather(part: torch.Tensor, group: str) -> torch.Tensor:
    """Gather the rows `[1, l, H]` of all ranks as `[1, L, H]`, and sum the gradients that each rank has of them."""
    return collectives.all_rows(part, _groups[group])


@trace_row_gather.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty((1, _ranks(group) * part.shape[1], *part.shape[2:]))


@torch.library.custom_op("rlgraph::scattered_sum", mutates_args=())
def trace_sum_scatter(part: torch.Tensor, group: str) -> torch.Tensor:
    """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows `[1, l, H]`."""
    return collectives.sum_of_rows(part, _groups[group])


@trace_sum_scatter.register_fake
def _(part: torch.Tensor, group: str) -> torch.Tensor:
    return part.new_empty((1, part.shape[1] // _ranks(group), *part.shape[2:]))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, str], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _backward_gather(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return trace_sum_scatter(grad, ctx.group), None


def _backward_scatter(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return trace_row_gather(grad, ctx.group), None


trace_row_gather.register_autograd(_backward_gather, setup_context=_keep)
trace_sum_scatter.register_autograd(_backward_scatter, setup_context=_keep)


# How the ranks of a model may share it: the plans of transformers that are known here, and the numbers that the ranks divide.

COLUMNS, ROWS = "colwise", "rowwise"
KNOWN = {COLUMNS, ROWS, "replicated_with_grad_allreduce", "embedding_rowwise"}
EXPERT_FAMILIES = ("mixtral", "olmoe", "qwen3_moe")  # by tests/engines/test_sharing_experts.py
FAMILIES = ("llama", "qwen2", "qwen3")  # by tests/engines/test_sharing_ranks.py


def plan_of(config: Any) -> dict[str, str]:
    """Look up which projections of a model are cut by columns and which by rows, as patterns of their names."""
    plan: dict[str, str] = config.base_model_tp_plan or {}
    return plan


def check_folder_parallel(where: str, path: str | Path, *, tensor: int = 1, context: int = 1) -> None:
    """Check that ranks can share the model of a folder. Raises as `check_parallel` does."""
    check_model(path)
    check_parallel(where, text_config(path), tensor=tensor, context=context)


def check_parallel(where: str, config: Any, *, tensor: int = 1, context: int = 1, ring: int | None = None) -> None:
    """Check that ranks can share a model of this configuration, `ring` of which pass keys round; None: as many as heads leave.

    Raises GraphError for a family that is not known here, heads or a vocabulary that the ranks do not divide, or windows in a ring.
    """
    given = f"{where}({', '.join(f'{name}={size}' for name, size in _list_styles(tensor, context))})"
    kind = config.model_type
    if kind not in FAMILIES:
        raise GraphError(f"{given}: models of type {show_value(kind)} cannot be split over ranks; supported are {', '.join(FAMILIES)}")
    unknown = sorted(set(plan_of(config).values()) - KNOWN) if tensor > 1 else []
    if unknown or not plan_of(config):
        raise GraphError(
            f"{given}: transformers' plan for {show_value(kind)} asks for {unknown or 'nothing'}, which rlgraph does not support"
        )
    sizes = config.num_attention_heads, config.num_key_value_heads, config.vocab_size, config.intermediate_size
    ring = ring_ranks(config.num_attention_heads, tensor=tensor, context=context) if ring is None else ring
    if context % ring:
        raise GraphError(
            f"{given}: a ring of {ring} does not divide context_parallel={context}; every place needs the same number of ranks"
        )
    found = find_undivided_size(*sizes, tensor=tensor, context=context // ring)
    if found is not None:
        name, size, settings = found
        raise GraphError(
            f"{given}: the model has {name}={size}, which {settings} does not divide; every rank has as many: choose a divisor of {size}"
        )
    if ring > 1 and "sliding_attention" in FamilyOptions(config).layer_types:
        heads = config.num_attention_heads
        raise GraphError(
            f"{given}: num_attention_heads={heads} is not divisible by the ranks, so they would use ring attention, which does not support "
            f"this model's sliding windows; choose a tensor × context that divides {heads}"
        )


def check_folder_experts(where: str, path: str | Path, expert: int) -> None:
    """Check that ranks can share the experts of the model of a folder. Raises as `check_experts` does."""
    check_model(path)
    check_experts(where, text_config(path), expert)


def check_experts(where: str, config: Any, expert: int) -> None:
    """Check that `expert` ranks can share the experts of a model of this configuration.

    Raises GraphError for a model without experts, a family that is not known here, and experts that the ranks do not divide.
    """
    given, kind = f"{where}(expert_parallel={expert})", config.model_type
    options = FamilyOptions(config)
    name = "num_experts" if options.num_experts else "num_local_experts" if options.num_local_experts else None
    if name is None:
        raise GraphError(f"{given}: the model has no experts; leave out expert_parallel")
    if kind not in EXPERT_FAMILIES:
        raise GraphError(
            f"{given}: experts of models of type {show_value(kind)} cannot be split over ranks; supported are {', '.join(EXPERT_FAMILIES)}"
        )
    size = getattr(config, name)
    if size % expert:
        raise GraphError(
            f"{given}: the model has {name}={size}, which expert_parallel={expert} does not divide; every rank has as many: choose a "
            f"divisor of {size}"
        )


def _list_styles(tensor: int, context: int) -> list[tuple[str, int]]:
    return [(name, size) for name, size in (("tensor_parallel", tensor), ("context_parallel", context)) if size > 1]


# Tensor parallel: ranks share the matrices of each layer, by the model's own plan, and between matrices each has some of the tokens.
#
# A plan of transformers says which projections are cut by columns and which by rows. Around them each rank has the hidden states of its
# tokens alone, so norms and residuals are cut as well (sequence parallel: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): a
# block gathers the tokens, and its last matrix sums over the ranks and gives each its tokens back. Embedding and head are cut by words.

Run = Callable[..., Any]
Places: TypeAlias = Sequence[tuple[torch.nn.Module, str]]  # of parameters, which FSDP replaces: the module, and the name in it


def share_matrices(head: Head, mesh: DeviceMesh) -> Places:
    """Cut the parameters of a head over the ranks "tp" of a mesh, and let its modules compute with the parts; call it before FSDP.

    Passes are packed flat, in rows of a length that the ranks divide. Returns the places of parameters that all ranks hold alike and whose
    gradients are of a rank's own tokens: `sum_gradients` adds them up before a step, since a sum for each norm in each pass would take the
    host longer than the rest of the pass.
    """
    backbone, ranks = head.backbone, mesh["tp"]
    group = ranks.get_group()
    sharers = _Sharers(group)
    styles = {f"model.{name}" if name else "model": style for name, style in _styles(head).items()}
    words = backbone.get_input_embeddings()
    _shard_parameters(head, mesh, styles, (words, _output(head)))
    places, layers = list[tuple[torch.nn.Module, str]](), set(backbone.modules())  # a head computes with its part by itself
    for name, module in head.named_modules():
        alike = _replace(module, styles.get(name), words, sharers)
        places += [(module, of) for of in alike if module in layers]
    for block in {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}:
        head.get_submodule(block).register_forward_pre_hook(_gather_hook(sharers), with_kwargs=True)
    by_words = isinstance(head, PolicyHead)  # else each rank has all of the head, and the same gradient of the states
    backbone.norm.register_forward_hook(lambda module, given, found: collectives.gathered_rows(found, group, summed=by_words))
    if isinstance(head, PolicyHead):
        head.words = VocabularyShard.of(group, ranks.get_local_rank(), ranks.size(), words.num_embeddings)
    return places


class _Sharers:
    """The ranks that share matrices, and what they send each other: by operations that a compiler can trace in a layer that is compiled.

    In other passes these would take the host longer than what they are made of.
    """

    def __init__(self, group: Any) -> None:
        self.group, self.name = group, register_group(group)

    def gathered_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the rows `[1, l, H]` of all ranks, and sum the gradients that each has of them."""
        if torch.compiler.is_compiling():
            return trace_row_gather(part, self.name)
        return collectives.gathered_rows(part, self.group)

    def scattered_sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows."""
        if torch.compiler.is_compiling():
            return trace_sum_scatter(part, self.name)
        return collectives.scattered_sum(part, self.group)


@torch.no_grad()
def sum_gradients(places: Places, mesh: DeviceMesh) -> None:
    """Sum the gradients at these places over the ranks that share matrices, in one call."""
    found = [local(gradient) for module, name in places if (gradient := module.get_parameter(name).grad) is not None]
    if found:
        whole = torch.cat([gradient.flatten() for gradient in found])
        dist.all_reduce(whole, group=mesh["tp"].get_group())
        for gradient, part in zip(found, whole.split([gradient.numel() for gradient in found]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _output(head: Head) -> Any:
    return head.model.get_output_embeddings() if isinstance(head, PolicyHead) else None


def _styles(head: Head) -> dict[str, str]:
    """Find the style of each projection, by its name below `head.model`."""
    plan = plan_of(head.backbone.config.get_text_config())
    inside = next(name for name, module in head.model.named_modules() if module is head.backbone)
    names = [name for name, _ in head.backbone.named_modules()]
    found = {name: style for pattern, style in plan.items() for name in names if fnmatchcase(name, pattern)}
    return {f"{inside}.{name}" if inside else name: style for name, style in found.items()}


def _shard_parameters(head: Head, mesh: DeviceMesh, styles: dict[str, str], by_words: tuple[Any, ...]) -> None:
    """Put this rank's part in place of each parameter; tied ones stay one."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for place, module in head.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                style = styles.get(place)
                dim = 0 if style == COLUMNS or module in by_words else 1 if style == ROWS and name == "weight" else None
                made[parameter] = cut_parameter(parameter, mesh, dim)
            module.register_parameter(name, made[parameter])


def _replace(module: torch.nn.Module, style: str | None, words: Any, sharers: _Sharers) -> list[str]:
    """Let a module combine what the ranks compute with their parts of it; name the parameters that it shares with all ranks.

    A module that is cut by columns, or not at all, computes as it does with whole parameters.
    """
    own = [name for name, one in module.named_parameters(recurse=False)]
    if module is words:
        module.forward = _embedding(module, sharers.group)
        return []
    if style == ROWS:
        module.forward = _by_rows(module, sharers)
        return [name for name in own if name == "bias"]
    return [] if style == COLUMNS else own


def _by_rows(module: Any, sharers: _Sharers) -> Run:
    """Multiply by this rank's columns of a weight, sum over the ranks, and keep this rank's tokens."""

    def run(states: torch.Tensor) -> torch.Tensor:
        found = sharers.scattered_sum(linear(states, module.weight))
        return found if module.bias is None else found + module.bias

    return run


def _embedding(module: Any, group: Any) -> Run:
    """Look up the words of this rank, sum over the ranks, and keep this rank's tokens."""
    words = VocabularyShard.of(group, dist.get_rank(group), dist.get_world_size(group), module.num_embeddings)

    def run(tokens: torch.Tensor) -> torch.Tensor:
        own, here = words.local_ids(tokens)
        padding = None if module.padding_idx is None else module.padding_idx - words.first
        found = embedding(own, module.weight, padding if padding is not None and 0 <= padding < words.size else None)
        return collectives.scattered_sum(found * here[..., None], group)

    return run


def _gather_hook(sharers: _Sharers) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A hook that gives a block the hidden states of all tokens: its first argument, or the one of that name."""

    def gather(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (sharers.gathered_rows(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": sharers.gathered_rows(named["hidden_states"])}

    return gather


# Expert parallel: ranks hold whole experts of each layer and send each other the tokens of these, in both directions.
#
# A pass of a rank has tokens of its own. In a layer of experts it sends each token to the ranks of its experts, which compute with the
# model's own module and send the results back; the rank weighs and sums them (Lepikhin et al. 2020, arXiv:2006.16668). An expert's
# gradient so is the sum over the tokens of all ranks that sent it any; FSDP adds those of the ranks that hold the same experts.


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
    module.forward = _dispatch_tokens(module, module.forward, mesh.get_group())


def _shard(module: Any, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard this rank's experts: whole ones if the ranks divide their number, else rows of each."""
    ranks = mesh.size()
    dim = 0 if module.num_experts % ranks == 0 else 1
    for name, parameter in module.named_parameters(recurse=False):
        size = parameter.shape[dim]
        if dim and size % ranks:
            raise GraphError(
                f"FsdpEngine(expert_parallel=…): {ranks} ranks hold the same {module.num_experts} experts, and can split neither these "
                f"nor the {size} rows of '{name}' evenly; choose an expert_parallel with fewer ranks for the same experts"
            )
    # Inputs stay as they are: a router's weights may be float32.
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # Also a rank alone with its experts lets go of their cast after a layer: of 30B with expert_parallel=2 it has 29 GB.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True, shard_placement_fn=lambda parameter: Shard(dim))
    if ranks > 1:  # as in `sharding.shard`: gradients are summed
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _dispatch_tokens(module: Any, forward: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    """Compute the experts of tokens where they are; takes and gives what transformers' modules of experts do."""

    def run(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        chosen, each = top_k_index.shape[-1], module.num_experts
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        back = inverse(order)
        every = torch.arange(each * ranks_in(group) + 1, device=experts.device)
        counts = torch.searchsorted(experts, every).diff().view(-1, each)  # [ranks, experts of one]; the host waits for it once, below
        taken = exchange_parts(counts, group)
        sent, received = torch.stack([counts.sum(1), taken.sum(1)]).tolist()
        numbers = every[:each].repeat(len(received)).repeat_interleave(taken.flatten(), output_size=sum(received))
        rows = sent_rows(spread(hidden_states, order, back, chosen), sent, received, group)
        results = sent_rows(_compute_experts(module, forward, rows, numbers), received, sent, group)
        found = spread(results, back, order) * top_k_weights.reshape(-1, 1)
        return found.view(-1, chosen, found.shape[-1]).sum(1).to(hidden_states.dtype)  # as transformers': in a fixed order

    return run


def _compute_experts(module: Any, forward: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Compute rows `[n, H]`, each by one of this rank's experts `[n]`: grouped, or by the module's own forward."""
    count = len(rows)
    if not count:  # no token chose an expert of this rank, and kernels need not take none: its weights get a gradient all the same, 0
        rows, experts = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), experts.new_zeros(1)
    kept = dict(module._parameters)
    module._parameters.update({name: own_part(one) for name, one in kept.items() if one is not None})
    try:
        found = multiply_grouped(module, rows, experts) if takes(module) else forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
        return found[:count]
    finally:
        module._parameters.update(kept)
