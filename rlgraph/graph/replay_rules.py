"""The rule of graphs whose engines tell which experts they chose, `Generator(routes=True)`."""

from typing import TYPE_CHECKING

from rlgraph.errors import GraphError

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph


def routes_have_a_reader(graph: "Graph") -> None:
    """Refuse routes that nobody reads: they are the largest columns of a rollout."""
    read = {node.source_of("routes") for node in graph.nodes if "routes" in node.reads}
    for node in graph.nodes:
        if node.traits.work == "generate" and "routes" in node.writes and node not in read:
            raise GraphError(
                f"graph '{graph.name}': node '{node.name}' samples with routes=True, and nothing reads the routes; train a policy with "
                "router_replay=True on it, or leave out routes"
            )
