"""Compile a graph for a cluster. Pure: no Ray, no GPU, no clock, no environment."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

from rlgraph.channels.factory import first_choice, transport_of
from rlgraph.columns import COLUMNS
from rlgraph.compiler import events
from rlgraph.compiler.certificate import certify
from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.device_split import FEW
from rlgraph.compiler.memory import check_gpu_settings, check_memory, needs
from rlgraph.compiler.placement import Counts, devices, model_names, nodes_needed, split, splits
from rlgraph.compiler.plan import (
    Plan,
    PlannedChannel,
    PlannedLoop,
    PlannedModel,
    PlannedNode,
    PlannedPool,
    PlannedSleep,
    PlannedWorker,
    Prediction,
)
from rlgraph.compiler.precision import precision_of
from rlgraph.compiler.schedule import MOVING, Schedule
from rlgraph.compiler.time_sharing import Sleeps, sleep_costs
from rlgraph.compiler.timed_schedule import candidates, first_workers, mean_seconds, scheduled, settings_on
from rlgraph.compiler.transport import batch_transports, host_transport, staged_versions, weights_transport
from rlgraph.costs.costs import Costs, checked
from rlgraph.costs.engine_widths import assumed
from rlgraph.costs.identified import not_told_apart
from rlgraph.costs.model_shapes import Shapes, known
from rlgraph.costs.plain_costs import warnings_of
from rlgraph.costs.roofline import device_of, roofline, with_sleep
from rlgraph.costs.sharing import assumed_sharing, check_shared, with_sharing
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph, Node
from rlgraph.simulate import continuous
from rlgraph.simulate.advice import advise
from rlgraph.simulate.forecast import Forecast, Settings, forecast
from rlgraph.simulate.play import Cycle, critical_cycle

NOTHING_KNOWN: Shapes = {}
HIDDEN = 0.01  # publishing that lengthens a step by less is called hidden


def compile_plan(graph: Graph, cluster: Cluster, costs: Costs | None = None, shapes: Shapes = NOTHING_KNOWN) -> Plan:
    """Choose the plan with the least predicted period among the splits that the graph's shares leave open.

    `shapes` are those of the models whose configuration is known. Memory is estimated from them and, without costs, time too.

    Raises PlanError if the graph does not fit the cluster or its memory, or the costs do not fit the graph.
    """
    priced = priced_for(graph, cluster, costs, shapes)
    counts, warnings = _best_split(graph, cluster, priced)
    return planned(graph, cluster, priced, counts, shapes, warnings)


def priced_for(graph: Graph, cluster: Cluster, costs: Costs | None, shapes: Shapes) -> Costs:
    """Take the costs given, or estimate them: by the roofline where devices and shapes are known, else nominal.

    Missing sleep costs of models that time-share devices are estimated too.
    """
    device = device_of(cluster.gpu) if cluster.gpu else None
    if costs is None and device is not None and known(graph, shapes):
        return with_sleep(graph, roofline(graph, device, shapes), cluster, device, shapes)
    return with_sleep(graph, with_sharing(graph, checked(graph, costs), device, shapes), cluster, device, shapes)


def planned(graph: Graph, cluster: Cluster, priced: Costs, counts: Counts, shapes: Shapes, warnings: tuple[str, ...] = ()) -> Plan:
    """Make the plan for pools of these device counts; `warnings` are about the choice of the counts."""
    check_gpu_settings(graph, cluster)
    check_shared(graph, shapes)
    workers, settings, schedule = scheduled(graph, cluster, counts, priced)
    sleeps = sleep_costs(graph, workers, settings, priced.sleep)
    memory = needs(graph, cluster, workers, settings, shapes, priced.lengths)
    check_memory(graph.name, memory)
    cycle = critical_cycle(schedule)
    expected = forecast(schedule, graph, settings, priced)
    step_s = expected.step_s if any(map(priced.varies, priced.nodes)) else cycle.period_s
    channels = (*_batch_channels(graph, workers), *_order_channels(graph, schedule, workers), *_earlier_channels(graph, workers))
    loops = tuple(_loops(graph, workers, schedule, cycle, expected, on_gpus=cluster.gpus > 0))
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
        hosts=nodes_needed({pool.name: counts[pool.name] for pool in graph.pools if pool.cpus is None}, cluster) if cluster.gpus else 1,
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
            left_out=tuple(continuous.left_out(graph, priced)),
            assumed=(
                *assumed(graph, settings, priced, "GPUs" if cluster.gpus else "cores"),
                *not_told_apart(graph, settings, priced),
                *assumed_sharing(graph, priced),
            ),
        ),
        certificate=certify(graph, schedule, channels, cycle.period_s),
        memory=memory,
        sleeps=tuple(_sleeps(workers, settings, sleeps, priced)),
        models=tuple(_models(graph, cluster, workers)),
        source=graph,
    )
    return replace(draft, prediction=replace(draft.prediction, advice=advise(draft)))


def _best_split(graph: Graph, cluster: Cluster, costs: Costs) -> tuple[Counts, tuple[str, ...]]:
    """Find the split of least period, and warnings about the choice. A split whose bound is above the best period is not tried.

    Raises PlanError where there is no split whose workers run on one host each.
    """
    divisions = splits(graph, cluster)
    if len(divisions) == 1:
        return next(iter(divisions)), ()
    tried: list[tuple[float, Counts]] = []
    refused: PlanError | None = None
    for counts, bound in candidates(graph, cluster, costs, divisions):
        if tried and (bound >= min(tried, key=itemgetter(0))[0] or len(tried) == FEW):
            break
        try:
            tried.append((critical_cycle(scheduled(graph, cluster, counts, costs)[2]).period_s, counts))
        except PlanError as error:  # a worker would lie on two hosts
            refused = refused or error
    if not tried:
        raise refused or AssertionError("there is at least one way to divide the devices")
    best = min(tried, key=itemgetter(0))[1]
    compared = list(divisions) if len(divisions) <= FEW else [next(iter(divisions)), best]
    return best, warnings_of((graph, costs, settings_on(graph, cluster, counts)) for counts in compared)


def _pools(graph: Graph, cluster: Cluster, counts: Counts, schedule: Schedule, step_s: float) -> list[PlannedPool]:
    gpus = devices(graph, cluster, counts)
    planned = []
    for pool in graph.pools:
        busy = sum(e.seconds for e in schedule.events if e.pool == pool.name) / step_s if step_s else 0.0
        on_gpu = bool(gpus[pool.name])
        planned.append(PlannedPool(pool.name, "gpu" if on_gpu else "cpu", gpus[pool.name], 0 if on_gpu else counts[pool.name], busy))
    return planned


def _nodes(graph: Graph, workers: Sequence[PlannedWorker], settings: Settings, costs: Costs) -> list[PlannedNode]:
    rows = max(node.rows for node in graph.nodes)
    return [
        PlannedNode(
            name=node.name,
            work=node.traits.work,
            model=next((w.model for w in workers if node.name in w.nodes), None),
            pool=node.pool.name if node.pool else None,
            workers=tuple(w.name for w in workers if node.name in w.nodes),
            reads=node.reads,
            writes=node.writes,
            rows=node.rows,
            seconds=mean_seconds(graph, node, settings[node.name], costs, rows),
            cost=costs.source_at(node.name, settings[node.name]),
            chunks=node.chunks,
            due=node.due,
            passes=settings[node.name].passes,
            any_devices=node.pool is not None and costs.is_plain(node.name),
            joins=continuous.planned(node),
        )
        for node in graph.nodes
    ]


def _models(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker]) -> Iterator[PlannedModel]:
    for name, model in model_names(graph).items():
        precision = precision_of(model, cluster)
        if precision is not None:
            given, ranks = model.traits.engine_args, sum(worker.model == name for worker in workers)
            yield PlannedModel(name, precision.dtype, precision.why, json.dumps(given) if given else "", split(model.traits, ranks))


def _sleeps(workers: Sequence[PlannedWorker], settings: Settings, sleeps: Sleeps, costs: Costs) -> Iterator[PlannedSleep]:
    for worker in workers:
        node = worker.nodes[0]
        if worker.model is not None and worker.rank == 0 and node in sleeps:
            cost = sleeps[node]
            source = costs.sleep_source(worker.model, settings[node])
            yield PlannedSleep(worker.model, cost.wake_s, cost.sleep_s, cost.bytes, source)


def _batch_channels(graph: Graph, workers: Sequence[PlannedWorker]) -> list[PlannedChannel]:
    """Plan one channel for each writer and transport; it carries the columns that its readers read."""
    planned = []
    for writer, by_transport in batch_transports(graph, workers).items():
        for transport, found in by_transport.items():
            needed = {c for reader in found for c in graph.forward.edges[writer, reader]["columns"]}
            columns = tuple(c for c in writer.writes if c in needed)
            name = writer.name if transport == first_choice("host") else f"{writer.name} ({transport})"
            readers = tuple(reader.name for reader in found)
            size = _bytes(graph, writer, columns) if transport_of(transport).writer_keeps else None
            held = events.slots(graph, writer) * writer.chunks
            planned.append(
                PlannedChannel(name, writer.name, readers, columns, transport, held, size, chunks=writer.chunks, stream=_stream(writer))
            )
    return planned


def _stream(writer: Node) -> str | None:
    return writer.stream.name if writer.stream else None


def _bytes(graph: Graph, writer: Node, columns: Sequence[str]) -> int | None:
    """Bound the bytes of the tensors of one message; None where a dimension has no known bound. Text is not counted."""
    trained = [node for node in graph.nodes if node.due is None]
    sizes = {dim: size for node in (*trained, writer) for dim, size in node.traits.dims.items()}
    total = 0
    for column in columns:
        spec = COLUMNS.get(column)
        if spec is None or any(dim not in sizes for dim in spec.dims[1:]):
            return None
        cells = writer.rows // writer.chunks
        for dim in spec.dims[1:]:
            cells *= sizes[dim]
        total += cells * spec.itemsize
    return total


def _order_channels(graph: Graph, schedule: Schedule, workers: Sequence[PlannedWorker]) -> list[PlannedChannel]:
    """Plan the order channels: a node of a pool tells the next one, in another process, that it is done, unless data does so anyway."""
    found = events.order_channels(graph, schedule.events, first_workers(workers))
    planned = [
        PlannedChannel(
            name=order.name,
            writer=order.writer.name,
            readers=(order.reader.name,),
            columns=(),
            transport=host_transport(workers, order.writer, order.reader),
            slots=order.slots,
            bytes=0,
            kind="order",
            credits=order.credits,
            chunks=order.writer.chunks,
            stream=_stream(order.writer),
        )
        for order in found
    ]
    for feedback in graph.feedbacks:
        for node in events.evaluations(graph, feedback):
            assert feedback.source is not None
            writer = feedback.source.node
            name, slots = events.order_channel_name(writer.name, node.name), events.ahead(graph) + 1
            planned.append(PlannedChannel(name, writer.name, (node.name,), (), host_transport(workers, writer, node), slots, 0, "order"))
    return planned


def _earlier_channels(graph: Graph, workers: Sequence[PlannedWorker]) -> Iterator[PlannedChannel]:
    """Plan the channel of each node that gets columns of an earlier step: it holds those that are not due, and one more."""
    for node in graph.nodes:
        if node.earlier is not None and node.earlier.source is not None:
            writer, columns, ahead = node.earlier.source.node, node.earlier.columns, node.earlier.depth + 1
            transport, chunks = host_transport(workers, writer, node), writer.chunks
            yield PlannedChannel(
                node.earlier.name if graph.earlier.count(node.earlier) == 1 else f"{node.earlier.name} to {node.name}",
                writer.name, (node.name,), columns, transport, (ahead + 1) * chunks, _bytes(graph, writer, columns), "earlier",
                ahead * chunks, chunks, _stream(writer),
            )  # fmt: skip


def _loops(
    graph: Graph, workers: Sequence[PlannedWorker], schedule: Schedule, cycle: Cycle, expected: Forecast, *, on_gpus: bool
) -> list[PlannedLoop]:
    free = replace(schedule, events=tuple(replace(e, seconds=0.0) if e.kind in MOVING else e for e in schedule.events))
    hidden = critical_cycle(free).period_s >= cycle.period_s * (1 - HIDDEN)
    planned = []
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        moving = {name for d in schedule.dependencies if d.reason == "loop" and d.via == feedback.name for name in (d.before, d.after)}
        publish_s = sum(e.seconds for e in schedule.events if e.kind in MOVING and e.name in moving)
        using, apart = events.readers(graph, feedback), events.evaluations(graph, feedback)
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
            transport=weights_transport(workers, feedback.source.node, using or apart, on_gpus=on_gpus),
            slots=staged_versions(feedback, on_gpus=on_gpus),
            publish_s=publish_s,
            hidden=hidden,
        )
        planned += [loop] if using else []
        for node in apart:
            own = replace(loop, name=events.evaluation_loop(feedback.name, node.name), readers=(node.name,), due=node.due)
            planned.append(replace(own, depth=0, buffers=1, latest=False, staleness=0.0, slots=1))
    return planned
