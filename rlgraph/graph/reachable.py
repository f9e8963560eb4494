"""The nodes of a graph, found from its outputs, and those that it leaves out."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph, Model, Node, Output
    from rlgraph.graph.operation import Operation


def reachable(outputs: "Iterable[Output]") -> "tuple[Node, ...]":
    """Find every node that the outputs depend on, producers first, otherwise in order of declaration."""
    found: set[Node] = set()
    open_nodes = [output.node for output in outputs]
    while open_nodes:
        node = open_nodes.pop()
        if node in found:
            continue
        found.add(node)
        open_nodes += [output.node for output in node.inputs]
        open_nodes += [edge.source.node for edge in (node.feedback, node.earlier) if edge is not None and edge.source is not None]
    return tuple(sorted(found, key=lambda node: node.serial))


def unreached(graph: "Graph") -> "tuple[Node, ...]":
    """Find the nodes that were declared with outputs or edges of a graph, and that none of its outputs depends on."""
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


def unreached_warnings(graph: "Graph") -> tuple[str, ...]:
    """Name the nodes that a graph leaves out."""
    names = [node.name for node in unreached(graph)]
    return (f"no output of the graph depends on {names}, which never run: give rg.Graph their outputs, or leave them out",) if names else ()


def followed(operation: "Operation", inputs: "Iterable[Output]", model: "Model | None") -> "Node | None":
    """Find the rollout whose chunks a new node works on."""
    sources = [output.node for output in inputs]
    streams = {source.stream for source in sources if source.stream is not None}
    if len(streams) != 1 or not operation.traits.by_group:
        return None
    stream = streams.pop()
    late = any(source.stream is None and source.needs(stream) for source in sources)
    return None if late or (model is not None and model.pool is stream.pool) else stream
