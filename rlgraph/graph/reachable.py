"""The nodes of a graph, found from its outputs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Node, Output


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
