"""A graph: its nodes, found from its outputs and checked. Copies with other models, and warnings, e.g. of unused nodes."""

from collections.abc import Mapping
from copy import copy
from dataclasses import is_dataclass
from typing import Any, ClassVar

from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Feedback, Model, Node, Operation, Output, UncheckedGraph, describe
from rlgraph.graph.rules import GRAPH_RULES
from rlgraph.settings import Name, check_arguments


class Graph(UncheckedGraph):
    """All nodes that its outputs depend on, also through feedback edges. The constructor checks it; it never changes.

        >>> import rlgraph as rg
        >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=1)
        >>> rollout = rg.Generator("tiny", pool=rg.Pool("gpu")).rollout(prompts)
        >>> [node.name for node in Graph("sampling", rollout).nodes]
        ['prompts', 'rollout']

    Raises GraphError with the place, what was found, the rule and the fix.
    """

    HOW: ClassVar[str] = "pass a graph, e.g. rg.Graph('name', step.metrics)"

    @check_arguments(what="graph")
    def __init__(self, name: Name, *outputs: Output) -> None:
        if not outputs:
            raise GraphError(f"graph '{name}' has no outputs; pass the outputs it should have, e.g. Graph('{name}', step.metrics)")
        for output in outputs:
            if not isinstance(output, Output):
                given = describe(output)
                raise GraphError(f"graph '{name}' was given {given} as an output; pass the output of a node, e.g. step.metrics")
        super().__init__(name, *outputs)
        for rule in GRAPH_RULES:
            rule(self)


# The nodes that a graph leaves out.


def unreached_nodes(graph: Graph) -> tuple[Node, ...]:
    """Find the nodes that read outputs or edges of a graph while none of its outputs depends on them."""
    inside = set(graph.nodes)
    found: dict[Node, None] = {}
    open_nodes = [reader for node in graph.nodes for reader in node.readers]
    open_nodes += [reader for edge in (*graph.feedbacks, *graph.earlier) for reader in edge.readers]
    while open_nodes:
        node = open_nodes.pop()
        if node not in inside and node not in found:
            found[node] = None
            open_nodes += node.readers
    return tuple(sorted(found, key=lambda node: node.serial))


def unreached_warnings(graph: Graph) -> tuple[str, ...]:
    """Name the nodes that a graph leaves out."""
    names = [node.name for node in unreached_nodes(graph)]
    return (f"no output of the graph depends on {names}, which never run: pass rg.Graph their outputs, or leave them out",) if names else ()


# Copies of a graph with other models, e.g. with local folders for models that are named by a hub id.


def with_models(graph: Graph, models: Mapping[Model, Model]) -> Graph:
    """Copy a graph with some models replaced, in its operations too. The graph itself does not change.

    >>> from dataclasses import replace
    >>> import rlgraph as rg
    >>> generator = rg.Generator("tiny", pool=rg.Pool("gpu"))
    >>> graph = Graph("sampling", generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1)))
    >>> other = with_models(graph, {generator: replace(generator, path="other")}).node("rollout")
    >>> other.model.path, other.operation.generator is other.model, graph.node("rollout").model.path
    ('other', True, 'tiny')
    """
    if not models:
        return graph
    nodes = (*graph.nodes, *unreached_nodes(graph))
    edges = {edge: None for node in nodes for edge in (node.feedback, node.earlier, *node.closes) if edge is not None}
    parts = (*nodes, *edges)  # they refer to each other in cycles, so all copies exist before their fields are set
    copies: dict[int, Any] = {id(model): other for model, other in models.items()} | {id(part): copy(part) for part in parts}
    for part in parts:
        vars(copies[id(part)]).update({name: _with_copies(value, copies) for name, value in vars(part).items()})
    return Graph(graph.name, *(_with_copies(output, copies) for output in graph.outputs))


def _with_copies(value: Any, copies: dict[int, Any]) -> Any:
    """Replace originals by their copies in tuples, lists, mappings, operations and the like; a value without any stays the same object."""
    if id(value) in copies:
        return copies[id(value)]
    found = value
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        items = [_with_copies(item, copies) for item in value] if any(isinstance(item, COPIED) for item in value) else value
        found = type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    elif isinstance(value, dict) and any(isinstance(item, COPIED) for item in value.values()):
        found = {name: _with_copies(item, copies) for name, item in value.items()}
    elif isinstance(value, Operation | Model | Output) or (is_dataclass(value) and not isinstance(value, type)):
        copies[id(value)] = value  # while its fields are searched: a reference back to it ends the search
        fields = {name: _with_copies(item, copies) for name, item in (vars(value) if hasattr(value, "__dict__") else {}).items()}
        if any(item is not vars(value)[name] for name, item in fields.items()):
            found = copy(value)
            vars(found).update(fields)
    if found is not value:
        copies[id(value)] = found
    return found


COPIED = (Operation, Model, Node, Output, Feedback)  # a container is searched only if it holds one of these; rows of data are not searched


# Find graphs that keep the rules but have no learning signal. The compiler warns of them and still makes the plan.


def no_signal_warnings(graph: Graph) -> tuple[str, ...]:
    """Warn of advantages that compare responses which cannot differ: groups of one, or greedy responses.

    A group of one has its reward, or 0, as its advantage; all responses of a greedy rollout to one prompt are the same.
    """
    found = []
    for node in graph.nodes:
        name, rollout = node.traits.compares, _rollout(node)
        if not name or rollout is None:
            continue
        sampling = rollout.traits.sampling
        if rollout.traits.group_size == 1:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples one per prompt "
                "(group_size=1), which leaves no baseline; sample several, or use an estimator without groups"
            )
        elif sampling is not None and sampling.temperature == 0:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples at temperature=0, so that "
                "all responses of a group are the same and every advantage is 0; use a temperature above 0"
            )
    return tuple(found)


def _rollout(node: Node) -> Node | None:
    """The rollout whose groups a node compares, if there is one."""
    return node.source_of("group_ids") if "group_ids" in node.reads else None
