"""Advise what to change in a plan, from its critical cycle, the load of the pools and the predicted waits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlgraph.plan.plan import Plan, PlannedPool
from rlgraph.plan.schedule import MOVING, Dependency

IDLE = 0.75  # a pool that works less than this waits noticeably
UNUSED = 0.25  # a pool that works less than this could join another pool
NOTICED = 0.05  # share of a step: a longer wait, or a larger loss to varying times, is worth a change


def advise(plan: Plan) -> tuple[str, ...]:
    """Advise what to change, most important first; empty if nothing stands out. Placeholder costs say nothing about times."""
    rules: Sequence[Callable[[Plan], Iterator[str]]] = (_loop_and_shares, _lengths, _hosts, _advise_buffers, _cores)
    if plan.prediction.cost == "nominal":
        rules = (_cores,)
    return tuple(line for rule in rules for line in rule(plan))


def _loop_and_shares(plan: Plan) -> Iterator[str]:
    events = {event.name: event for event in plan.schedule.events}
    cycle = [events[name] for name in plan.prediction.critical]
    working = [pool for pool in plan.pools if any(node.pool == pool.name for node in plan.nodes)]
    if any(event.kind in MOVING for event in cycle) and len({event.pool for event in cycle} - {None}) > 1:
        depths = ", ".join(f"{loop.name} has depth {loop.depth}" for loop in plan.loops)
        busiest = max(pool.busy for pool in working)
        yield (
            f"the weights' loop sets the step ({depths}): a deeper one overlaps generation and training, at more staleness, down to "
            f"{busiest:.0%} of this step time"
        )
    elif working and plan.prediction.period_s > 0:
        yield from _shares(max(working, key=lambda pool: pool.busy), working)


def _shares(busiest: PlannedPool, working: Sequence[PlannedPool]) -> Iterator[str]:
    idle = [pool for pool in working if pool is not busiest and pool.busy < IDLE]
    if idle:
        told = " and ".join(f"'{pool.name}' ({pool.busy:.0%} busy)" for pool in idle)
        yield f"pool '{busiest.name}' sets the step while {told} waits: move share to '{busiest.name}'"
    for pool in idle:
        if pool.busy < UNUSED and len(working) > 2:
            yield f"pool '{pool.name}' works {pool.busy:.0%} of the time: its nodes could share the devices of another pool"


def _lengths(plan: Plan) -> Iterator[str]:
    told = plan.prediction
    if told.step_s > (1 + NOTICED) * told.period_s:
        yield (
            f"times vary, so that a step takes {told.step_s / told.period_s - 1:.0%} more than its mean times allow; a long tail of "
            "lengths is not shortened by more devices: cap max_tokens, raise depth, or generate continuously"
        )


def _hosts(plan: Plan) -> Iterator[str]:
    """Advise on a reward, or another node on the host, that a pool waits for."""
    pools = {pool.name for pool in plan.pools}
    writers = {channel.name: plan.node(channel.writer) for channel in plan.channels}
    for wait in plan.prediction.waits:
        writer = writers.get(wait.on)
        if writer is None or writer.pool is not None or wait.who not in pools or wait.reason != "data":
            continue
        if wait.seconds > NOTICED * plan.prediction.step_s and writer.seconds > wait.seconds / 2:
            yield (
                f"'{wait.who}' waits {wait.seconds / plan.prediction.step_s:.0%} of a step for '{writer.name}': make it faster or "
                "concurrent, let it work on chunks of a batch, or raise depth so that it overlaps"
            )


def _advise_buffers(plan: Plan) -> Iterator[str]:
    for loop in plan.loops:
        if not loop.hidden and loop.buffers == 1 and loop.depth > 0:
            yield f"moving '{loop.name}' lengthens the step: buffers=2 receives them while the generator decodes"


def _cores(plan: Plan) -> Iterator[str]:
    used = sum(pool.cpus for pool in plan.pools if pool.device == "cpu" and any(node.pool == pool.name for node in plan.nodes))
    if not plan.cluster.gpus and used > plan.cluster.cpus:
        yield f"the pools take {used} cores, but the cluster has {plan.cluster.cpus}: they will slow one another"


# Find the nodes, edges, pool orders and feedback edges on the critical cycle of a plan.


@dataclass(frozen=True)
class Critical:
    """The parts of a plan that set its period.

    `nodes` and `loops` (feedback edges) by name, edges as (writer, reader). `order` holds the nodes that wait for another node of their
    pool.
    """

    nodes: frozenset[str]
    edges: frozenset[tuple[str, str]]
    loops: frozenset[str]
    order: frozenset[str]


def critical(plan: Plan) -> Critical:
    """Find all parts of the plan on the predicted critical cycle. A wait for a free slot marks the edge that the slot belongs to."""
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
    """Find the dependencies between two events of a cycle: a single one, or a free slot for a put together with the reader of that put."""
    direct = [d for d in dependencies if (d.before, d.after) == (before, after) and not d.holds]
    if direct:
        return [min(direct, key=lambda d: d.credits)]
    rooms = [d for d in dependencies if d.before == before and d.holds]
    return next(([room, d] for room in rooms for d in dependencies if (d.before, d.after) == (room.after, after)), [])
