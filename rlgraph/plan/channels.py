"""Plan the channels between nodes and the feedback edges: what each carries, its slots and its transport, depending on where workers run.

A message travels from host to host in the shape that serves the last host soonest, then inside each host.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

from rlgraph.channels.api import TRANSPORTS, Reach, first_choice, transport_of
from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.channels.host.protocol import part_bytes
from rlgraph.channels.remote import transfer
from rlgraph.columns import COLUMNS
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Feedback, Node
from rlgraph.plan import events
from rlgraph.plan.forecast import Forecast
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.placement import Homes, first_workers, homes_of
from rlgraph.plan.plan import ChannelKind, Plan, PlannedAdapter, PlannedChannel, PlannedEnd, PlannedLoop, PlannedWorker
from rlgraph.plan.play import Cycle, critical_cycle
from rlgraph.plan.schedule import MOVING, Schedule

HIDDEN = 0.01  # publishing is hidden if it lengthens a step by less than this


def host_transport(homes: Homes, writer: Node, *readers: Node) -> str:
    """Choose the transport for columns in host memory: between hosts only if the nodes' workers are on several hosts."""
    return first_choice(_reach(homes, writer, *readers))


def _reach(homes: Homes, *nodes: Node) -> Reach:
    return "host" if len({worker.host for node in nodes for worker in homes[node.name]}) == 1 else "hosts"


def batch_transports(graph: Graph, workers: Sequence[PlannedWorker]) -> Mapping[Node, Mapping[str, Sequence[Node]]]:
    """Group the readers of each node by transport: one channel for each, in the order in which the writer puts."""
    homes = homes_of(workers)
    process = {name: own[-1].model or own[-1].name for name, own in homes.items()}
    found: dict[Node, dict[str, list[Node]]] = {}
    for writer in graph.nodes:
        found[writer] = {}
        for reader in graph.forward.successors(writer):
            transport = first_choice("process") if process[reader.name] == process[writer.name] else host_transport(homes, writer, reader)
            found[writer].setdefault(transport, []).append(reader)
    return found


def weights_transport(homes: Homes, writer: Node, readers: Sequence[Node], *, on_gpus: bool) -> str:
    """Choose the transport for weights: GPU memory if the writer has GPUs, and between hosts only if all readers have them too."""
    reach = _reach(homes, writer, *readers)
    all_on_gpus = reach == "host" or all(worker.gpus for node in (writer, *readers) for worker in homes[node.name])
    return first_choice(reach, "gpu" if on_gpus and all_on_gpus else "host")


def planned_channels(graph: Graph, workers: Sequence[PlannedWorker], schedule: Schedule) -> tuple[PlannedChannel, ...]:
    """Plan all channels of the forward graph: for batches, for the order within a pool, and for columns of an earlier step."""
    return (*_batch_channels(graph, workers), *_order_channels(graph, schedule, workers), *_earlier_channels(graph, workers))


def _batch_channels(graph: Graph, workers: Sequence[PlannedWorker]) -> list[PlannedChannel]:
    """Plan one channel for each writer and transport; it carries the columns that its readers read."""
    planned = []
    for writer, by_transport in batch_transports(graph, workers).items():
        for transport, readers in by_transport.items():
            needed = {c for reader in readers for c in graph.forward.edges[writer, reader]["columns"]}
            columns = tuple(c for c in writer.writes if c in needed)
            name = writer.name if transport == first_choice("host") else f"{writer.name} ({transport})"
            size = _bytes(graph, writer, columns) if transport_of(transport).writer_keeps else None
            planned.append(_channel(name, writer, readers, columns, transport, events.slots(graph, writer) * writer.chunks, size))
    return planned


def _channel(
    name: str,
    writer: Node,
    readers: Sequence[Node],
    columns: tuple[str, ...],
    transport: str,
    slots: int,
    size: int | None,
    kind: ChannelKind = "batch",
    credits: int = 0,
) -> PlannedChannel:
    stream = writer.stream.name if writer.stream else None
    names = tuple(reader.name for reader in readers)
    return PlannedChannel(name, writer.name, names, columns, transport, slots, size, kind, credits, writer.chunks, stream)


def slot_bytes(graph: Graph, workers: Sequence[PlannedWorker]) -> int:
    """Estimate the memory of batch slots on the fullest host, as far as their sizes are known."""
    homes, held = homes_of(workers), Counter[int]()
    for channel in _batch_channels(graph, workers):
        if channel.bytes and transport_of(channel.transport).writer_keeps == "host":
            held[homes[channel.writer][0].host] += channel.slots * channel.bytes
    return max(held.values(), default=0)


def _bytes(graph: Graph, writer: Node, columns: Sequence[str]) -> int | None:
    """Bound the bytes of one message by the dimensions that the nodes declare."""
    trained = [node for node in graph.nodes if node.due is None]
    sizes = {dim: size for node in (*trained, writer) for dim, size in node.traits.dims.items()}
    size = message_bytes(columns, writer.rows // writer.chunks, sizes)
    return None if size is None else int(size)


def message_bytes(columns: Sequence[str], rows: float, sizes: Mapping[str, float]) -> float | None:
    """Sum the bytes of the tensors of a message of `rows` rows; None if the size of a dimension is unknown. Text is not counted."""
    total = 0.0
    for column in columns:
        spec = COLUMNS.get(column)
        if spec is None or any(dim not in sizes for dim in spec.dims[1:]):
            return None
        total += math.prod((sizes[dim] for dim in spec.dims[1:]), start=rows) * spec.itemsize
    return total


def _order_channels(graph: Graph, schedule: Schedule, workers: Sequence[PlannedWorker]) -> list[PlannedChannel]:
    """Plan the order channels: a node of a pool tells the next node, in another process, that it is done, unless data does so anyway."""
    homes = homes_of(workers)
    planned = []
    for order in events.order_channels(graph, schedule.events, first_workers(workers)):
        transport = host_transport(homes, order.writer, order.reader)
        planned.append(_channel(order.name, order.writer, [order.reader], (), transport, order.slots, 0, "order", order.credits))
    for feedback in graph.feedbacks:
        for node in events.evaluations(graph, feedback):
            assert feedback.source is not None
            writer = feedback.source.node
            name, slots = events.order_channel_name(writer.name, node.name), (events.ahead(graph) + 1) * writer.chunks
            planned.append(_channel(name, writer, [node], (), host_transport(homes, writer, node), slots, 0, "order"))
    return planned


def _earlier_channels(graph: Graph, workers: Sequence[PlannedWorker]) -> Iterator[PlannedChannel]:
    """Plan the channel of each node that gets columns of an earlier step: it holds the columns that are not yet due, and one more."""
    homes = homes_of(workers)
    for node in graph.nodes:
        if node.earlier is not None and node.earlier.source is not None:
            writer, columns, ahead = node.earlier.source.node, node.earlier.columns, node.earlier.depth + 1
            name = node.earlier.name if graph.earlier.count(node.earlier) == 1 else f"{node.earlier.name} to {node.name}"
            transport, size = host_transport(homes, writer, node), _bytes(graph, writer, columns)
            slots, credits = (ahead + 1) * writer.chunks, ahead * writer.chunks
            yield _channel(name, writer, [node], columns, transport, slots, size, "earlier", credits)


def planned_loops(
    graph: Graph,
    workers: Sequence[PlannedWorker],
    schedule: Schedule,
    cycle: Cycle,
    expected: Forecast,
    shapes: Shapes,
    publish_bytes: int | None,
    *,
    on_gpus: bool,
) -> list[PlannedLoop]:
    """Plan the feedback edges, with `publish_bytes` per version. Publishing is hidden if a step without it would be hardly shorter."""
    free = replace(schedule, events=tuple(replace(e, seconds=0.0) if e.kind in MOVING else e for e in schedule.events))
    hidden = critical_cycle(free).period_s >= cycle.period_s * (1 - HIDDEN)
    planned, homes = [], homes_of(workers)
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        moving = {name for d in schedule.dependencies if d.reason == "loop" and d.via == feedback.name for name in (d.before, d.after)}
        publish_s = sum(e.seconds for e in schedule.events if e.kind in MOVING and e.name in moving)
        using, apart = events.readers(graph, feedback), events.evaluations(graph, feedback)
        adapter = PlannedAdapter.of(feedback.source.node.model, shapes)
        loop = PlannedLoop(
            name=feedback.name,
            writer=feedback.source.node.name,
            readers=tuple(n.name for n in using),
            depth=feedback.depth,
            buffers=feedback.buffers,
            latest=feedback.latest,
            bucket_bytes=feedback.bucket_bytes,
            checksum=feedback.checksum,
            staleness=expected.staleness(graph, feedback),
            transport=weights_transport(homes, feedback.source.node, using or apart, on_gpus=on_gpus),
            slots=staged_versions(feedback, on_gpus=on_gpus),
            publish_s=publish_s,
            hidden=hidden,
            adapter=adapter,
            bytes=adapter.bytes if adapter is not None and publish_bytes is None else publish_bytes,
        )
        planned += [loop] if using else []
        for node in apart:
            own = replace(loop, name=events.evaluation_loop(feedback.name, node.name), readers=(node.name,), due=node.due)
            planned.append(replace(own, depth=0, buffers=1, latest=False, staleness=0.0, slots=1))
    return planned


def with_transport(plan: Plan, asked: str) -> Plan:
    """Set the transport between processes of one host to the one that a launch asks for.

    Raises PlanError for an unknown transport, or one that this plan cannot use.
    """
    default = first_choice("host")
    offered = [name for name, found in TRANSPORTS.items() if (found.reach, found.writer_keeps, found.carrier) == ("host", "host", None)]
    if asked not in offered:
        raise PlanError(f"transport='{asked}': a launch chooses one of {offered}, between processes of one host; leave it out elsewhere")
    beyond = [end for end in plan.ends if TRANSPORTS[end.transport].reach == "hosts"]
    on_gpus = [end for end in plan.ends if TRANSPORTS[end.transport].writer_keeps == "gpu"]
    if asked != default and beyond:
        raise PlanError(
            f"transport='{asked}' and {plan.cluster.hosts} hosts: '{beyond[0].name}' goes from host to host, where a channel of "
            f"transport '{asked}' can hang; compile for one host, or leave transport out"
        )
    if asked != default and on_gpus:
        raise PlanError(
            f"transport='{asked}': '{on_gpus[0].name}' goes from GPU to GPU by transport '{on_gpus[0].transport}', and '{asked}' would "
            "send it through the host's memory; leave transport out"
        )
    if not any(end.transport == default for end in plan.ends):
        raise PlanError(f"transport='{asked}' changes nothing: in this plan no channel leaves its process; leave transport out")

    return replace(
        plan,
        channels=tuple(replace(channel, transport=asked) if channel.transport == default else channel for channel in plan.channels),
        loops=tuple(replace(loop, transport=asked) if loop.transport == default else loop for loop in plan.loops),
    )


def check_encrypted(plan: Plan) -> None:
    """Raise PlanError for a plan that `launch(encrypt=True)` cannot encrypt: one of a single host, or with a link of another library."""
    if plan.cluster.hosts == 1:
        raise PlanError(
            "launch(encrypt=True): the plan runs only on this host and sends nothing to another; leave encrypt out, or compile for a "
            "cluster of several hosts"
        )
    for end in plan.ends:
        found = TRANSPORTS[end.transport]
        if found.reach == "hosts" and not found.encrypts:
            raise PlanError(
                f"launch(encrypt=True): '{end.name}' goes from host to host by '{found.name}', which does not encrypt; place both ends "
                "on one host, or keep the hosts in a network that encrypts by itself"
            )
    for model in {worker.model for worker in plan.workers if worker.model}:
        if len({worker.host for worker in plan.workers if worker.model == model}) > 1:
            raise PlanError(
                f"launch(encrypt=True): the ranks of '{model}' are on several hosts, and PyTorch's collectives do not encrypt; use only as "
                "many ranks as fit on one host, or keep the hosts in a network that encrypts by itself"
            )


def lies_in_ray(plan: Plan) -> bool:
    """Whether messages of the plan are in Ray's object store."""
    return any(TRANSPORTS[end.transport].needs_ray for end in plan.ends)


def staged_versions(feedback: Feedback, *, on_gpus: bool) -> int:
    """Count the most weight versions that are staged at once.

    After the last step `depth` versions and the newest are unread, and none may wait for room. On a GPU, where memory is
    scarce, a second buffer of the reader holds one of them.
    """
    return max(feedback.depth + 2 - feedback.buffers, 1) if on_gpus else feedback.depth + 1


# The shape in which messages travel from host to host: the shape that serves the last host soonest. Simulated runs use the same seconds.

Shape: TypeAlias = Literal["chain", "tree", "star", "each"]  # "each": every reader gets a separate copy
OnHosts: TypeAlias = Mapping[int, float]  # how many of something are on each host

SHAPES: Final[tuple[Shape, ...]] = ("chain", "star", "tree")  # of two equally fast shapes the first is chosen
BRANCHES: Final = 2  # the most hosts that a host of a tree feeds
SOONER: Final = 0.95  # share of a chain's seconds: a shape that is hardly faster is not worth its further copies
UNKNOWN_BYTES: Final = 1 << 30  # of a message of unknown size


class Link(Protocol):
    """A host's link: it carries `bandwidth` bytes per second each way (None: any number), after `latency_s`."""

    @property
    def bandwidth(self) -> float | None: ...

    @property
    def latency_s(self) -> float: ...


@dataclass(frozen=True)
class AssumedLink:
    """The link that plans assume, since a cluster does not describe its links: 100 Gbit/s, and a relay that wakes up in 0.1 ms.

    The choice depends only on their product, the bytes that a link carries meanwhile: 1.25 MB.
    """

    bandwidth: float = 12.5e9
    latency_s: float = 1e-4


ASSUMED: Final = AssumedLink()


@functools.cache
def feeders(shape: Shape, hosts: int) -> tuple[int, ...]:
    """Number the host that feeds each host; -1 is the writer's. In a tree no host feeds two before all hosts of its level feed one.

    >>> feeders("chain", 4), feeders("tree", 5), feeders("star", 3)
    ((-1, 0, 1, 2), (-1, -1, 0, 1, 0), (-1, -1, -1))
    """
    if shape == "chain":
        return tuple(range(-1, hosts - 1))
    if shape != "tree":
        return (-1,) * hosts
    found: list[int] = []
    level = [-1]
    while len(found) < hosts:
        start = len(found)
        found += [level[child % len(level)] for child in range(min(BRANCHES * len(level), hosts - start))]
        level = list(range(start, len(found)))
    return tuple(found)


@dataclass(frozen=True)
class Fans:
    """How many hosts a host feeds: the most on each level, from the writer's on; and how many other hosts feed 1, 2, ..."""

    levels: tuple[int, ...]
    feeding: tuple[int, ...]

    @functools.cached_property
    def most(self) -> int:
        return max(self.levels)

    @functools.cached_property
    def in_turn(self) -> int:
        """How many parts a message waits for on its way to the last host, besides the level that feeds most."""
        return sum(self.levels) - self.most


@functools.cache
def fans(shape: Shape, hosts: int) -> Fans:
    """Count how many hosts each feeds.

    >>> fans("tree", 5)
    Fans(levels=(2, 2), feeding=(2, 1))
    """
    level, children = {-1: 0}, dict.fromkeys(range(-1, hosts), 0)
    for host, feeder in enumerate(feeders(shape, hosts)):
        level[host] = level[feeder] + 1
        children[feeder] += 1
    most = [0] * (max(level.values()) + 1)
    for host, count in children.items():
        most[level[host]] = max(most[level[host]], count)
    beyond = [count for host, count in children.items() if host >= 0]
    feeding = tuple(sum(count >= least for count in beyond) for least in range(1, max(beyond, default=0) + 1))
    return Fans(tuple(most[:-1]), feeding)


def crossing_s(
    size: float,
    link: Link,
    writers: OnHosts,
    readers: OnHosts,
    *,
    shape: Shape = "chain",
    least: int | None = PART_BYTES,
    slots: int = 1,
) -> float:
    """Predict the seconds until every reader has `size` bytes, an equal part from each writer; 0 if no reader is on another host.

    What a writer sends crosses the link of each host once inwards, and is passed on to the next hosts of the `shape`: a large message in
    parts of at least `least` bytes while more of it arrives; a small message, or any if `least` is None, once it is complete. A channel of
    more `slots` has larger parts. A host that feeds two hosts serves each at half its bandwidth. Writers begin their shapes at different
    hosts, so all hosts forward equally. A reader on several hosts gets its share on each. The busiest link sets the time, or the message
    that comes last.

    >>> link = AssumedLink(bandwidth=1e9, latency_s=0.0)
    >>> crossing_s(2e9, link, writers={0: 1}, readers={0: 1, 1: 2, 2: 2}, least=None)  # four readers on two other hosts
    4.0
    >>> [crossing_s(1e9, link, {0: 1}, dict.fromkeys(range(1, 15), 8), shape=shape, least=None) for shape in SHAPES]
    [14.0, 14.0, 6.0]
    >>> [round(crossing_s(1e9, link, {0: 1}, dict.fromkeys(range(1, 15), 8), shape=shape), 2) for shape in SHAPES]
    [1.21, 14.0, 2.07]
    """
    total = sum(writers.values())
    copies = {host: count if shape == "each" else min(count, 1.0) for host, count in readers.items()}
    message = size * min(max(copies.values(), default=0.0), 1.0) / total
    part = message if least is None else part_bytes(message, slots, least) or message
    every, both, longest, levels = sum(copies.values()), writers.keys() & copies.keys(), 0.0, 0
    for host in {*writers, *readers}:
        here, others = writers.get(host, 0.0) / total, every - copies.get(host, 0.0)
        sends = path = passes = 0.0
        if here and others:
            own = fans(shape, len(copies) - (host in copies))
            most, first = (others, others) if shape == "each" else (own.most, min(own.levels[0], others))
            sends, path, levels = size * here * first, message * most + part * own.in_turn, max(levels, len(own.levels))
        comes = size * copies.get(host, 0.0) * (1 - here)
        if comes:
            turns = total * (1 - here)  # in these messages every host has each place equally often
            hosts = len(copies) - (len(both) > (host in both))
            passes = sum(message * math.ceil(turns * count / hosts) for count in fans(shape, hosts).feeding)
        longest = max(longest, comes, sends + passes, path)
    return levels * link.latency_s + longest / (link.bandwidth or float("inf")) if longest else 0.0


def ways(size: float | None, writers: OnHosts, readers: OnHosts, *, least: int | None, slots: int) -> Mapping[Shape, float]:
    """Predict the seconds by each shape on assumed links; a message of unknown size counts as large."""
    known = UNKNOWN_BYTES if size is None else size
    return {shape: crossing_s(known, ASSUMED, writers, readers, shape=shape, least=least, slots=slots) for shape in SHAPES}


def soonest(seconds: Mapping[Shape, float]) -> Shape:
    """Choose the shape that serves the last host soonest: a chain, unless another shape is clearly faster.

    >>> soonest({"chain": 1.0, "star": 1.5, "tree": 0.97}), soonest({"chain": 1.0, "star": 1.5, "tree": 0.9})
    ('chain', 'tree')
    """
    best = min(SHAPES, key=lambda shape: seconds[shape])
    return best if seconds[best] < SOONER * seconds["chain"] else "chain"


# Who forwards a message to whom: a large message travels from host to host in a shape that the plan chooses, and is forwarded inside the
# host.

LARGE: Final = 1 << 20  # bytes of a batch: a smaller batch reaches all readers sooner if its writer sends it to each
Route: TypeAlias = Mapping[str, str]  # each reader, and from whom it gets messages: the writer, or another reader
T = TypeVar("T")


def route_messages(shape: Shape, writer: str, readers: Sequence[str], hosts: Mapping[str, int], turn: int = 0, turns: int = 1) -> Route:
    """Route messages through the hosts: on each, one reader receives them for its other readers and for the next hosts of the shape.

    Readers on the writer's host get them from the writer. Of several `turns`, each lets others pass on, and begins at another host.

    >>> where = {"trainer": 0, "a": 1, "b": 1, "c": 2, "d": 2, "e": 3}
    >>> route_messages("chain", "trainer", ["a", "b", "c", "d", "e"], where)
    {'a': 'trainer', 'b': 'a', 'c': 'a', 'd': 'c', 'e': 'c'}
    >>> route_messages("chain", "trainer", ["a", "b", "c", "d", "e"], where, turn=1, turns=3)
    {'d': 'trainer', 'c': 'd', 'e': 'd', 'b': 'e', 'a': 'b'}
    >>> route_messages("tree", "trainer", ["a", "b", "c", "d", "e"], where)
    {'a': 'trainer', 'b': 'a', 'c': 'trainer', 'd': 'c', 'e': 'a'}
    """
    if shape == "each":
        return dict.fromkeys(readers, writer)
    there: dict[int, list[str]] = {}
    for reader in readers:
        there.setdefault(hosts[reader], []).append(reader)
    found = dict.fromkeys(there.pop(hosts[writer], ()), writer)
    start = turn * len(there) // turns if turns < len(there) else turn
    first: list[str] = []
    for host, feeder in zip(_rotate(list(there), start), feeders(shape, len(there)), strict=True):
        passing, *others = _rotate(there[host], turn)
        found |= {passing: first[feeder] if feeder >= 0 else writer, **dict.fromkeys(others, passing)}
        first.append(passing)
    return found


def crossings(route: Route, hosts: Mapping[str, int]) -> tuple[int, int]:
    """Count how often a message enters a host, and how often it leaves one, at most.

    >>> crossings({"a": "trainer", "b": "a", "c": "trainer"}, {"trainer": 0, "a": 1, "b": 1, "c": 2})
    (1, 2)
    """
    far = [(hosts[feeder], hosts[reader]) for reader, feeder in route.items() if hosts[feeder] != hosts[reader]]
    left, entered = Counter(feeder for feeder, _ in far), Counter(reader for _, reader in far)
    return max(entered.values(), default=0), max(left.values(), default=0)


def routes(plan: Plan, end: PlannedEnd) -> Mapping[str, Route]:
    """Route the messages of each writing worker of a channel or a feedback edge."""
    return _routes(plan, end, _writers(plan, end))


def kinds_of_routes(plan: Plan, end: PlannedEnd) -> Mapping[str, Route]:
    """Route as `routes` does, for one of the writers with equally many readers on their host: the others only begin elsewhere."""
    hosts, readers = hosts_of(plan), ends_on_hosts(plan, end)[1]
    firsts: dict[float, str] = {}
    for writer in _writers(plan, end):
        firsts.setdefault(readers.get(hosts[writer], 0), writer)
    return _routes(plan, end, firsts.values())


def _routes(plan: Plan, end: PlannedEnd, wanted: Iterable[str]) -> Mapping[str, Route]:
    hosts, writers, readers, shape = hosts_of(plan), _writers(plan, end), _readers(plan, end), shape_of(plan, end)
    turns = {writer: turn for turn, writer in enumerate(writers)}
    return {writer: route_messages(shape, writer, readers, hosts, turns[writer], len(writers)) for writer in wanted}


def shape_of(plan: Plan, end: PlannedEnd) -> Shape:
    """Choose the shape in which messages go from host to host."""
    passed_on = TRANSPORTS[end.transport].passes_on and (isinstance(end, PlannedLoop) or end.bytes is None or end.bytes >= LARGE)
    return soonest(seconds_of(plan, end)) if passed_on else "each"


def seconds_of(plan: Plan, end: PlannedEnd) -> Mapping[Shape, float]:
    """Predict for each shape the seconds until the last host has the messages."""
    writers, readers = ends_on_hosts(plan, end)
    return ways(end.bytes, writers, readers, least=least_part(end), slots=end.slots)


def least_part(end: PlannedEnd) -> int:
    """The least bytes of a part in which hosts forward messages."""
    return PART_BYTES if TRANSPORTS[end.transport].carrier is None else transfer.PART_BYTES


def ends_on_hosts(plan: Plan, end: PlannedEnd) -> tuple[OnHosts, OnHosts]:
    """Count the writers and the readers of a channel or a feedback edge on each host."""
    hosts = hosts_of(plan)
    return Counter(hosts[worker] for worker in _writers(plan, end)), Counter(hosts[worker] for worker in _readers(plan, end))


def hosts_of(plan: Plan) -> Mapping[str, int]:
    """Map each worker to its host."""
    return {worker.name: worker.host for worker in plan.workers}


def writers_of(plan: Plan, node: str) -> tuple[str, ...]:
    """Name the workers that write a node's batch: each rank of a generator its own rows; rank 0 of any other model all rows."""
    found = plan.node(node)
    return found.workers if found.work == "generate" else found.workers[:1]


def _writers(plan: Plan, end: PlannedEnd) -> tuple[str, ...]:
    """Name the workers that write; each rank writes its own shard of weights."""
    return plan.node(end.writer).workers if isinstance(end, PlannedLoop) else writers_of(plan, end.writer)


def _readers(plan: Plan, end: PlannedEnd) -> tuple[str, ...]:
    return tuple(dict.fromkeys(worker for reader in end.readers for worker in plan.node(reader).workers))


def _rotate(items: list[T], turn: int) -> list[T]:
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]
