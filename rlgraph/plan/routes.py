"""Who sends a message on to whom: from host to host in the shape in which the last one has it soonest, then inside each host."""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

from rlgraph.channels.factory import TRANSPORTS
from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.channels.host.protocol import part_bytes
from rlgraph.channels.remote import transfer
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop

# The shape in which messages go from host to host: that by which the last host has them soonest. Rehearsals take the same seconds.

Shape: TypeAlias = Literal["chain", "tree", "star", "each"]  # "each": every reader gets a copy of its own
OnHosts: TypeAlias = Mapping[int, float]  # how many of something are on each host

SHAPES: Final[tuple[Shape, ...]] = ("chain", "star", "tree")  # of two that are as soon, the first is taken
BRANCHES: Final = 2  # hosts that a host of a tree feeds, at most
SOONER: Final = 0.95  # of the seconds of a chain: a shape that is hardly sooner is not worth its further copies
UNKNOWN_BYTES: Final = 1 << 30  # of a message whose size no one knows


class Link(Protocol):
    """A host's link: it carries `bandwidth` bytes a second each way (None: any number), after `latency_s`."""

    @property
    def bandwidth(self) -> float | None: ...

    @property
    def latency_s(self) -> float: ...


@dataclass(frozen=True)
class AssumedLink:
    """The link for which plans choose, since a cluster says nothing of its links: 100 Gbit/s, and a relay that wakes up in 0.1 ms.

    The choice depends on their product alone, the bytes that a link carries meanwhile: 1.25 MB.
    """

    bandwidth: float = 12.5e9
    latency_s: float = 1e-4


ASSUMED: Final = AssumedLink()


@functools.cache
def feeders(shape: Shape, hosts: int) -> tuple[int, ...]:
    """Number the host that feeds each of so many hosts; -1 is the writer's. In a tree none feeds two before all on its level feed one.

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
    """How many hosts a host feeds: at most, on each level from the writer's on; and how many hosts beside the writer's feed 1, 2, ..."""

    levels: tuple[int, ...]
    feeding: tuple[int, ...]

    @functools.cached_property
    def most(self) -> int:
        return max(self.levels)

    @functools.cached_property
    def in_turn(self) -> int:
        """How many parts a message waits for on its way to the last host, beside the level that feeds most."""
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
    """Predict the seconds until every reader has `size` bytes, an equal part from each writer; 0 where no reader is on another host.

    What a writer sends crosses the link of each host once inwards, and is passed on to the next hosts of the `shape`: a large message in
    parts of at `least` so many bytes while more of it comes in; a small one, or any if that is None, once it is there. A channel of more
    `slots` has larger parts. A host that feeds two has both served at half its bandwidth. Writers begin their shapes at other hosts, so all
    hosts pass on alike. A reader on several hosts gets its share on each. The busiest link sets the time, or the message that comes last.

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
            turns = total * (1 - here)  # messages of which the host has each place among the hosts as often as any other has
            hosts = len(copies) - (len(both) > (host in both))
            passes = sum(message * math.ceil(turns * count / hosts) for count in fans(shape, hosts).feeding)
        longest = max(longest, comes, sends + passes, path)
    return levels * link.latency_s + longest / (link.bandwidth or float("inf")) if longest else 0.0


def ways(size: float | None, writers: OnHosts, readers: OnHosts, *, least: int | None, slots: int) -> Mapping[Shape, float]:
    """Predict the seconds by each shape on assumed links; a message of unknown size counts as large."""
    known = UNKNOWN_BYTES if size is None else size
    return {shape: crossing_s(known, ASSUMED, writers, readers, shape=shape, least=least, slots=slots) for shape in SHAPES}


def soonest(seconds: Mapping[Shape, float]) -> Shape:
    """Choose the shape by which the last host has the messages soonest: a chain, unless another is clearly sooner.

    >>> soonest({"chain": 1.0, "star": 1.5, "tree": 0.97}), soonest({"chain": 1.0, "star": 1.5, "tree": 0.9})
    ('chain', 'tree')
    """
    best = min(SHAPES, key=lambda shape: seconds[shape])
    return best if seconds[best] < SOONER * seconds["chain"] else "chain"


# Who sends a message on to whom: a large one goes from host to host in a shape that the plan chooses, and is passed on inside the host.

LARGE: Final = 1 << 20  # bytes of a batch: one that is known to be smaller is sooner at all readers if its writer sends it to each
Route: TypeAlias = Mapping[str, str]  # each reader, and from whom it gets messages: the writer, or another reader
T = TypeVar("T")


def route_messages(shape: Shape, writer: str, readers: Sequence[str], hosts: Mapping[str, int], turn: int = 0, turns: int = 1) -> Route:
    """Route messages through the hosts: on each, one reader gets them, for the others there and for the next hosts of the shape.

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
    """Count how often a message comes into a host, and how often it leaves one, at most.

    >>> crossings({"a": "trainer", "b": "a", "c": "trainer"}, {"trainer": 0, "a": 1, "b": 1, "c": 2})
    (1, 2)
    """
    far = [(hosts[feeder], hosts[reader]) for reader, feeder in route.items() if hosts[feeder] != hosts[reader]]
    left, entered = Counter(feeder for feeder, _ in far), Counter(reader for _, reader in far)
    return max(entered.values(), default=0), max(left.values(), default=0)


def routes(plan: Plan, end: PlannedChannel | PlannedLoop) -> Mapping[str, Route]:
    """Route what each writing worker of a channel or a feedback edge puts."""
    return _routes(plan, end, _writers(plan, end))


def kinds_of_routes(plan: Plan, end: PlannedChannel | PlannedLoop) -> Mapping[str, Route]:
    """Route as `routes` does, for one writer of all that have as many readers on their host: the others begin at another host alone."""
    hosts, readers = hosts_of(plan), ends_on_hosts(plan, end)[1]
    firsts: dict[float, str] = {}
    for writer in _writers(plan, end):
        firsts.setdefault(readers.get(hosts[writer], 0), writer)
    return _routes(plan, end, firsts.values())


def _routes(plan: Plan, end: PlannedChannel | PlannedLoop, wanted: Iterable[str]) -> Mapping[str, Route]:
    hosts, writers, readers, shape = hosts_of(plan), _writers(plan, end), _readers(plan, end), shape_of(plan, end)
    turns = {writer: turn for turn, writer in enumerate(writers)}
    return {writer: route_messages(shape, writer, readers, hosts, turns[writer], len(writers)) for writer in wanted}


def shape_of(plan: Plan, end: PlannedChannel | PlannedLoop) -> Shape:
    """Choose the shape in which messages go from host to host."""
    passed_on = TRANSPORTS[end.transport].passes_on and (isinstance(end, PlannedLoop) or end.bytes is None or end.bytes >= LARGE)
    return soonest(seconds_of(plan, end)) if passed_on else "each"


def seconds_of(plan: Plan, end: PlannedChannel | PlannedLoop) -> Mapping[Shape, float]:
    """Predict the seconds until the last host has the messages, by each shape."""
    writers, readers = ends_on_hosts(plan, end)
    return ways(end.bytes, writers, readers, least=least_part(end), slots=end.slots)


def least_part(end: PlannedChannel | PlannedLoop) -> int:
    """The least bytes of a part in which hosts pass messages on."""
    return PART_BYTES if TRANSPORTS[end.transport].carrier is None else transfer.PART_BYTES


def ends_on_hosts(plan: Plan, end: PlannedChannel | PlannedLoop) -> tuple[OnHosts, OnHosts]:
    """Count the writers and the readers of a channel or a feedback edge on each host."""
    hosts = hosts_of(plan)
    return Counter(hosts[worker] for worker in _writers(plan, end)), Counter(hosts[worker] for worker in _readers(plan, end))


def hosts_of(plan: Plan) -> Mapping[str, int]:
    """Map each worker to its host."""
    return {worker.name: worker.host for worker in plan.workers}


def writers_of(plan: Plan, node: str) -> tuple[str, ...]:
    """Name the workers that write a node's batch: each rank of a generator its own rows, rank 0 of any other model all rows."""
    found = plan.node(node)
    return found.workers if found.work == "generate" else found.workers[:1]


def _writers(plan: Plan, end: PlannedChannel | PlannedLoop) -> tuple[str, ...]:
    """Name the workers that write: of weights, each rank writes its own shard."""
    return plan.node(end.writer).workers if isinstance(end, PlannedLoop) else writers_of(plan, end.writer)


def _readers(plan: Plan, end: PlannedChannel | PlannedLoop) -> tuple[str, ...]:
    return tuple(dict.fromkeys(worker for reader in end.readers for worker in plan.node(reader).workers))


def _rotate(items: list[T], turn: int) -> list[T]:
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]
