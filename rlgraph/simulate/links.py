"""What the hosts' links cost: the seconds in which a version, or a batch, crosses them, and a schedule with those seconds in it."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rlgraph.channels.factory import transport_of
from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.columns import COLUMNS
from rlgraph.compiler.plan import PlannedChannel, PlannedWorker
from rlgraph.compiler.schedule import Dependency, Event, Schedule
from rlgraph.costs.costs import Costs
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph
from rlgraph.simulate.site import ClusterSite

OnHosts = Mapping[int, float]  # how many of something are on each host


def crossing_s(size: float, site: ClusterSite, writers: OnHosts, readers: OnHosts, *, whole: bool = False) -> float:
    """Predict the seconds in which `size` bytes, an equal part of each writer, reach every reader; 0 where none is on another host.

    What a writer sends goes from host to host: it crosses the link of each once, and is passed on inside. A host passes a large message
    on in parts, while more of it comes in; a small one, or one that goes `whole`, once it is there. A reader on several hosts gets its
    share on each. The busiest link sets the time, or the writer whose message goes through most hosts.

    >>> crossing_s(1e9, ClusterSite(bandwidth=1e9), writers={0: 1}, readers={0: 1, 1: 2, 2: 2})  # four readers on two other hosts
    1.004194304
    >>> crossing_s(1e9, ClusterSite(bandwidth=1e9), writers={0: 1}, readers={0: 1, 1: 2, 2: 2}, whole=True)
    2.0
    """
    total = sum(writers.values())
    copies = {host: min(count, 1.0) for host, count in readers.items()}
    message = size * max(copies.values(), default=0.0) / total
    part = message if whole or message < 2 * PART_BYTES else PART_BYTES
    longest = 0.0
    for host in {*writers, *readers}:
        here = writers.get(host, 0.0) / total
        others = [count for other, count in copies.items() if other != host]
        comes, leaves = copies.get(host, 0.0) * (1 - here), min(sum(others), 1.0) * here
        through = message + (len(others) - 1) * part if here and others else 0.0
        longest = max(longest, size * comes, size * leaves, through)
    return site.latency_s + longest / (site.bandwidth or float("inf")) if longest else 0.0


def hosts_of(workers: Sequence[PlannedWorker], node: str) -> OnHosts:
    """Count the workers of a node on each host."""
    return Counter(worker.host for worker in workers if node in worker.nodes)


def with_links(
    schedule: Schedule, graph: Graph, channels: Sequence[PlannedChannel], workers: Sequence[PlannedWorker], costs: Costs, site: ClusterSite
) -> tuple[Schedule, tuple[str, ...]]:
    """Add an event for each batch and each version that crosses a link: it leaves as soon as it is there, and readers wait for it.

    Also names the channels of unknown size, which are left out. Raises PlanError for costs without the bytes of a version that crosses.
    """
    if site.bandwidth is None:
        return schedule, ()
    found = _with_versions(schedule, graph, workers, costs, site)
    known, unknown = {}, []
    for channel in channels:
        if channel.kind == "batch" and transport_of(channel.transport).reach == "hosts":
            size = channel.bytes if channel.bytes is not None else batch_bytes(graph, channel, costs)
            if size is None:
                unknown.append(channel.name)
            else:
                known[channel] = size

    def carried(d: Dependency) -> tuple[str, float] | None:
        reading = next((c for c in known if d.reason == "data" and c.writer == d.via and d.after in _firings(schedule, c.readers)), None)
        if reading is None:
            return None
        readers: Counter[int] = sum((Counter(hosts_of(workers, name)) for name in reading.readers), Counter())
        return reading.name, crossing_s(known[reading], site, hosts_of(workers, reading.writer), readers)

    return _carrying(found, carried), tuple(unknown)


def _with_versions(schedule: Schedule, graph: Graph, workers: Sequence[PlannedWorker], costs: Costs, site: ClusterSite) -> Schedule:
    """Let the versions that leave a host cross its link, instead of the seconds in which the costs receive them."""
    own = {event.name: event for event in schedule.events}
    crossing: dict[Dependency, float] = {}
    for d in schedule.dependencies:
        if d.reason != "loop" or own[d.before].kind != "publish" or d.via not in {feedback.name for feedback in graph.feedbacks}:
            continue
        source, reader = hosts_of(workers, own[d.before].node), hosts_of(workers, own[d.after].node)
        if len({*source, *reader}) > 1:
            if costs.publish_bytes is None:
                raise PlanError(
                    f"rehearse(site=ClusterSite(bandwidth={site.bandwidth:g})): the weights of '{own[d.before].node}' go to another host, "
                    "and the costs do not say how large a version is; give rg.Costs(…, publish_bytes=…)"
                )
            whole = any(worker.gpus for worker in workers if own[d.before].node in worker.nodes)  # what NCCL carries
            crossing[d] = crossing_s(costs.publish_bytes, site, source, reader, whole=whole)
    arrive = {d.after for d in crossing}
    received = tuple(
        replace(event, seconds=max(event.seconds - costs.receive_s, 0.0)) if event.name in arrive else event for event in schedule.events
    )
    return _carrying(replace(schedule, events=received), lambda d: (d.after, crossing[d]) if d in crossing else None)


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
