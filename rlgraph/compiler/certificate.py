"""Derive what a schedule guarantees for any timing from its credits."""

from collections.abc import Iterable, Sequence

import networkx as nx

from rlgraph.channels.factory import transport_of
from rlgraph.compiler.events import fire_events, open_batches, publish_event, readers
from rlgraph.compiler.plan import Certificate, PlannedChannel
from rlgraph.compiler.schedule import Dependency, Schedule
from rlgraph.graph.nodes import Graph


def certify(graph: Graph, schedule: Schedule, channels: Sequence[PlannedChannel], period_s: float) -> Certificate:
    """Derive the bound on staleness, freedom from deadlock, and the most bytes of tensors that can be buffered."""
    sizes = [
        None if channel.bytes is None else channel.slots * channel.bytes
        for channel in channels
        if transport_of(channel.transport).writer_keeps
    ]
    return Certificate(
        staleness_bound=staleness_bound(graph, schedule),
        deadlock_free=deadlock_free(schedule),
        open_batches=open_batches(graph),
        buffered_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        period_s=period_s,
    )


def deadlock_free(schedule: Schedule) -> bool:
    """Check that every cycle holds a credit: then the marked graph is live (Commoner, 1971).

    The check counts in rounds. There no dependency may have fewer than 0 credits, and those with 0, which wait for an event of
    the same round, may not form a cycle.
    """
    lag = {event.name: event.lag for event in schedule.events}
    ahead = any(d.credits + lag[d.after] - lag[d.before] < 0 for d in schedule.dependencies)
    return not ahead and bool(nx.is_directed_acyclic_graph(nx.DiGraph(list(schedule.within_rounds()))))


def staleness_bound(graph: Graph, schedule: Schedule) -> int:
    """Bound the versions that a batch can be behind when it is trained: the credits on its loop, less the one in service.

    The credits on a cycle never change. So the credits on the way of a version, from its publish through rollout and update to
    the next publish, bound the open batches. The order within a pool can keep fewer batches open, but makes no version newer.
    """
    credits = _credits(d for d in schedule.dependencies if d.reason in ("loop", "data"))
    worst = 0
    for feedback in graph.feedbacks:
        publish = publish_event(feedback.name)
        for firing in (firing for node in readers(graph, feedback) if node.due is None for firing in fire_events(node)):
            there = nx.shortest_path_length(credits, publish, firing, weight="credits")
            back = nx.shortest_path_length(credits, firing, publish, weight="credits")
            worst = max(worst, there + back - 1)
    return worst


def _credits(dependencies: Iterable[Dependency]) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    for d in dependencies:
        fewest = min(d.credits, graph.edges[d.before, d.after]["credits"]) if graph.has_edge(d.before, d.after) else d.credits
        graph.add_edge(d.before, d.after, credits=fewest)
    return graph
