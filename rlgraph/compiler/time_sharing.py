"""Models that time-share the devices of a pool: who shares them, and the engine's wake before a time slice and sleep after it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rlgraph.compiler.plan import PlannedWorker
from rlgraph.compiler.schedule import Dependency, Event
from rlgraph.costs.functions import Setting, SleepCost
from rlgraph.graph.nodes import Graph

Sleeps = Mapping[str, SleepCost]  # of the model of each node, by name, where it shares its devices


@dataclass(frozen=True)
class TimeSlice:
    """Firings (node, chunk) of one model with no other model of its pool in between, and the wake and sleep events around them."""

    wake: str
    firings: tuple[tuple[str, int], ...]
    sleep: str


def wake_event(firing: str) -> str:
    """Name the event in which an engine takes its device memory back before a firing."""
    return f"wake for {firing}"


def sleep_event(firing: str) -> str:
    """Name the event in which an engine gives up its device memory after a firing."""
    return f"sleep after {firing}"


def shared_gpus(workers: Iterable[PlannedWorker]) -> frozenset[int]:
    """Find the GPUs that workers of several models time-share."""
    models: dict[int, set[str | None]] = {}
    for worker in workers:
        for gpu in worker.gpus:
            models.setdefault(gpu, set()).add(worker.model)
    return frozenset(gpu for gpu, found in models.items() if len(found) > 1)


def sleep_costs(graph: Graph, workers: Sequence[PlannedWorker], settings: Mapping[str, Setting], costs: Mapping[str, SleepCost]) -> Sleeps:
    """Collect the sleep cost of each node's model in its setting, for the models that time-share their devices."""
    found: dict[str, SleepCost] = {}
    gpus = shared_gpus(workers)
    for worker in workers:
        if worker.model is not None and worker.nodes[0] not in found and not gpus.isdisjoint(worker.gpus):
            found |= dict.fromkeys(worker.nodes, sleep_cost(graph, worker, settings, costs))
    return found


def sleep_cost(graph: Graph, worker: PlannedWorker, settings: Mapping[str, Setting], costs: Mapping[str, SleepCost]) -> SleepCost:
    """Scale the sleep cost of a worker's model to its setting."""
    sharded = all(graph.node(name).traits.work != "generate" for name in worker.nodes)
    return costs.get(worker.model or "", SleepCost()).at(settings[worker.nodes[0]], sharded=sharded)


def wake_and_sleep_events(graph: Graph, fired: Sequence[Event], sleeps: Sleeps) -> Iterator[Event]:
    """Yield the wake and sleep events of each time slice, in firing order. An engine stays asleep at steps at which nothing is due."""
    for pool in dict.fromkeys(event.pool for event in fired if event.node in sleeps):
        slices = groupby((event for event in fired if event.pool == pool), lambda event: graph.node(event.node).model)
        for firings in (list(firings) for _, firings in slices):
            dues = [graph.node(event.node).due for event in firings]
            share = max(1.0 if due is None else 1 / due.every for due in dues)
            first, last, cost = firings[0], firings[-1], sleeps[firings[0].node]
            yield replace(first, name=wake_event(first.name), kind="wake", seconds=cost.wake_s * share)
            yield replace(last, name=sleep_event(last.name), kind="sleep", seconds=cost.sleep_s * share)


def with_wake_and_sleep(ordered: Sequence[Event], flow: Sequence[Dependency]) -> list[Dependency]:
    """Insert the wake and sleep events into the dependencies of each time slice.

    An engine wakes when the weights it loads first, or the inputs of its first firing, have arrived. It sleeps after its last
    firing and before that firing puts its batch, so the dependencies of those puts move to the sleep event.
    """
    wakes = {(event.node, event.chunk): event.name for event in ordered if event.kind == "wake"}
    opens: dict[str, str] = {}  # the wake before each event that is the first of a time slice
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


def time_slices(ordered: Iterable[Event], nodes: Sequence[str]) -> tuple[TimeSlice, ...]:
    """List the time slices of the model that has these nodes; none where it has its devices to itself."""
    found: list[TimeSlice] = []
    for event in (event for event in ordered if event.node in nodes):
        if event.kind == "wake":
            found.append(TimeSlice(event.name, (), ""))
        elif event.kind == "fire" and found:
            found[-1] = replace(found[-1], firings=(*found[-1].firings, (event.node, event.chunk)))
        elif event.kind == "sleep":
            found[-1] = replace(found[-1], sleep=event.name)
    return tuple(found)
