"""Compile a graph for a cluster: split its devices, schedule it, make the plan, and certify its bounds for any timing.

Pure: no Ray, no GPU, no clock, no environment.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import networkx as nx

from rlgraph.channels.api import transport_of
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Node
from rlgraph.graph.rules import exact_models
from rlgraph.plan import events
from rlgraph.plan.advice import advise
from rlgraph.plan.channels import batch_transports, planned_channels, planned_loops
from rlgraph.plan.cluster import Cluster, precision_of
from rlgraph.plan.cost_functions import Setting, passes_of
from rlgraph.plan.costs import Costs, warnings_of
from rlgraph.plan.estimates import check_shared, ring_of
from rlgraph.plan.events import Sleeps, sleep_cost, sleep_costs
from rlgraph.plan.forecast import Settings, forecast, is_played, left_out, plan_join, saturated_seconds
from rlgraph.plan.memory import check_drafts, check_fp8, check_gpu_settings, check_moments_stay, needs_that_fit
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.placement import (
    FEW,
    Counts,
    Divisions,
    best_first,
    devices,
    first_workers,
    homes_of,
    host_count,
    model_names,
    place_workers,
    ranks_of,
    split_text,
    splits,
)
from rlgraph.plan.plan import (
    Certificate,
    LoopBound,
    Plan,
    PlannedChannel,
    PlannedModel,
    PlannedNode,
    PlannedPool,
    PlannedSleep,
    PlannedWorker,
    Prediction,
)
from rlgraph.plan.play import Timed, critical_cycle
from rlgraph.plan.roofline import assumptions, priced_for
from rlgraph.plan.schedule import Dependency, Event, Schedule

NOTHING_KNOWN: Shapes = {}
PLAYED = 12  # the most splits that are played with lengths and spreads


def compile_plan(graph: Graph, cluster: Cluster, costs: Costs | None = None, shapes: Shapes = NOTHING_KNOWN) -> Plan:
    """Choose the plan with the shortest predicted step among the splits that the graph's shares leave open.

    `shapes` are the shapes of the models with a known configuration. Memory is estimated from them and, without costs, time too.

    Raises PlanError if the graph does not fit the cluster or its memory, or the costs do not fit the graph.
    """
    return best_plan(graph, cluster, priced_for(graph, cluster, costs, shapes), shapes)


def best_plan(graph: Graph, cluster: Cluster, priced: Costs, shapes: Shapes) -> Plan:
    """Make the plan of the split with the shortest step under the costs that `priced_for` returned.

    Raises PlanError as `compile_plan` does.
    """
    counts, warnings = _find_best_counts(graph, cluster, priced)
    return build_plan(graph, cluster, priced, counts, shapes, warnings)


def build_plan(graph: Graph, cluster: Cluster, priced: Costs, counts: Counts, shapes: Shapes, warnings: tuple[str, ...] = ()) -> Plan:
    """Make the plan for pools of these device counts; `warnings` are about the choice of the counts."""
    check_gpu_settings(graph, cluster, shapes)
    check_moments_stay(graph)
    check_fp8(graph, shapes)
    check_drafts(graph)
    check_shared(graph, shapes)
    workers, settings, schedule = place_and_schedule(graph, cluster, counts, priced)
    sleeps = sleep_costs(graph, workers, settings, priced.sleep)
    memory = needs_that_fit(graph, cluster, workers, settings, shapes, priced)
    cycle = critical_cycle(schedule)
    expected = forecast(schedule, graph, settings, priced)
    uneven = any(map(priced.varies, priced.nodes)) or any(node.due is not None for node in graph.nodes)
    step_s = expected.step_s if uneven else cycle.period_s
    channels = planned_channels(graph, workers, schedule)
    loops = tuple(planned_loops(graph, workers, schedule, cycle, expected, shapes, priced.publish_bytes, on_gpus=cluster.gpus > 0))
    draft = Plan(
        graph=graph.name,
        cluster=cluster,
        pools=tuple(_pools(graph, cluster, counts, schedule, step_s)),
        nodes=tuple(_nodes(graph, workers, settings, priced)),
        workers=workers,
        channels=channels,
        loops=loops,
        schedule=schedule,
        window=events.window(graph),
        hosts=host_count({pool.name: counts[pool.name] for pool in graph.pools if pool.cpus is None}, cluster) if cluster.gpus else 1,
        prediction=Prediction(
            period_s=cycle.period_s,
            simulated_s=expected.step_s,
            critical=cycle.events,
            critical_credits=cycle.credits,
            cost=priced.source,
            advice=(),
            step_s=step_s,
            first_step_s=expected.first_step_s,
            waits=expected.waits(),
            warnings=warnings,
            left_out=tuple(left_out(graph, priced)),
            assumed=tuple(assumptions(graph, settings, priced, "GPUs" if cluster.gpus else "cores")),
        ),
        certificate=certify(graph, schedule, channels, cycle.period_s),
        memory=memory,
        sleeps=tuple(_sleeps(workers, settings, sleeps, priced)),
        models=tuple(_models(graph, cluster, workers, shapes)),
        source=graph,
    )
    return replace(draft, prediction=replace(draft.prediction, advice=advise(draft)))


def _find_best_counts(graph: Graph, cluster: Cluster, costs: Costs) -> tuple[Counts, tuple[str, ...]]:
    """Find the split of the shortest step, and warnings about the choice. A split whose bound is above the best step is not tried.

    Raises PlanError if no split lets each worker run on one host.
    """
    divisions = splits(graph, cluster)
    if len(divisions) == 1:
        return next(iter(divisions)), ()
    plays = any(map(costs.varies, costs.nodes))
    tried: list[tuple[float, Counts]] = []
    refused: PlanError | None = None
    for counts, bound in candidates(graph, cluster, costs, divisions):
        if tried and (bound >= min(tried, key=itemgetter(0))[0] or len(tried) == (PLAYED if plays else FEW)):
            break
        try:
            _, settings, schedule = place_and_schedule(graph, cluster, counts, costs)
        except PlanError as error:  # a worker would span two hosts
            refused = refused or error
        else:
            step_s = forecast(schedule, graph, settings, costs).step_s if plays else critical_cycle(schedule).period_s
            tried.append((step_s, counts))
    if not tried:
        raise refused or AssertionError("there is at least one way to divide the devices")
    best = min(tried, key=itemgetter(0))[1]
    compared = list(divisions) if len(divisions) <= FEW else [next(iter(divisions)), best]
    return best, warnings_of((graph, costs, settings_on(graph, cluster, counts)) for counts in compared)


def place_and_configure(graph: Graph, cluster: Cluster, counts: Counts) -> tuple[tuple[PlannedWorker, ...], dict[str, Setting]]:
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


def place_and_schedule(
    graph: Graph, cluster: Cluster, counts: Counts, costs: Costs
) -> tuple[tuple[PlannedWorker, ...], dict[str, Setting], Schedule]:
    """Place the workers and build the schedule with mean seconds."""
    workers, settings = place_and_configure(graph, cluster, counts)
    hosts = first_workers(workers)
    seconds = {n.name: mean_seconds(graph, n, settings[n.name], costs) * _rate(n) for n in graph.nodes}
    batches = {writer: list(by_transport.values()) for writer, by_transport in batch_transports(graph, workers).items()}
    schedule = events.schedule(graph, hosts, seconds, costs, sleep_costs(graph, workers, settings, costs.sleep), batches)
    return workers, settings, _with_chunks(schedule, graph, settings, costs)


def mean_seconds(graph: Graph, node: Node, setting: Setting, costs: Costs) -> float:
    """Predict the mean seconds of a firing. If batches join others, every version is assumed to arrive in time."""
    if is_played(graph, node, costs):
        return saturated_seconds(node, setting, costs, graph.rows)
    return costs.mean(node.name, setting, graph.rows)


def bound_seconds(graph: Graph, node: Node, setting: Setting, costs: Costs) -> float:
    """Predict the least mean seconds from one firing to the next. Engines that need not wait for each other have their own mean, since an
    engine that is done begins the next batch; with all edges at depth 0, a step waits for the last engine."""
    waits = bool(graph.feedbacks) and all(feedback.depth == 0 for feedback in graph.feedbacks)
    if waits or is_played(graph, node, costs):
        return mean_seconds(graph, node, setting, costs)
    return costs.mean(node.name, setting, graph.rows, of_each=True)


def _rate(node: Node) -> float:
    """Average the firings of a node over the steps: below 1 for a node that is due at some steps only."""
    return 1.0 if node.due is None else 1 / node.due.every


def _with_chunks(schedule: Schedule, graph: Graph, settings: Settings, costs: Costs) -> Schedule:
    """Set the time of each chunk of a batch: the first chunk of a rollout lasts longest."""
    shares: dict[str, list[float]] = {}
    for node in (node for node in graph.nodes if node.chunks > 1):
        cost = costs.cost_of(node.name)
        shares[node.name] = (
            cost.chunk_shares(settings[node.name], costs.lengths, costs.choose_draws(graph.rows), graph.rows, node).mean(axis=0).tolist()
        )
    if not shares:
        return schedule

    def with_time(event: Event) -> Event:
        if event.kind != "fire" or event.node not in shares:
            return event
        return replace(event, seconds=event.seconds * len(shares[event.node]) * shares[event.node][event.chunk])

    return replace(schedule, events=tuple(map(with_time, schedule.events)))


def candidates(graph: Graph, cluster: Cluster, costs: Costs, divisions: Divisions) -> Iterator[tuple[Counts, float]]:
    """Yield divisions with a lower bound of their period, or, for many divisions, nearly the period itself; the shortest first."""

    def load(counts: Counts) -> float:  # of the busiest pool
        settings = settings_on(graph, cluster, counts)
        return max(
            sum(bound_seconds(graph, n, settings[n.name], costs) * _rate(n) for n in graph.nodes if n.pool is p) for p in graph.pools
        )

    if len(divisions) <= FEW:  # all of them: more ranks of a small model may take longer, which `best_first` does not expect
        yield from sorted(((counts, load(counts)) for counts in divisions), key=itemgetter(1))
        return
    period = period_on(graph, cluster, costs, next(iter(divisions)))
    yield from ((division.counts, division.period_s) for division in best_first(divisions, period))


def period_on(graph: Graph, cluster: Cluster, costs: Costs, like: Counts) -> Callable[[Counts], float]:
    """Make a function that predicts the period of other device counts, using the schedule of `like` with the seconds of those devices.

    It is an approximation: with other counts other channels can leave a host, which changes the order of puts.
    """
    workers, settings, schedule = place_and_schedule(graph, cluster, like, costs)
    with_time, seconds = Timed(schedule), schedule.seconds()
    asleep = sleep_costs(graph, workers, settings, costs.sleep)
    homes = homes_of(workers)
    usual = {node.name: mean_seconds(graph, node, settings[node.name], costs) for node in graph.nodes}

    def scale(event: Event, there: Settings) -> float:
        if event.kind == "fire":
            now, then = bound_seconds(graph, graph.node(event.node), there[event.node], costs), usual[event.node]
        elif event.kind in ("wake", "sleep"):
            new, old = sleep_cost(graph, homes[event.node][0], there, costs.sleep), asleep[event.node]
            now, then = (new.wake_s, old.wake_s) if event.kind == "wake" else (new.sleep_s, old.sleep_s)
        else:
            return 1.0
        return now / then if then else 0.0

    def period(counts: Counts) -> float:
        there = settings_on(graph, cluster, counts)
        return with_time.period_s({event.name: seconds[event.name] * scale(event, there) for event in schedule.events})

    return period


def _pools(graph: Graph, cluster: Cluster, counts: Counts, schedule: Schedule, step_s: float) -> list[PlannedPool]:
    gpus = devices(graph, cluster, counts)
    planned = []
    for pool in graph.pools:
        worked_s = sum(e.seconds for e in schedule.events if e.pool == pool.name)
        busy = min(worked_s / step_s, 1.0) if step_s else 0.0  # versions are sent while the pool's next node works: the sum may be longer
        on_gpu = bool(gpus[pool.name])
        planned.append(PlannedPool(pool.name, "gpu" if on_gpu else "cpu", gpus[pool.name], 0 if on_gpu else counts[pool.name], busy))
    return planned


def _nodes(graph: Graph, workers: Sequence[PlannedWorker], settings: Settings, costs: Costs) -> list[PlannedNode]:
    homes = homes_of(workers)
    return [
        PlannedNode(
            name=node.name,
            work=node.traits.work,
            model=homes[node.name][0].model,
            pool=node.pool.name if node.pool else None,
            workers=tuple(worker.name for worker in homes[node.name]),
            reads=node.reads,
            writes=node.writes,
            rows=node.rows,
            seconds=mean_seconds(graph, node, settings[node.name], costs),
            cost=costs.source_at(node.name, settings[node.name]),
            chunks=node.chunks,
            due=node.due,
            passes=settings[node.name].passes,
            any_devices=node.pool is not None and costs.is_plain(node.name),
            joins=plan_join(node),
        )
        for node in graph.nodes
    ]


def _models(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker], shapes: Shapes) -> Iterator[PlannedModel]:
    for name, model in model_names(graph).items():
        precision = precision_of(model, cluster)
        if precision is not None:
            given, ranks = model.traits.engine_args, sum(worker.model == name for worker in workers)
            shared = split_text(model.traits, ranks, ring_of(model.traits, shapes.get(model.path)))
            yield PlannedModel(name, precision.dtype, precision.why, json.dumps(given) if given else "", shared)


def _sleeps(workers: Sequence[PlannedWorker], settings: Settings, sleeps: Sleeps, costs: Costs) -> Iterator[PlannedSleep]:
    for worker in workers:
        node = worker.nodes[0]
        if worker.model is not None and worker.rank == 0 and node in sleeps:
            cost = sleeps[node]
            source = costs.sleep_source(worker.model, settings[node])
            yield PlannedSleep(worker.model, cost.wake_s, cost.sleep_s, cost.bytes, source)


def certify(graph: Graph, schedule: Schedule, channels: Sequence[PlannedChannel], period_s: float) -> Certificate:
    """Derive the bound on staleness, freedom from deadlock, and the most bytes of tensors that can be buffered."""
    sizes = [
        None if channel.bytes is None else channel.slots * channel.bytes
        for channel in channels
        if transport_of(channel.transport).writer_keeps
    ]
    loops = loop_bounds(graph, schedule)
    return Certificate(
        staleness_bound=max((loop.staleness for loop in loops), default=0),
        deadlock_free=deadlock_free(schedule),
        open_batches=events.open_batches(graph),
        buffered_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        period_s=period_s,
        loops=loops,
        exact=bool(exact_models(graph)),
    )


def deadlock_free(schedule: Schedule) -> bool:
    """Check that every cycle holds a credit: then the marked graph is live (Commoner, 1971).

    The check counts in rounds. No dependency may have fewer than 0 credits. Dependencies with 0 wait for an event of the same round, so
    they may not form a cycle.
    """
    lag = {event.name: event.lag for event in schedule.events}
    ahead = any(d.credits + lag[d.after] - lag[d.before] < 0 for d in schedule.dependencies)
    return not ahead and bool(nx.is_directed_acyclic_graph(nx.DiGraph(list(schedule.within_rounds()))))


def loop_bounds(graph: Graph, schedule: Schedule) -> tuple[LoopBound, ...]:
    """Bound, for each loop, the batches that are open and the versions that one is behind when it is trained.

    The credits on a cycle never change. So the credits on the way of a version, from its publish through rollout and update to the next
    publish, bound the open batches; a batch is behind by all of them except the one in service. The order within a pool can keep fewer
    batches open, but makes no version newer. Edges that lead only to evaluations have no bound.
    """
    credits = _credits(d for d in schedule.dependencies if d.reason in ("loop", "data"))
    found = []
    for feedback in graph.feedbacks:
        publish = events.publish_event(feedback.name)
        firings = [firing for node in events.readers(graph, feedback) if node.due is None for firing in events.fire_events(node)]
        opened = [
            nx.shortest_path_length(credits, publish, firing, weight="credits")
            + nx.shortest_path_length(credits, firing, publish, weight="credits")
            for firing in firings
        ]
        if opened:
            found.append(LoopBound(feedback.name, max(0, *(count - 1 for count in opened)), max(opened)))
    return tuple(found)


def _credits(dependencies: Iterable[Dependency]) -> "nx.DiGraph[str]":
    graph: nx.DiGraph[str] = nx.DiGraph()
    for d in dependencies:
        fewest = min(d.credits, graph.edges[d.before, d.after]["credits"]) if graph.has_edge(d.before, d.after) else d.credits
        graph.add_edge(d.before, d.after, credits=fewest)
    return graph
