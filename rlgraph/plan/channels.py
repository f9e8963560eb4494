"""Plan the channels between nodes and the feedback edges: what each carries, its slots, and how it moves, by where workers run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from rlgraph.channels.factory import TRANSPORTS, Reach, first_choice, transport_of
from rlgraph.columns import COLUMNS
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Feedback, Graph, Node
from rlgraph.plan import events
from rlgraph.plan.forecast import Forecast
from rlgraph.plan.model_shapes import Shapes
from rlgraph.plan.placement import first_workers
from rlgraph.plan.plan import Plan, PlannedAdapter, PlannedChannel, PlannedLoop, PlannedWorker
from rlgraph.plan.play import Cycle, critical_cycle
from rlgraph.plan.schedule import MOVING, Schedule

Homes: TypeAlias = Mapping[str, Sequence[PlannedWorker]]  # the workers of each node, by its name
HIDDEN = 0.01  # publishing that lengthens a step by less is called hidden


def homes_of(workers: Sequence[PlannedWorker]) -> Homes:
    """List the workers of each node."""
    found: dict[str, list[PlannedWorker]] = {}
    for worker in workers:
        for node in worker.nodes:
            found.setdefault(node, []).append(worker)
    return found


def host_transport(homes: Homes, writer: Node, *readers: Node) -> str:
    """Choose the transport for columns in host memory: one between hosts only if the nodes' workers are on several hosts."""
    return first_choice(_reach(homes, writer, *readers))


def _reach(homes: Homes, *nodes: Node) -> Reach:
    return "host" if len({worker.host for node in nodes for worker in homes[node.name]}) == 1 else "hosts"


def batch_transports(graph: Graph, workers: Sequence[PlannedWorker]) -> Mapping[Node, Mapping[str, Sequence[Node]]]:
    """Group the readers of each node by transport: one channel for each, in the order in which the writer puts."""
    homes = homes_of(workers)
    process = {name: own[-1].model or own[-1].name for name, own in homes.items()}
    found: dict[Node, dict[str, list[Node]]] = {}
    for writer in graph.nodes:
        found[writer] = {}
        for reader in graph.forward.successors(writer):
            transport = first_choice("process") if process[reader.name] == process[writer.name] else host_transport(homes, writer, reader)
            found[writer].setdefault(transport, []).append(reader)
    return found


def weights_transport(homes: Homes, writer: Node, readers: Sequence[Node], *, on_gpus: bool) -> str:
    """Choose the transport for weights: GPU memory if the writer has GPUs, and between hosts only if all readers have them too."""
    reach = _reach(homes, writer, *readers)
    all_on_gpus = reach == "host" or all(worker.gpus for node in (writer, *readers) for worker in homes[node.name])
    return first_choice(reach, "gpu" if on_gpus and all_on_gpus else "host")


def planned_channels(graph: Graph, workers: Sequence[PlannedWorker], schedule: Schedule) -> tuple[PlannedChannel, ...]:
    """Plan all channels of the forward graph: for batches, for the order within a pool, and for columns of an earlier step."""
    return (*_batch_channels(graph, workers), *_order_channels(graph, schedule, workers), *_earlier_channels(graph, workers))


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


def slot_bytes(graph: Graph, workers: Sequence[PlannedWorker]) -> int:
    """Estimate the slots of batches in memory of the fullest host, as far as their sizes are known."""
    homes = {name: worker.host for worker in reversed(workers) for name in worker.nodes}
    held: dict[int, int] = {}
    for channel in _batch_channels(graph, workers):
        if channel.bytes and transport_of(channel.transport).writer_keeps == "host":
            held[homes[channel.writer]] = held.get(homes[channel.writer], 0) + channel.slots * channel.bytes
    return max(held.values(), default=0)


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
    homes = homes_of(workers)
    found = events.order_channels(graph, schedule.events, first_workers(workers))
    planned = [
        PlannedChannel(
            name=order.name,
            writer=order.writer.name,
            readers=(order.reader.name,),
            columns=(),
            transport=host_transport(homes, order.writer, order.reader),
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
            planned.append(PlannedChannel(name, writer.name, (node.name,), (), host_transport(homes, writer, node), slots, 0, "order"))
    return planned


def _earlier_channels(graph: Graph, workers: Sequence[PlannedWorker]) -> Iterator[PlannedChannel]:
    """Plan the channel of each node that gets columns of an earlier step: it holds those that are not due, and one more."""
    homes = homes_of(workers)
    for node in graph.nodes:
        if node.earlier is not None and node.earlier.source is not None:
            writer, columns, ahead = node.earlier.source.node, node.earlier.columns, node.earlier.depth + 1
            transport, chunks = host_transport(homes, writer, node), writer.chunks
            yield PlannedChannel(
                node.earlier.name if graph.earlier.count(node.earlier) == 1 else f"{node.earlier.name} to {node.name}",
                writer.name, (node.name,), columns, transport, (ahead + 1) * chunks, _bytes(graph, writer, columns), "earlier",
                ahead * chunks, chunks, _stream(writer),
            )  # fmt: skip


def planned_loops(
    graph: Graph,
    workers: Sequence[PlannedWorker],
    schedule: Schedule,
    cycle: Cycle,
    expected: Forecast,
    shapes: Shapes,
    publish_bytes: int | None,
    *,
    on_gpus: bool,
) -> list[PlannedLoop]:
    """Plan the feedback edges, with `publish_bytes` a version. Publishing is hidden if a step without it would be hardly shorter."""
    free = replace(schedule, events=tuple(replace(e, seconds=0.0) if e.kind in MOVING else e for e in schedule.events))
    hidden = critical_cycle(free).period_s >= cycle.period_s * (1 - HIDDEN)
    planned, homes = [], homes_of(workers)
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        moving = {name for d in schedule.dependencies if d.reason == "loop" and d.via == feedback.name for name in (d.before, d.after)}
        publish_s = sum(e.seconds for e in schedule.events if e.kind in MOVING and e.name in moving)
        using, apart = events.readers(graph, feedback), events.evaluations(graph, feedback)
        adapter = PlannedAdapter.of(feedback.source.node.model, shapes)
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
            transport=weights_transport(homes, feedback.source.node, using or apart, on_gpus=on_gpus),
            slots=staged_versions(feedback, on_gpus=on_gpus),
            publish_s=publish_s,
            hidden=hidden,
            adapter=adapter,
            bytes=adapter.bytes if adapter is not None and publish_bytes is None else publish_bytes,
        )
        planned += [loop] if using else []
        for node in apart:
            own = replace(loop, name=events.evaluation_loop(feedback.name, node.name), readers=(node.name,), due=node.due)
            planned.append(replace(own, depth=0, buffers=1, latest=False, staleness=0.0, slots=1))
    return planned


def with_transport(plan: Plan, asked: str) -> Plan:
    """Send all that crosses processes of one host by the transport that a launch asks for.

    Raises PlanError for an unknown transport, or one that this plan cannot use.
    """
    default = first_choice("host")
    offered = [name for name, found in TRANSPORTS.items() if (found.reach, found.writer_keeps, found.carrier) == ("host", "host", None)]
    if asked not in offered:
        raise PlanError(f"transport='{asked}': a launch chooses one of {offered}, between processes of one host; leave it out elsewhere")
    ends: tuple[PlannedChannel | PlannedLoop, ...] = (*plan.channels, *plan.loops)
    beyond = [end for end in ends if TRANSPORTS[end.transport].reach == "hosts"]
    on_gpus = [end for end in ends if TRANSPORTS[end.transport].writer_keeps == "gpu"]
    if asked != default and beyond:
        raise PlanError(
            f"transport='{asked}' and {plan.cluster.hosts} hosts: '{beyond[0].name}' goes from host to host, where a channel of "
            f"transport '{asked}' can hang; compile for one host, or leave transport out"
        )
    if asked != default and on_gpus:
        raise PlanError(
            f"transport='{asked}': '{on_gpus[0].name}' goes from GPU to GPU by transport '{on_gpus[0].transport}', and '{asked}' would "
            "take it through the host's memory; leave transport out"
        )
    if not any(end.transport == default for end in ends):
        raise PlanError(f"transport='{asked}' changes nothing: in this plan no channel leaves its process; leave transport out")

    return replace(
        plan,
        channels=tuple(replace(channel, transport=asked) if channel.transport == default else channel for channel in plan.channels),
        loops=tuple(replace(loop, transport=asked) if loop.transport == default else loop for loop in plan.loops),
    )


def check_encrypted(plan: Plan) -> None:
    """Raise PlanError for a plan that `launch(encrypt=True)` cannot encrypt: one of a single host, or with a link of another library."""
    if plan.cluster.hosts == 1:
        raise PlanError(
            "launch(encrypt=True): the plan runs on this host alone and sends nothing to another; leave encrypt out, or compile for a "
            "cluster of several hosts"
        )
    ends: tuple[PlannedChannel | PlannedLoop, ...] = (*plan.channels, *plan.loops)
    for end in ends:
        found = TRANSPORTS[end.transport]
        if found.reach == "hosts" and not found.encrypts:
            raise PlanError(
                f"launch(encrypt=True): '{end.name}' goes from host to host by '{found.name}', which encrypts nothing; place its two "
                "ends on one host, or keep the hosts in a network that encrypts by itself"
            )
    for model in {worker.model for worker in plan.workers if worker.model}:
        if len({worker.host for worker in plan.workers if worker.model == model}) > 1:
            raise PlanError(
                f"launch(encrypt=True): the ranks of '{model}' are on several hosts, and PyTorch's collectives encrypt nothing; give it as "
                "many ranks as fit on one host, or keep the hosts in a network that encrypts by itself"
            )


def lies_in_ray(plan: Plan) -> bool:
    """Tell whether messages of the plan lie in Ray's object store."""
    taken = {channel.transport for channel in plan.channels} | {loop.transport for loop in plan.loops}
    return any(TRANSPORTS[name].needs_ray for name in taken)


def staged_versions(feedback: Feedback, *, on_gpus: bool) -> int:
    """Count the weight versions that are staged at once, at most.

    After the last step `depth` versions and the newest are unread, and none may wait for room. On a GPU, where memory is
    scarce, a second buffer of the reader holds one of them.
    """
    return max(feedback.depth + 2 - feedback.buffers, 1) if on_gpus else feedback.depth + 1
