"""The part of the plan that a worker needs, as values that can be sent to another process."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from rlgraph.channels.api import Onward, Site, Transport, first_choice, transport_of
from rlgraph.columns import Column
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Due, Model, Node, Operation
from rlgraph.graph.rules import exact_models
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.prompts import Prompts
from rlgraph.plan.channels import Route, hosts_of, routes
from rlgraph.plan.checkpoint_cut import count_steps_before_cut, lookaheads, open_nodes
from rlgraph.plan.cluster import ITEMSIZE
from rlgraph.plan.events import TimeSlice, time_slices
from rlgraph.plan.memory import shared_bases
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop, PlannedWorker

MOST_FILE_NAME = 120  # characters of a file's name before its ending; file systems have room for 255 bytes


def file_name(worker: str) -> str:
    """Name the files of a worker, whose name comes from a user's node and may be any text.

    >>> file_name("policy[1]"), file_name("reward/format"), file_name("..")
    ('policy[1]', 'reward%2Fformat', '%2E.')
    """
    name = quote(worker, safe="[]")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) <= MOST_FILE_NAME:
        return name
    return f"{name[: MOST_FILE_NAME - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class NodeSpec:
    """A node as its worker sees it. `columns` lists for each writer the columns to take, their names here, and the repeats of each row.

    It fires `chunks` times per step, once per chunk of the batch. It makes these chunks itself, or `follows` the chunks of the
    rollout with this name; then it takes from a whole batch the rows that belong to its chunk.
    """

    name: str
    operation: Operation
    writes: tuple[str, ...]
    columns: Mapping[str, tuple[tuple[str, str, int], ...]]
    chunks: int = 1
    follows: str | None = None
    due: Due | None = None
    count: int | None = None  # rows that a firing writes; None if they depend on its rank, or some steps have none
    front: str = ""  # prefix of the names of its metrics

    @property
    def traits(self) -> NodeTraits:
        """The traits of its operation."""
        return self.operation.traits

    def messages(self, channel: PlannedChannel, step: int, chunk: int) -> range:
        """The indices of the messages that a firing takes from a channel: one chunk, or all of a step."""
        first = step * channel.chunks - channel.credits
        if self.follows is not None and self.follows == channel.stream:
            return range(first + chunk, first + chunk + 1)
        return range(first, first + channel.chunks)

    def rows(self, column: Column, channel: PlannedChannel, chunk: int) -> Column:
        """Select the rows of a column that belong to a chunk: all of them, unless a whole batch was taken."""
        if self.follows is None or self.follows == channel.stream:
            return column
        size = len(column) // self.chunks
        return column[chunk * size : (chunk + 1) * size]


@dataclass(frozen=True)
class EdgeEndpoints:
    """One writing rank of a channel or a loop: its address, and the worker from which each reader receives its messages."""

    name: str
    address: str
    slots: int
    writer: str
    route: Route
    hosts: Mapping[str, int]  # of the writer and the readers
    transport: Transport  # the value, so that the worker need not register it

    def in_process(self, ends: dict[str, Any]) -> Site:
        """The site of both ends if all ends are in one process."""
        return Site(self.name, self.slots, len(self.route), self.address, here=ends)

    def passes_on(self, worker: str) -> bool:
        """Whether other readers receive their messages from this one."""
        return worker != self.writer and worker in self.route.values()

    def place(self, worker: str) -> str:
        """The address at which others receive messages from this worker: a path, and the name of its port if it has one."""
        return self.address if worker == self.writer else f"{self.address}+{list(self.route).index(worker)}"

    def listener(self, spec: "WorkerSpec", ends: dict[str, Any]) -> Site:
        """The site at which a worker listens for its readers."""
        worker = spec.worker.name
        fed = [reader for reader, feeder in self.route.items() if feeder == worker]
        local = sum(self._share_memory(worker, reader) for reader in fed)
        return replace(self._site(spec, ends), readers=len(fed), address=self.place(worker), local_readers=local)

    def reader(self, spec: "WorkerSpec", ends: dict[str, Any], addresses: Mapping[str, str], onward: Onward | None) -> Site:
        """The site at which a worker receives messages, from the workers' addresses; it passes them on to readers of `onward`."""
        worker, feeder = spec.worker.name, self.route[spec.worker.name]
        place = self.place(feeder)
        address = place if self._share_memory(feeder, worker) else addresses[place]
        return replace(self._site(spec, ends), address=address, timeout_s=spec.deadline_s, onward=onward)

    def _share_memory(self, feeder: str, reader: str) -> bool:
        """Whether one maps the memory of the other, in a channel that also has other hosts."""
        return self.transport.passes_on and self.hosts[feeder] == self.hosts[reader]

    def _site(self, spec: "WorkerSpec", ends: dict[str, Any]) -> Site:
        return Site(self.name, self.slots, len(self.route), "", spec.authkey, spec.listen_at, here=ends, encrypt=spec.encrypt)


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run resumes."""

    folder: str
    step: int


@dataclass(frozen=True)
class Saving:
    """A worker's duties at each checkpoint, at which it is `lookahead` firings ahead of the trained weights.

    `id` names the checkpoints of this session. If `trained`, it saves its model's state; `open` names the nodes whose open batches it
    saves, including the last `back` steps before the cut. `gatherer` is the address at which the driver receives shards from hosts that
    do not share its folder; a worker on such a host is `apart`, and has a separate `folder`.
    """

    folder: str
    id: str
    every: int
    lookahead: int
    trained: bool
    open: tuple[str, ...]
    back: int = 0
    gatherer: str = ""
    apart: bool = False

    def newest_version(self, step: int) -> float:
        """The newest version that a rollout may load: a batch that is open at a checkpoint uses no later version."""
        cut = step // self.every * self.every
        return cut if cut and step < cut + self.lookahead else float("inf")


@dataclass(frozen=True)
class Start:
    """The step from which a session starts, and the checkpoints that it writes: every `every` steps into `folder`, with its `id`."""

    resume: Resume | None = None
    folder: str = ""
    id: str = ""
    every: int = 0
    set_aside: tuple[int, ...] = ()
    probe: tuple[str, int] | None = None  # a node and step that killed its worker, to fire prompt by prompt
    gatherer: str = ""  # the address to which hosts that do not share the folder send their shards


@dataclass(frozen=True)
class WorkerSpec:
    """Everything that one worker receives at its start."""

    worker: PlannedWorker
    nodes: tuple[NodeSpec, ...]
    firings: tuple[tuple[str, int], ...]  # (node, chunk) of one step, in order
    model: Model | None
    channels: tuple[tuple[PlannedChannel, tuple[EdgeEndpoints, ...]], ...]
    loops: tuple[tuple[PlannedLoop, tuple[EdgeEndpoints, ...], str], ...]  # the string is the dtype that its generators need
    folder: str
    authkey: bytes = field(repr=False)  # never in logs and errors
    deadline_s: float
    listen_at: str  # this host's address among the job's hosts, for ends to which other hosts connect
    local_gpus: tuple[int, ...]  # numbered on its host
    encrypt: bool = False  # traffic to other hosts
    copies: int = 1  # versions of its model's weights that it holds at once
    merging_bytes: int | None = None  # in addition, if adapters arrive instead of whole weights
    time_slices: tuple[TimeSlice, ...] = ()  # of its model, if workers of other models share its GPUs
    saving: Saving | None = None
    resume: Resume | None = None
    begin: Mapping[str, int] = field(default_factory=dict)  # the step that each node of the plan fires first
    set_aside: tuple[int, ...] = ()
    probe: tuple[str, int] | None = None
    prompts: int = 0  # per step
    ahead: int = 0  # steps that it fires beyond the step to finish, because other workers need them
    sequences: int = 0  # most responses that its engine decodes at once
    exact: bool = False  # whether a trainer computes log-probs bit-identical to its engine's
    shared_base: str = ""  # the meeting point of workers that share its frozen base; empty if there are none

    @property
    def posts(self) -> Iterator[EdgeEndpoints]:
        """All ends at which it writes, reads or passes messages on."""
        return (post for posts in (*(found for _, found in self.channels), *(found for _, found, _ in self.loops)) for post in posts)

    @property
    def first(self) -> int:
        """The step that this worker fires first."""
        return self.begin[self.worker.nodes[0]]

    @property
    def saves_remotely(self) -> bool:
        """Whether this host does not share the driver's folder of checkpoints."""
        return self.saving is not None and self.saving.apart

    @property
    def shares_devices(self) -> bool:
        """Whether workers of other models time-share its GPUs."""
        return bool(self.time_slices)

    def time_slice(self, node: str, chunk: int) -> TimeSlice | None:
        """The time slice in which a node fires, if its model shares its devices with others."""
        return next((found for found in self.time_slices if (node, chunk) in found.firings), None)

    def node(self, name: str) -> NodeSpec:
        return next(node for node in self.nodes if node.name == name)


def worker_specs(
    graph: Graph,
    plan: Plan,
    folder: str,
    authkey: bytes,
    deadline_s: float,
    start: Start | None = None,
    addresses: Sequence[str] = (),
    *,
    encrypt: bool = False,
) -> tuple[WorkerSpec, ...]:
    """Make the spec with which each worker of the plan starts; `addresses` lists its hosts' addresses if there are several."""
    start = start or Start()
    lookahead = lookaheads(plan) if start.folder else {}
    begin = {node: start.resume.step + lookahead[worker.name] if start.resume else 0 for worker in plan.workers for node in worker.nodes}
    ahead, exact = plan.steps_ahead(), exact_models(graph)
    bases = shared_bases(graph, plan.cluster, plan.workers)
    channels = tuple((channel, _posts(plan, channel, f"{folder}/c{i}")) for i, channel in enumerate(plan.channels))
    loops = tuple((loop, _posts(plan, loop, f"{folder}/w{i}")) for i, loop in enumerate(plan.loops))
    return tuple(
        WorkerSpec(
            worker=worker,
            nodes=tuple(_node_spec(graph, name) for name in worker.nodes),
            firings=tuple((e.node, e.chunk) for e in plan.schedule.events if e.kind == "fire" and e.node in worker.nodes),
            model=_model(graph, plan, worker),
            channels=tuple((c, posts) for c, posts in channels if _touches(worker, c.writer, c.readers)),
            loops=tuple((p, posts, _dtype(plan, p)) for p, posts in loops if _touches(worker, p.writer, p.readers)),
            folder=folder,
            authkey=authkey,
            deadline_s=deadline_s,
            listen_at=addresses[worker.host] if addresses else "",
            encrypt=encrypt,
            local_gpus=tuple(gpu - worker.host * plan.cluster.gpus_per_node for gpu in worker.gpus),
            time_slices=time_slices(plan.schedule.events, worker.nodes),
            copies=max((_copies(loop) for loop in plan.loops if set(loop.readers) & set(worker.nodes)), default=1),
            merging_bytes=_merging_bytes(plan, worker),
            saving=_saving_spec(plan, start, lookahead, worker) if start.folder else None,
            resume=start.resume,
            begin=begin,
            set_aside=start.set_aside,
            probe=start.probe if start.probe and start.probe[0] in worker.nodes else None,
            prompts=next((node.rows for node in graph.nodes if isinstance(node.operation, Prompts)), 0),
            ahead=ahead[worker.name],
            sequences=sum(_sequences(graph.node(name), worker.world) for name in worker.nodes),
            exact=any(graph.node(name).model in exact for name in worker.nodes),
            shared_base=next(
                (f"{folder}/b{i}" for i, base in enumerate(bases) if worker.model in base.models and worker.host == base.host), ""
            ),
        )
        for worker in plan.workers
    )


def _sequences(node: Node, world: int) -> int:
    """The most responses of a rollout that one of `world` engines decodes at once."""
    if node.traits.work != "generate":
        return 0
    group = node.traits.group_size or 1
    prompts = node.chunks * -(-node.rows // (group * node.chunks * world))  # each chunk is distributed over the engines
    return prompts * group * (1 + node.traits.ahead)


def _copies(loop: PlannedLoop) -> int:
    """The versions for which a reader of the loop has room: its buffers, and the slots on its GPU into which NCCL writes."""
    return loop.buffers + (loop.slots if transport_of(loop.transport).reader_keeps == "gpu" else 0)


def _merging_bytes(plan: Plan, worker: PlannedWorker) -> int | None:
    """The bytes that a worker keeps to merge the adapters that it reads; None if it reads none, or their size is unknown."""
    itemsize = ITEMSIZE.get(plan.dtype(worker.model) or "", 2)
    read = [loop for loop in plan.loops if set(loop.readers) & set(worker.nodes)]
    found = [loop.adapter.merging_bytes(itemsize, _copies(loop) - 1) for loop in read if loop.adapter is not None]
    return max((size for size in found if size is not None), default=None)


def _saving_spec(plan: Plan, start: Start, lookahead: Mapping[str, int], worker: PlannedWorker) -> Saving:
    trained = any(plan.node(name).work == "train" for name in worker.nodes)
    opened, back = open_nodes(plan, lookahead, worker), count_steps_before_cut(plan, lookahead, worker)
    return Saving(start.folder, start.id, start.every, lookahead[worker.name], trained, opened, back, start.gatherer)


def _model(graph: Graph, plan: Plan, worker: PlannedWorker) -> Model | None:
    """Return the worker's model, if it has one, with the dtype that the plan chose for it."""
    model, dtype = graph.node(worker.nodes[0]).model, plan.dtype(worker.model)
    return model if model is None or dtype is None or dtype == model.traits.dtype else model.with_dtype(dtype)


def _dtype(plan: Plan, loop: PlannedLoop) -> str:
    """The dtype in which a loop carries weights: an adapter keeps the dtype of training, and is rounded when it is merged."""
    return (plan.dtype(plan.node(loop.readers[0]).model) if loop.adapter is None else None) or "float32"


def _touches(worker: PlannedWorker, writer: str, readers: tuple[str, ...]) -> bool:
    return any(name in worker.nodes for name in (writer, *readers))


def _node_spec(graph: Graph, name: str) -> NodeSpec:
    node = graph.node(name)
    columns: dict[str, tuple[tuple[str, str, int], ...]] = {}
    for column in node.reads:
        output = node.carrier(column)
        taken = (column.removeprefix(output.prefix), column, node.repeats(output))
        columns[output.node.name] = (*columns.get(output.node.name, ()), taken)
    if node.earlier is not None and node.earlier.source is not None:
        columns[node.earlier.source.node.name] = tuple((column, column, 1) for column in node.earlier.columns)
    count = None if node.due or (node.model is not None and node.traits.work == "generate") else node.rows // node.chunks
    follows = node.follows.name if node.follows else None
    return NodeSpec(name, node.operation, node.writes, columns, node.chunks, follows, node.due, count, _metric_prefix(graph, node))


def _metric_prefix(graph: Graph, node: Node) -> str:
    """Prefix the metrics of an update with its name if the graph trains several models of its kind."""
    roles = [n.model.role for n in graph.nodes if n.model is not None and n.traits.work == "train"]
    several = node.traits.work == "train" and node.model is not None and roles.count(node.model.role) > 1
    return f"{node.name}/" if several else ""


def _posts(plan: Plan, end: PlannedChannel | PlannedLoop, address: str) -> tuple[EdgeEndpoints, ...]:
    """Describe the writing ends of a channel or a feedback edge."""
    found, everywhere, by_writer = transport_of(end.transport), hosts_of(plan), routes(plan, end)
    if found.reach == "process" and any(list(route) != list(by_writer) for route in by_writer.values()):
        found = transport_of(first_choice("host"))  # ranks of one model are separate processes
    return tuple(
        EdgeEndpoints(end.name, f"{address}.{rank}", end.slots, writer, route, {one: everywhere[one] for one in (writer, *route)}, found)
        for rank, (writer, route) in enumerate(by_writer.items())
    )
