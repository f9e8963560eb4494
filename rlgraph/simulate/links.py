"""What the hosts' links cost: the seconds in which a version, or a batch, crosses them, and a schedule with those seconds in it."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlgraph.channels.factory import transport_of
from rlgraph.columns import COLUMNS
from rlgraph.compiler.plan import Plan, PlannedChannel, PlannedLoop, PlannedWorker
from rlgraph.compiler.relaying import OnHosts, crossing_s
from rlgraph.compiler.routes import ends_on_hosts, least_part, shape_of
from rlgraph.compiler.schedule import Dependency, Event, Schedule
from rlgraph.costs.costs import Costs
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph
from rlgraph.simulate.site import ClusterSite


def hosts_of(workers: Sequence[PlannedWorker], node: str) -> OnHosts:
    """Count the workers of a node on each host."""
    return Counter(worker.host for worker in workers if node in worker.nodes)


def with_links(plan: Plan, graph: Graph, costs: Costs, site: ClusterSite) -> tuple[Schedule, tuple[str, ...]]:
    """Add an event for each batch and each version that crosses a link, in the shape that the plan chose: it leaves as soon as it is there,
    and readers wait for it.

    Also names the channels of unknown size, which are left out. Raises PlanError for costs without the bytes of a version that crosses.
    """
    if site.bandwidth is None:
        return plan.schedule, ()
    found = _with_versions(plan, graph, costs, site)
    seconds, unknown = {}, []
    for channel in plan.channels:
        if channel.kind == "batch" and transport_of(channel.transport).reach == "hosts":
            size = channel.bytes if channel.bytes is not None else batch_bytes(graph, channel, costs)
            if size is None:
                unknown.append(channel.name)
            else:
                seconds[channel] = _crossing_s(size, plan, channel, site)

    def carried(d: Dependency) -> tuple[str, float] | None:
        reading = next(
            (c for c in seconds if d.reason == "data" and c.writer == d.via and d.after in _firings(plan.schedule, c.readers)), None
        )
        return None if reading is None else (reading.name, seconds[reading])

    return _carrying(found, carried), tuple(unknown)


def _crossing_s(size: float, plan: Plan, end: PlannedChannel | PlannedLoop, site: ClusterSite) -> float:
    writers, readers = ends_on_hosts(plan, end)
    return crossing_s(size, site, writers, readers, shape=shape_of(plan, end), least=least_part(end), slots=end.slots)


def _with_versions(plan: Plan, graph: Graph, costs: Costs, site: ClusterSite) -> Schedule:
    """Let the versions that leave a host cross its link, instead of the seconds in which the costs receive them."""
    own = {event.name: event for event in plan.schedule.events}
    crossing: dict[Dependency, float] = {}
    for d in plan.schedule.dependencies:
        if d.reason != "loop" or own[d.before].kind != "publish" or d.via not in {feedback.name for feedback in graph.feedbacks}:
            continue
        writer, reader = own[d.before].node, own[d.after].node
        if len({*hosts_of(plan.workers, writer), *hosts_of(plan.workers, reader)}) > 1:
            if costs.publish_bytes is None:
                raise PlanError(
                    f"rehearse(site=ClusterSite(bandwidth={site.bandwidth:g})): the weights of '{writer}' go to another host, "
                    "and the costs do not say how large a version is; give rg.Costs(…, publish_bytes=…)"
                )
            loop = next(loop for loop in plan.loops if loop.writer == writer and reader in loop.readers)
            crossing[d] = _crossing_s(costs.publish_bytes, plan, loop, site)
    arrive = {d.after for d in crossing if own[d.after].kind != "wake"}  # a generator wakes for a version, and then loads it
    received = tuple(
        replace(event, seconds=max(event.seconds - costs.receive_s, 0.0)) if event.name in arrive else event
        for event in plan.schedule.events
    )
    return _carrying(replace(plan.schedule, events=received), lambda d: (d.after, crossing[d]) if d in crossing else None)


def _carrying(schedule: Schedule, carried: Callable[[Dependency], tuple[str, float] | None]) -> Schedule:
    """Put an event between the two ends of each dependency that is `carried`: by what, and for how many seconds."""
    own = {event.name: event for event in schedule.events}
    carries: dict[str, Event] = {}
    dependencies: list[Dependency] = []
    for d in schedule.dependencies:
        by = carried(d)
        if by is None:
            dependencies.append(d)
            continue
        before, name = own[d.before], f"carry {d.before} by {by[0]}"
        if name not in carries:
            carries[name] = Event(name, "receive", before.node, name, None, by[1], edge=before.edge, lag=before.lag)
            dependencies += [replace(d, after=name, credits=0), Dependency(name, name, 1, "self")]
        dependencies.append(replace(d, before=name, put=0))
    return Schedule((*schedule.events, *carries.values()), tuple(dependencies))


def _firings(schedule: Schedule, nodes: Sequence[str]) -> Iterator[str]:
    return (event.name for event in schedule.events if event.kind == "fire" and event.node in nodes)


def batch_bytes(graph: Graph, channel: PlannedChannel, costs: Costs) -> int | None:
    """Estimate the bytes of a batch by the costs' lengths, padded to the longest response; None where a size is not known."""
    if costs.lengths is None:
        return None
    sizes = {"T": costs.lengths.longest, "P": costs.lengths.prompt_tokens}
    total = 0.0
    for column in channel.columns:
        spec = COLUMNS.get(column)
        if spec is None or any(dim not in sizes for dim in spec.dims[1:]):
            return None
        cells = graph.node(channel.writer).rows / channel.chunks
        for dim in spec.dims[1:]:
            cells *= sizes[dim]
        total += cells * spec.itemsize
    return int(total)
