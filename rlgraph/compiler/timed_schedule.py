"""The schedule of a graph on so many devices: its processes, the setting of each node, and the seconds of each event."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rlgraph.compiler import events
from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.device_split import FEW, best_first
from rlgraph.compiler.placement import Counts, Divisions, place_workers, ranks_of
from rlgraph.compiler.plan import PlannedWorker
from rlgraph.compiler.schedule import Event, Schedule
from rlgraph.compiler.time_sharing import sleep_cost, sleep_costs
from rlgraph.compiler.transport import batch_transports
from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import Setting
from rlgraph.costs.microbatch_count import passes_of
from rlgraph.graph.nodes import Graph, Node
from rlgraph.simulate import continuous
from rlgraph.simulate.forecast import Settings
from rlgraph.simulate.play import Timed


def settled(graph: Graph, cluster: Cluster, counts: Counts) -> tuple[tuple[PlannedWorker, ...], dict[str, Setting]]:
    """Place the workers, and work out the setting of each node."""
    ordered = sorted(graph.nodes, key=lambda node: events.place(graph, node))
    workers = place_workers(graph, cluster, counts, {node.name: index for index, node in enumerate(ordered)})
    return workers, settings_on(graph, cluster, counts)


def settings_on(graph: Graph, cluster: Cluster, counts: Counts) -> dict[str, Setting]:
    """Work out the setting of each node for pools of these device counts."""
    found = {}
    for node in graph.nodes:
        count = counts[node.pool.name] if node.pool else 1
        engines = ranks_of(node.model, count, cluster) if node.model is not None else 1
        found[node.name] = Setting(count, engines, node.rows, passes_of(node, cluster.gpus))
    return found


def scheduled(
    graph: Graph, cluster: Cluster, counts: Counts, costs: Costs
) -> tuple[tuple[PlannedWorker, ...], dict[str, Setting], Schedule]:
    """Place the workers and build the schedule with mean seconds."""
    workers, settings = settled(graph, cluster, counts)
    hosts = first_workers(workers)
    rows = max(node.rows for node in graph.nodes)
    seconds = {n.name: mean_seconds(graph, n, settings[n.name], costs, rows) * _rate(n) for n in graph.nodes}
    batches = {writer: list(by_transport.values()) for writer, by_transport in batch_transports(graph, workers).items()}
    schedule = events.schedule(graph, hosts, seconds, costs, sleep_costs(graph, workers, settings, costs.sleep), batches)
    return workers, settings, _with_chunks(schedule, graph, settings, costs, rows)


def mean_seconds(graph: Graph, node: Node, setting: Setting, costs: Costs, rows: int) -> float:
    """Predict the mean seconds of a firing. Where batches join others, every version is taken to arrive in time."""
    if continuous.is_played(graph, node, costs):
        return continuous.saturated(node, setting, costs, rows)
    return costs.mean(node.name, setting, rows)


def _rate(node: Node) -> float:
    """Average the firings of a node over the steps: below 1 for a node that is due at some steps only."""
    return 1.0 if node.due is None else 1 / node.due.every


def _with_chunks(schedule: Schedule, graph: Graph, settings: Settings, costs: Costs, rows: int) -> Schedule:
    """Give each chunk of a batch its own time: the first chunk of a rollout takes longest."""
    shares: dict[str, list[float]] = {}
    for node in (node for node in graph.nodes if node.chunks > 1):
        cost = costs.cost_of(node.name)
        shares[node.name] = (
            cost.chunk_shares(settings[node.name], costs.lengths, costs.steps_drawn(rows), rows, node.chunks).mean(axis=0).tolist()
        )
    if not shares:
        return schedule

    def timed(event: Event) -> Event:
        if event.kind != "fire" or event.node not in shares:
            return event
        return replace(event, seconds=event.seconds * len(shares[event.node]) * shares[event.node][event.chunk])

    return replace(schedule, events=tuple(map(timed, schedule.events)))


def first_workers(workers: Sequence[PlannedWorker]) -> dict[str, str]:
    """Name the first worker of each node; nodes that run in the same processes have the same one."""
    return {node: worker.name for worker in reversed(workers) for node in worker.nodes}


def candidates(graph: Graph, cluster: Cluster, costs: Costs, divisions: Divisions) -> Iterator[tuple[Counts, float]]:
    """Yield divisions with a lower bound of their period, or, for many divisions, nearly the period itself; the shortest first."""
    if len(divisions) > FEW:
        period = period_on(graph, cluster, costs, next(iter(divisions)))
        yield from ((division.counts, division.period_s) for division in best_first(divisions, period))
        return
    rows = max(node.rows for node in graph.nodes)

    def load(counts: Counts) -> float:  # of the busiest pool
        settings = settings_on(graph, cluster, counts)
        return max(
            sum(mean_seconds(graph, n, settings[n.name], costs, rows) * _rate(n) for n in graph.nodes if n.pool is p) for p in graph.pools
        )

    every = [(load(counts), index, counts) for index, counts in enumerate(divisions)]
    yield from ((counts, bound) for bound, _, counts in sorted(every, key=lambda each: each[:2]))


def period_on(graph: Graph, cluster: Cluster, costs: Costs, like: Counts) -> Callable[[Counts], float]:
    """Make a function that predicts the period of other device counts, by the schedule of `like` with the seconds of those devices.

    It is an approximation: with other counts other channels can leave a host, which changes the order of puts.
    """
    workers, settings, schedule = scheduled(graph, cluster, like, costs)
    timed, seconds, rows = Timed(schedule), schedule.seconds(), max(node.rows for node in graph.nodes)
    asleep = sleep_costs(graph, workers, settings, costs.sleep)
    first = {name: worker for worker in reversed(workers) for name in worker.nodes}
    usual = {node.name: mean_seconds(graph, node, settings[node.name], costs, rows) for node in graph.nodes}

    def scale(event: Event, there: Settings) -> float:
        if event.kind == "fire":
            now, then = mean_seconds(graph, graph.node(event.node), there[event.node], costs, rows), usual[event.node]
        elif event.kind in ("wake", "sleep"):
            new, old = sleep_cost(graph, first[event.node], there, costs.sleep), asleep[event.node]
            now, then = (new.wake_s, old.wake_s) if event.kind == "wake" else (new.sleep_s, old.sleep_s)
        else:
            return 1.0
        return now / then if then else 0.0

    def period(counts: Counts) -> float:
        there = settings_on(graph, cluster, counts)
        return timed.period_s({event.name: seconds[event.name] * scale(event, there) for event in schedule.events})

    return period
