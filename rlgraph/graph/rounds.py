"""In which round of a pool's turns a node fires: an update on the rollout's own pool comes one or more rounds later.

    depth=0    rollout 0, update 0, rollout 1, update 1, ...
    depth=1    rollout 0, rollout 1, update 0, rollout 2, update 1, ...

In the second order a reward on the host works on batch k while rollout k + 1 decodes. Node n fires for step r - lag(n) in round r.
Batches, weights and turns only ever wait for an earlier round, or for what comes before in the same one: so no such order locks up.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import networkx as nx

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph, Node


def lags(graph: "Graph") -> "Mapping[Node, int]":
    """The rounds by which each node fires later than the rollout of its step; 0 for all where no update can give way.

    An update gives way where it has the devices of its rollout, is stale anyway, and waits for work that is done elsewhere. One
    round hides that work. Each depth above 2 adds another round, for several such nodes behind one another; a depth of 2 lets
    the weights travel during a rollout, since the version it needs is a round older.
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
    """Yield what shares the rollout's pool and waits for work done elsewhere, where the update that it feeds is among that."""
    elsewhere = [node for node in nx.descendants(graph.forward, rollout) if node.pool is not rollout.pool]
    behind = {node for other in elsewhere for node in nx.descendants(graph.forward, other) if node.pool is rollout.pool}
    if rollout.feedback is not None and rollout.feedback.source is not None and rollout.feedback.source.node in behind:
        yield from behind


def _must_be_late(graph: "Graph", node: "Node", late: "set[Node]", most: int) -> bool:
    """Whether a node reads from a late one, fires in the worker of one, works on the same parts, or needs its weights too soon."""
    feedback = node.feedback
    soon = feedback is not None and (graph.evaluates_apart(node) or feedback.depth < most)
    return (
        any(output.node in late for output in node.inputs)
        or any(node.model is not None and node.model is other.model for other in late)
        or any(node.follows is not None and node.follows is other.follows for other in late)
        or (soon and feedback is not None and feedback.source is not None and feedback.source.node in late)
    )
