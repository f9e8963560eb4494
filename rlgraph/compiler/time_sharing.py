"""Models that have the devices of a pool in turns: who shares them, and what wakes before a turn and sleeps after it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rlgraph.compiler.plan import PlannedWorker
from rlgraph.compiler.schedule import Dependency, Event
from rlgraph.costs.functions import Setting, SleepCost
from rlgraph.graph.nodes import Graph

Sleeps = Mapping[str, SleepCost]  # of the model of each node, by name, where it shares its devices


@dataclass(frozen=True)
class Turn:
    """Firings of one model without one of another model of the pool in between: (node, chunk), and the events around them."""

    wake: str
    firings: tuple[tuple[str, int], ...]
    sleep: str


def wake_event(firing: str) -> str:
    """Return the name of the event in which an engine takes the memory of its devices again, before a firing."""
    return f"wake for {firing}"


def sleep_event(firing: str) -> str:
    """Return the name of the event in which an engine gives the memory of its devices back, after a firing."""
    return f"sleep after {firing}"


def shared(crew: Iterable[PlannedWorker]) -> frozenset[int]:
    """Return the GPUs that workers of several models have in turns."""
    models: dict[int, set[str | None]] = {}
    for worker in crew:
        for gpu in worker.gpus:
            models.setdefault(gpu, set()).add(worker.model)
    return frozenset(gpu for gpu, found in models.items() if len(found) > 1)


def sleeping(graph: Graph, crew: Sequence[PlannedWorker], settings: Mapping[str, Setting], costs: Mapping[str, SleepCost]) -> Sleeps:
    """Return what the model of each node that shares its devices takes in its setting; nothing where no cost is known."""
    found: dict[str, SleepCost] = {}
    in_turns = shared(crew)
    for worker in crew:
        if worker.model is not None and worker.nodes[0] not in found and not in_turns.isdisjoint(worker.gpus):
            found |= dict.fromkeys(worker.nodes, sleep_of(graph, worker, settings, costs))
    return found


def sleep_of(graph: Graph, worker: PlannedWorker, settings: Mapping[str, Setting], costs: Mapping[str, SleepCost]) -> SleepCost:
    """Return what the model of a worker takes to sleep and to wake in its setting."""
    sharded = all(graph.node(name).traits.work != "generate" for name in worker.nodes)
    return costs.get(worker.model or "", SleepCost()).at(settings[worker.nodes[0]], sharded=sharded)


def turn_events(graph: Graph, fired: Sequence[Event], sleeps: Sleeps) -> Iterator[Event]:
    """Yield what wakes and sleeps around firings in their order. Where nothing of a turn is due at a step, its engine stays asleep."""
    for pool in dict.fromkeys(event.pool for event in fired if event.node in sleeps):
        turns = groupby((event for event in fired if event.pool == pool), lambda event: graph.node(event.node).model)
        for firings in (list(turn) for _, turn in turns):
            dues = [graph.node(event.node).due for event in firings]
            share = max(1.0 if due is None else 1 / due.every for due in dues)
            first, last, cost = firings[0], firings[-1], sleeps[firings[0].node]
            yield replace(first, name=wake_event(first.name), kind="wake", seconds=cost.wake_s * share)
            yield replace(last, name=sleep_event(last.name), kind="sleep", seconds=cost.sleep_s * share)


def around_turns(ordered: Sequence[Event], flow: Sequence[Dependency]) -> list[Dependency]:
    """Return the flow with the events around a turn in it.

    An engine wakes once the weights it loads first, or the inputs of its first firing, are there. It sleeps after its last
    firing and before that puts: so what waits for a put, and what a put waits for, is about the sleep instead.
    """
    wakes = {(event.node, event.chunk): event.name for event in ordered if event.kind == "wake"}
    opens: dict[str, str] = {}  # the wake before each event that is the first of a turn
    for event in ordered:
        if event.kind in ("load", "fire") and (event.node, event.chunk) in wakes:
            opens[event.name] = wakes.pop((event.node, event.chunk))
    sleeps = {(event.node, event.chunk): event.name for event in ordered if event.kind == "sleep"}
    closes = {e.name: sleeps[e.node, e.chunk] for e in ordered if e.kind == "fire" and (e.node, e.chunk) in sleeps}
    found = []
    for d in flow:
        if d.reason in ("data", "order") and d.before in closes:
            found.append(replace(d, put=0))  # it is the firing that writes the batch
            d = replace(d, before=closes[d.before])
        elif d.reason == "slots":
            d = replace(d, before=closes.get(d.before, d.before), after=closes.get(d.after, d.after) if d.put else d.after)
        found.append(d)
        if d.after in opens and not d.holds:
            found.append(replace(d, after=opens[d.after]))
    return found


def turns_of(ordered: Iterable[Event], nodes: Sequence[str]) -> tuple[Turn, ...]:
    """Return the turns of the model that has these nodes; none where it has its devices to itself."""
    found: list[Turn] = []
    for event in (event for event in ordered if event.node in nodes):
        if event.kind == "wake":
            found.append(Turn(event.name, (), ""))
        elif event.kind == "fire" and found:
            found[-1] = replace(found[-1], firings=(*found[-1].firings, (event.node, event.chunk)))
        elif event.kind == "sleep":
            found[-1] = replace(found[-1], sleep=event.name)
    return tuple(found)
