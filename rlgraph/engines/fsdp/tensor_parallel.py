"""Tensor parallel: ranks share the matrices of each layer, by the model's own plan, and between matrices each has some of the tokens.

A plan of transformers says which projections are cut by columns and which by rows. Around them each rank has the hidden states of its
tokens alone, so norms and residuals are cut as well (sequence parallel: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): a
block gathers the tokens, and its last matrix sums over the ranks and gives each its tokens back. Embedding and head are cut by words.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import embedding, linear

from rlgraph.engines.forward import collectives, traced_collectives
from rlgraph.engines.forward.head import Head
from rlgraph.engines.forward.policy_head import PolicyHead
from rlgraph.engines.forward.vocabulary import VocabularyShard
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.fsdp.whole import cut
from rlgraph.engines.hf_models.parallel_plan import COLUMNS, ROWS, plan_of

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
    _cut(head, mesh, styles, (words, _output(head)))
    places, layers = list[tuple[torch.nn.Module, str]](), set(backbone.modules())  # a head computes with its part by itself
    for name, module in head.named_modules():
        alike = _replace(module, styles.get(name), words, sharers)
        places += [(module, of) for of in alike if module in layers]
    for block in {name.rpartition(".")[0] for name, style in styles.items() if style == COLUMNS}:
        head.get_submodule(block).register_forward_pre_hook(_gathering(sharers), with_kwargs=True)
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
        self.group, self.name = group, traced_collectives.known(group)

    def gathered_rows(self, part: torch.Tensor) -> torch.Tensor:
        """Gather the rows `[1, l, H]` of all ranks, and sum the gradients that each has of them."""
        if torch.compiler.is_compiling():
            return traced_collectives.gathered_rows(part, self.name)
        return collectives.gathered_rows(part, self.group)

    def scattered_sum(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows."""
        if torch.compiler.is_compiling():
            return traced_collectives.scattered_sum(part, self.name)
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


def _cut(head: Head, mesh: DeviceMesh, styles: dict[str, str], by_words: tuple[Any, ...]) -> None:
    """Put this rank's part in place of each parameter; tied ones stay one."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for place, module in head.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                style = styles.get(place)
                dim = 0 if style == COLUMNS or module in by_words else 1 if style == ROWS and name == "weight" else None
                made[parameter] = cut(parameter, mesh, dim)
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
        own, here = words.own(tokens)
        padding = None if module.padding_idx is None else module.padding_idx - words.first
        found = embedding(own, module.weight, padding if padding is not None and 0 <= padding < words.size else None)
        return collectives.scattered_sum(found * here[..., None], group)

    return run


def _gathering(sharers: _Sharers) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """A hook that gives a block the hidden states of all tokens: its first argument, or the one of that name."""

    def gather(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (sharers.gathered_rows(given[0]), *given[1:]), named
        return given, {**named, "hidden_states": sharers.gathered_rows(named["hidden_states"])}

    return gather
