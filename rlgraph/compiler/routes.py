"""Who sends a message on to whom: a large one goes from host to host in a shape that the plan chooses, and is passed on inside the host."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from rlgraph.channels.factory import TRANSPORTS
from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.channels.remote import transfer
from rlgraph.compiler.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.compiler.relaying import OnHosts, Shape, feeders, soonest, ways

LARGE: Final = 1 << 20  # bytes of a batch: one that is known to be smaller is sooner at all readers if its writer sends it to each
Route: TypeAlias = Mapping[str, str]  # each reader, and from whom it gets messages: the writer, or another reader
T = TypeVar("T")


def routed(shape: Shape, writer: str, readers: Sequence[str], hosts: Mapping[str, int], turn: int = 0, turns: int = 1) -> Route:
    """Route messages through the hosts: on each, one reader gets them, for the others there and for the next hosts of the shape.

    Readers on the writer's host get them from the writer. Of several `turns`, each lets others pass on, and begins at another host.

    >>> where = {"trainer": 0, "a": 1, "b": 1, "c": 2, "d": 2, "e": 3}
    >>> routed("chain", "trainer", ["a", "b", "c", "d", "e"], where)
    {'a': 'trainer', 'b': 'a', 'c': 'a', 'd': 'c', 'e': 'c'}
    >>> routed("chain", "trainer", ["a", "b", "c", "d", "e"], where, turn=1, turns=3)
    {'d': 'trainer', 'c': 'd', 'e': 'd', 'b': 'e', 'a': 'b'}
    >>> routed("tree", "trainer", ["a", "b", "c", "d", "e"], where)
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
    for host, feeder in zip(_turned(list(there), start), feeders(shape, len(there)), strict=True):
        passing, *others = _turned(there[host], turn)
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
    return {writer: routed(shape, writer, readers, hosts, turns[writer], len(writers)) for writer in wanted}


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


def _turned(items: list[T], turn: int) -> list[T]:
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]
