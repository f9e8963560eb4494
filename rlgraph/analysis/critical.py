"""Find the nodes, edges, pool orders and feedback edges on the critical cycle of a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Dependency


@dataclass(frozen=True)
class Critical:
    """The parts of a plan that set its period.

    `nodes` and `loops` (feedback edges) by name, edges as (writer, reader); `order` holds the nodes that wait for another of their pool.
    """

    nodes: frozenset[str]
    edges: frozenset[tuple[str, str]]
    loops: frozenset[str]
    order: frozenset[str]


def critical(plan: Plan) -> Critical:
    """Find all that the predicted critical cycle runs through. A wait for a free slot marks the edge that the slot belongs to."""
    cycle = plan.prediction.critical
    events = {event.name: event for event in plan.schedule.events}
    steps = [d for pair in zip(cycle, cycle[1:] + cycle[:1], strict=True) for d in _between(plan.schedule.dependencies, *pair)]
    ends = [(d.reason, events[d.before].node, events[d.after].node, d.via) for d in steps]
    return Critical(
        nodes=frozenset(events[name].node for name in cycle if events[name].kind == "fire"),
        edges=frozenset((a, b) if reason == "data" else (b, a) for reason, a, b, _ in ends if reason in ("data", "slots")),
        loops=frozenset(via for reason, _, _, via in ends if reason == "loop"),
        order=frozenset(b for reason, a, b, _ in ends if reason == "order" and a != b),
    )


def _between(dependencies: Sequence[Dependency], before: str, after: str) -> list[Dependency]:
    """Find the dependencies between two events of a cycle: one, or a free slot for a put together with the reader of that put."""
    direct = [d for d in dependencies if (d.before, d.after) == (before, after) and not d.holds]
    if direct:
        return [min(direct, key=lambda d: d.credits)]
    rooms = [d for d in dependencies if d.before == before and d.holds]
    return next(([room, d] for room in rooms for d in dependencies if (d.before, d.after) == (room.after, after)), [])
