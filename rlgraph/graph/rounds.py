"""The round of its pool in which a node fires: an update on the rollout's own pool comes one or more rounds later.

    depth=0    rollout 0, update 0, rollout 1, update 1, ...
    depth=1    rollout 0, rollout 1, update 0, rollout 2, update 1, ...

In the second order a reward on the host works on batch k while rollout k + 1 decodes. Node n fires for step r - lag(n) in round r.
Every event waits for an earlier round, or for an earlier event of its own round, so no such order deadlocks.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph, Node


def lags(graph: "Graph") -> "Mapping[Node, int]":
    """Count the rounds by which each node fires later than the rollout of its step; 0 for all if no update can give way.

    An update gives way if it has the devices of its rollout, a depth above 0, and waits for work on other devices. One round
    hides that work. At depth 2 the weights can also move during a rollout, which needs a version one round older. Each depth
    above 2 adds another round, for several such nodes one behind another.
    """
    late: set[Node] = set()
    driven = [node for node in graph.nodes if node.feedback is not None and node.feedback.depth > 0 and node.due is None]
    for rollout in driven:
        late.update(_after_work_elsewhere(graph, rollout))
    most = max(1, min((node.feedback.depth for node in driven if node.feedback is not None), default=1) - 1)
    size = -1
    while late and size != len(late):
        size = len(late)
        late.update(node for node in graph.nodes if _must_be_late(graph, node, late, most))
    return {node: most if node in late and late.isdisjoint(driven) else 0 for node in graph.nodes}


def _after_work_elsewhere(graph: "Graph", rollout: "Node") -> "Iterator[Node]":
    """Yield the nodes of the rollout's pool that wait for work on other devices, if the update that publishes its weights is among them."""
    elsewhere = [node for node in nx.descendants(graph.forward, rollout) if node.pool is not rollout.pool]
    behind = {node for other in elsewhere for node in nx.descendants(graph.forward, other) if node.pool is rollout.pool}
    if rollout.feedback is not None and rollout.feedback.source is not None and rollout.feedback.source.node in behind:
        yield from behind


def _must_be_late(graph: "Graph", node: "Node", late: "set[Node]", most: int) -> bool:
    """Tell whether a node reads from a late one, fires in its worker, works on the same chunks, or needs its weights too soon."""
    feedback = node.feedback
    soon = feedback is not None and (graph.evaluates_apart(node) or feedback.depth < most)
    return (
        any(output.node in late for output in node.inputs)
        or any(node.model is not None and node.model is other.model for other in late)
        or any(node.follows is not None and node.follows is other.follows for other in late)
        or (soon and feedback is not None and feedback.source is not None and feedback.source.node in late)
    )
