"""Who sends a message on to whom: a large one crosses each host's link once, and is passed on inside the host."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias, TypeVar

from rlgraph.channels.factory import TRANSPORTS
from rlgraph.compiler.plan import Plan, PlannedChannel, PlannedLoop

LARGE: Final = 1 << 20  # bytes of a batch: one that is known to be smaller is sooner at all readers if its writer sends it to each
Route: TypeAlias = Mapping[str, str]  # each reader, and from whom it gets messages: the writer, or another reader
T = TypeVar("T")


def chain(writer: str, readers: Sequence[str], hosts: Mapping[str, int], turn: int = 0) -> Route:
    """Route messages through the hosts one after another: on each, one reader gets them, for the others there and for the next host.

    Readers on the writer's host get them from the writer. With another `turn` others pass on, and the hosts come in another order.

    >>> chain("trainer", ["a", "b", "c", "d"], {"trainer": 0, "a": 1, "b": 1, "c": 2, "d": 2})
    {'a': 'trainer', 'b': 'a', 'c': 'a', 'd': 'c'}
    >>> chain("trainer", ["a", "b", "c", "d"], {"trainer": 0, "a": 1, "b": 1, "c": 2, "d": 2}, turn=1)
    {'d': 'trainer', 'c': 'd', 'b': 'd', 'a': 'b'}
    """
    there: dict[int, list[str]] = {}
    for reader in readers:
        there.setdefault(hosts[reader], []).append(reader)
    found = dict.fromkeys(there.pop(hosts[writer], ()), writer)
    feeder = writer
    for host in _turned(list(there), turn):
        first, *others = _turned(there[host], turn)
        found |= {first: feeder, **dict.fromkeys(others, first)}
        feeder = first
    return found


def crossings(route: Route, hosts: Mapping[str, int]) -> int:
    """Count how often a message crosses a host's link in one direction, at most.

    >>> crossings({"a": "trainer", "b": "trainer"}, {"trainer": 0, "a": 1, "b": 1})
    2
    """
    far = [(hosts[feeder], hosts[reader]) for reader, feeder in route.items() if hosts[feeder] != hosts[reader]]
    return max((sum(pair[end] == host for pair in far) for end in (0, 1) for host in set(hosts.values())), default=0)


def routes(plan: Plan, end: PlannedChannel | PlannedLoop) -> Mapping[str, Route]:
    """Route what each writing worker of a channel or a feedback edge puts."""
    readers = tuple(dict.fromkeys(worker for reader in end.readers for worker in plan.node(reader).workers))
    hosts, writers = hosts_of(plan), _writers(plan, end)
    passed_on = TRANSPORTS[end.transport].passes_on and (isinstance(end, PlannedLoop) or end.bytes is None or end.bytes >= LARGE)
    return {w: chain(w, readers, hosts, turn) if passed_on else dict.fromkeys(readers, w) for turn, w in enumerate(writers)}


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


def _turned(items: list[T], turn: int) -> list[T]:
    start = turn % len(items) if items else 0
    return items[start:] + items[:start]
