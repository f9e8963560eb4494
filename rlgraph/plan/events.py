"""Build the schedule of a graph: the events of a step, what each waits for, and the turns of models that share devices."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise, product

import networkx as nx

from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Feedback, Node
from rlgraph.graph.rules import lags
from rlgraph.plan.cost_functions import Setting, SleepCost
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import PlannedWorker
from rlgraph.plan.schedule import Dependency, Event, EventKind, Schedule

# Models that time-share the devices of a pool: which models share them, and how an engine wakes before a time slice and sleeps after it.

Sleeps = Mapping[str, SleepCost]  # of the model of each node, by name, if it shares its devices


@dataclass(frozen=True)
class TimeSlice:
    """Firings (node, chunk) of one model without another model of its pool in between, and the wake and sleep events around them."""

    wake: str
    firings: tuple[tuple[str, int], ...]
    sleep: str


def wake_event(firing: str) -> str:
    """Name the event in which an engine restores its device memory before a firing."""
    return f"wake for {firing}"


def sleep_event(firing: str) -> str:
    """Name the event in which an engine frees its device memory after a firing."""
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
    """List the time slices of the model that has these nodes; empty if no other model shares its devices."""
    found: list[TimeSlice] = []
    for event in (event for event in ordered if event.node in nodes):
        if event.kind == "wake":
            found.append(TimeSlice(event.name, (), ""))
        elif event.kind == "fire" and found:
            found[-1] = replace(found[-1], firings=(*found[-1].firings, (event.node, event.chunk)))
        elif event.kind == "sleep":
            found[-1] = replace(found[-1], sleep=event.name)
    return tuple(found)


# Build the schedule of a graph: the events of a step, and what each waits for.

Hosts = Mapping[str, str]  # the worker of each node, by name
Seconds = Mapping[str, float]  # of each node in a step, on average
AHEAD = 60  # the most steps that training may be ahead of an overlapping evaluation


def open_batches(graph: Graph) -> int:
    """Count the batches that may be admitted to rollout and not yet published: the largest depth plus one."""
    return 1 + max((f.depth for f in graph.feedbacks), default=0)


def slots(graph: Graph, node: Node) -> int:
    """Count the batches that the channel of `node` holds, whole or in chunks: enough for all batches that its loop admits.

    The channel of a node before the loop, e.g. prompts, holds one more, so that a batch is ready when the loop admits the next one.
    """
    return open_batches(graph) + (0 if graph.feedbacks and in_loop(graph, node) else 1)


def window(graph: Graph) -> int:
    """Count the steps that may be in flight: enough that no step waits for an older step to end, whatever the times.

    These are the steps that the loop admits, one for each node on the longest path outside the loop, and two more.
    """
    trained = {feedback.source.node for feedback in graph.feedbacks if feedback.source is not None}
    inside = {
        node for node in graph.nodes if in_loop(graph, node) and any(node is t or nx.has_path(graph.forward, node, t) for t in trained)
    }
    outside = graph.forward.subgraph(node for node in graph.nodes if node not in inside)
    return open_batches(graph) + 2 + max(1, nx.dag_longest_path_length(outside) + 1 if len(outside) else 0) + ahead(graph)


def in_loop(graph: Graph, node: Node) -> bool:
    """Whether `node` is downstream of a rollout that a feedback edge drives."""
    driven = [n for n in graph.nodes if n.feedback is not None]
    return any(n is node or nx.has_path(graph.forward, n, node) for n in driven)


@dataclass(frozen=True)
class OrderChannel:
    """A channel of empty messages: a node of a pool tells the next one, in another process, that it may fire.

    `credits` messages are in it before the first step; it has room for `slots`. With credits of -n the first n messages are
    never sent: at -1 update 0 waits for the message of rollout 1, and rollout 0 sends none.
    """

    writer: Node
    reader: Node
    credits: int
    slots: int

    @property
    def name(self) -> str:
        return order_channel_name(self.writer.name, self.reader.name)


@dataclass(frozen=True)
class Puts:
    """The channels into which each node puts, one after another: the channels of its batch, by their readers, then the order channels.

    An update also tells overlapping evaluations that it is done, and waits for an evaluation that is too far behind.
    """

    batches: Mapping[Node, Sequence[Sequence[Node]]]
    orders: Mapping[Node, Sequence[OrderChannel]]
    evaluations: Mapping[Node, Sequence[Node]]

    def batch(self, writer: Node, reader: Node) -> int:
        """Number the put that brings a batch to a reader."""
        return next(put for put, readers in enumerate(self.batches[writer], 1) if reader in readers)

    def order(self, order: OrderChannel) -> int:
        """Number the put that tells the next node of a pool to fire."""
        return len(self.batches[order.writer]) + 1 + list(self.orders[order.writer]).index(order)

    def evaluation(self, update: Node, evaluation: Node) -> int:
        """Number the put that tells an overlapping evaluation that a step is done."""
        before = len(self.batches[update]) + len(self.orders.get(update, ()))
        return before + 1 + list(self.evaluations[update]).index(evaluation)


def schedule(
    graph: Graph, hosts: Hosts, seconds: Seconds, costs: Costs, sleeps: Sleeps, batches: Mapping[Node, Sequence[Sequence[Node]]]
) -> Schedule:
    """Build the marked graph of one step. Dependencies without a credit follow the order of declaration, so it has no deadlock.

    `sleeps` are the costs of the models that time-share their devices, by node; `batches` are the readers of each channel.
    """
    lag = {node.name: rounds for node, rounds in lags(graph).items()}
    fired = [event for node in graph.nodes for event in _firings(node, hosts[node.name], seconds[node.name])]
    events = [replace(event, lag=lag[event.node]) for event in (*fired, *_weights_events(graph, hosts, costs))]
    fired = [event for event in events if event.kind == "fire"]
    ordered = _order_events(graph, [*events, *wake_and_sleep_events(graph, _order_events(graph, fired), sleeps)])
    puts = _puts(graph, ordered, hosts, batches)
    flow = [*_data(graph, puts), *_earlier(graph), *_order(puts, ordered), *_loops(graph, puts)]
    order = [*_in_order(ordered), *(Dependency(e.name, e.name, 1, "self") for e in ordered)]
    return Schedule(tuple(ordered), tuple(with_wake_and_sleep(ordered, flow) + order))


def _puts(graph: Graph, ordered: Sequence[Event], hosts: Hosts, batches: Mapping[Node, Sequence[Sequence[Node]]]) -> Puts:
    told: dict[Node, list[OrderChannel]] = {}
    for order in order_channels(graph, ordered, hosts):
        told.setdefault(order.writer, []).append(order)
    evaluated: dict[Node, list[Node]] = {}
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        evaluated.setdefault(feedback.source.node, []).extend(evaluations(graph, feedback))
    return Puts(batches, told, evaluated)


def order_channel_name(before: str, after: str) -> str:
    """Name the channel by which one node tells another of its pool to fire."""
    return f"order {before} to {after}"


def fire_event(node: str, chunk: int = 0, chunks: int = 1) -> str:
    """Name the event in which a node fires, or fires for one of several chunks of a batch."""
    return node if chunks == 1 else f"{node} {chunk + 1}/{chunks}"


def fire_events(node: Node) -> list[str]:
    """Name a node's firings of one step, in order."""
    return [fire_event(node.name, chunk, node.chunks) for chunk in range(node.chunks)]


def _firings(node: Node, host: str, seconds: float) -> list[Event]:
    """Make the firings of one step. Chunks of a batch last equally long here; each leaves when its time is over."""
    names = fire_events(node)
    return [Event(name, "fire", node.name, host, pool_of(node), seconds / node.chunks, chunk) for chunk, name in enumerate(names)]


def publish_event(feedback: str) -> str:
    """Name the event that stages a version of a feedback edge."""
    return f"publish {feedback}"


def receive_event(feedback: str, reader: str) -> str:
    """Name the event that brings a version to the workers of node `reader`."""
    return f"receive {feedback} for {reader}"


def load_event(feedback: str, reader: str, *, apart: bool = False) -> str:
    """Name the event that puts a version into the engine of node `reader`; `apart` is for an edge to only that reader."""
    return f"load {feedback}" if apart else f"load {feedback} for {reader}"


def readers(graph: Graph, feedback: Feedback) -> list[Node]:
    """List the nodes that use the weights of a feedback edge, without overlapping evaluations, which have a separate edge."""
    return [node for node in graph.nodes if node.feedback is feedback and not graph.is_separate_evaluation(node)]


def evaluations(graph: Graph, feedback: Feedback) -> list[Node]:
    """List the nodes that evaluate the weights of a feedback edge separately from its rollouts."""
    return [node for node in graph.nodes if node.feedback is feedback and graph.is_separate_evaluation(node)]


def evaluation_loop(feedback: str, node: str) -> str:
    """Name the edge that brings the weights of a feedback edge to an overlapping evaluation."""
    return f"{feedback} to {node}"


def ahead(graph: Graph) -> int:
    """Count the steps that training may be ahead of an evaluation."""
    return max((min(node.due.every, AHEAD) for node in graph.nodes if node.due is not None), default=0)


def loads(graph: Graph, feedback: Feedback) -> list[tuple[Node, list[Node]]]:
    """List for each model that loads the weights the node before which it does, and all its nodes that use them."""
    users: dict[object, list[Node]] = {}
    for node in readers(graph, feedback):
        users.setdefault(node.model or node, []).append(node)
    return [(nodes[0], nodes) for nodes in users.values()]


def _weights_events(graph: Graph, hosts: Hosts, costs: Costs) -> list[Event]:
    found = []
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        source, edge = feedback.source.node, feedback.name
        trained = Event("", "publish", source.name, hosts[source.name], pool_of(source), costs.publish_s, source.chunks - 1)
        if readers(graph, feedback):
            found.append(replace(trained, name=publish_event(edge), edge=edge))
        for node, _ in loads(graph, feedback):
            load_s = costs.swap_s + (costs.receive_s if feedback.buffers == 1 else 0.0)
            load = Event(load_event(edge, node.name), "load", node.name, hosts[node.name], pool_of(node), load_s, edge=edge)
            found.append(load)
            if feedback.buffers == 2:  # received while the pool decodes, at no cost of pool time
                received = receive_event(edge, node.name)
                found.append(replace(load, name=received, kind="receive", pool=None, seconds=costs.receive_s))
        for node in evaluations(graph, feedback):
            assert node.due is not None
            edge, share = evaluation_loop(feedback.name, node.name), 1 / node.due.every
            found.append(replace(trained, name=publish_event(edge), seconds=costs.publish_s * share, edge=edge))
            load_s, name = (costs.receive_s + costs.swap_s) * share, load_event(edge, node.name, apart=True)
            found.append(Event(name, "load", node.name, hosts[node.name], pool_of(node), load_s, edge=edge))
    return found


def pool_of(node: Node) -> str | None:
    """Name the pool of a node."""
    return node.pool.name if node.pool else None


def _order_events(graph: Graph, events: list[Event]) -> list[Event]:
    """Order the events of a round: nodes by their place, weights loaded just before a rollout and published just after an update.

    Events for an older step come after all events for this step.
    An engine wakes before it loads weights, and sleeps before the weights that it trained are published.
    """
    places = {node.name: place(graph, node) for node in graph.nodes}
    rank: dict[EventKind, int] = {"receive": 0, "wake": 1, "load": 2, "fire": 3, "sleep": 4, "publish": 5}
    return sorted(events, key=lambda e: (e.lag, places[e.node][0], places[e.node][1] + e.chunk, places[e.node][2], rank[e.kind]))


def place(graph: Graph, node: Node) -> tuple[int, int, int]:
    """Compute the sort key of a node: the order of declaration, except that nodes that work on the chunks of a rollout come with it.

    Several such nodes all work on one chunk before the first of them works on the next. Their other inputs come before them.
    """
    if node.stream is not None:
        return node.stream.serial, 0, node.serial
    if any(graph.is_separate_evaluation(other) for other in (node, *nx.ancestors(graph.forward, node))):
        return sys.maxsize, 0, node.serial  # after the update whose weights it evaluates
    waiting = [other.follows.serial for other in nx.descendants(graph.forward, node) if other.follows is not None]
    return min([node.serial, *waiting]), -1, node.serial


def _data(graph: Graph, puts: Puts) -> Iterator[Dependency]:
    """Make a reader wait for its batch, and the writer's next put wait for a slot that every reader has released."""
    for writer, reader in graph.forward.edges:
        held, put, writes, reads = slots(graph, writer), puts.batch(writer, reader), fire_events(writer), fire_events(reader)
        for wrote, taken in zip(writes, reads, strict=True) if by_chunk(writer, reader) else product(writes, reads):
            yield Dependency(wrote, taken, 0, "data", writer.name, put)
            yield Dependency(taken, wrote, held, "slots", writer.name, put)


def _earlier(graph: Graph) -> Iterator[Dependency]:
    """Make a node wait for the columns of an earlier step. The writer never waits for a slot, since it depends on the reader's own step."""
    for node in graph.nodes:
        if node.earlier is not None and node.earlier.source is not None:
            for wrote, taken in product(fire_events(node.earlier.source.node), fire_events(node)):
                yield Dependency(wrote, taken, node.earlier.depth + 1, "data", node.earlier.name)


def _order(puts: Puts, ordered: Sequence[Event]) -> Iterator[Dependency]:
    """Make each node of a pool wait for the message of the node before it in another process, before it loads weights and fires."""
    first: dict[tuple[str, int], str] = {}
    for event in ordered:
        if event.kind in ("load", "fire"):
            first.setdefault((event.node, event.chunk), event.name)
    for order in (order for of_writer in puts.orders.values() for order in of_writer):
        put, writes = puts.order(order), fire_events(order.writer)
        reads = [first[order.reader.name, chunk] for chunk in range(order.reader.chunks)]
        if by_chunk(order.writer, order.reader):
            pairs = [(writes[chunk - order.credits], reads[chunk], int(chunk < order.credits)) for chunk in range(len(reads))]
        else:
            pairs = [(wrote, taken, order.credits // len(writes)) for wrote, taken in product(writes, reads)]
        for wrote, taken, credits in pairs:
            yield Dependency(wrote, taken, credits, "order", order.name, put)


def order_channels(graph: Graph, ordered: Sequence[Event], hosts: Hosts) -> Iterator[OrderChannel]:
    """Yield the channels that keep nodes of one pool in different processes from overlapping, unless data or weights do so anyway.

    Data does not do so for a node that loads weights, since it loads them before it receives its batch.
    """
    found: dict[str, OrderChannel] = {}
    for pool in dict.fromkeys(event.pool for event in ordered if event.pool is not None):
        fired = [event for event in ordered if event.kind == "fire" and event.pool == pool]
        for this, following in _next_in_pool(fired):
            before, after = graph.node(this.node), graph.node(following.node)
            wraps = ordered.index(following) <= ordered.index(this)
            steps = wraps + this.lag - following.lag  # by which the next firing's step is later
            if wraps:
                told = _waits_for_weights(after, before, steps)
            else:
                told = steps == 0 and after.feedback is None and nx.has_path(graph.forward, before, after)
            if hosts[before.name] != hosts[after.name] and not told:
                credits = int(following.chunk != this.chunk or wraps) if by_chunk(before, after) else before.chunks * steps
                order = OrderChannel(before, after, credits, max(credits, 0) + before.chunks)
                found[order.name] = order
    yield from found.values()


def _next_in_pool(fired: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield each firing of a pool with the next one, cyclically. In the first rounds only the firings without a lag happen."""
    yield from zip(fired, [*fired[1:], *fired[:1]], strict=True)
    alone = [event for event in fired if event.lag == 0]
    if 0 < len(alone) < len(fired):
        yield alone[-1], alone[0]


def _waits_for_weights(rollout: Node, update: Node, steps: int) -> bool:
    """Whether the rollout `steps` steps later waits for this update's weights in any case."""
    feedback = rollout.feedback
    return feedback is not None and feedback.depth < steps and feedback.source is not None and feedback.source.node is update


def by_chunk(writer: Node, reader: Node) -> bool:
    """Whether `reader` fires once for each chunk that `writer` yields."""
    return reader.follows is not None and reader.follows is writer.stream


def _loops(graph: Graph, puts: Puts) -> list[Dependency]:
    found = []
    for feedback in graph.feedbacks:
        assert feedback.source is not None
        publish = publish_event(feedback.name)
        if readers(graph, feedback):
            found += [Dependency(firing, publish, 0, "loop", feedback.name) for firing in fire_events(feedback.source.node)]
        for node, users in loads(graph, feedback):
            load = load_event(feedback.name, node.name)
            arrives = load
            if feedback.buffers == 2:
                arrives = receive_event(feedback.name, node.name)
                found.append(Dependency(arrives, load, 0, "loop", feedback.name))
                found.append(Dependency(load, arrives, 1, "slots", feedback.name))
            found.append(Dependency(publish, arrives, feedback.depth + 1, "loop", feedback.name))
            found += [Dependency(load, firing, 0, "loop", feedback.name) for user in users for firing in fire_events(user)]
        for node in evaluations(graph, feedback):
            found += _evaluation(graph, feedback, node, puts.evaluation(feedback.source.node, node))
    return found


def _evaluation(graph: Graph, feedback: Feedback, node: Node, put: int) -> list[Dependency]:
    """Make an overlapping evaluation wait for the weights of its step, and training wait for an evaluation that is too far behind."""
    assert feedback.source is not None
    assert node.due is not None
    source, name = feedback.source.node, evaluation_loop(feedback.name, node.name)
    update = fire_events(source)[-1]
    publish, load = publish_event(name), load_event(name, node.name, apart=True)
    chain = [Dependency(a, b, 0, "loop", name) for a, b in pairwise((update, publish, load, node.name))]
    return [
        *chain,
        Dependency(load, publish, node.due.every, "slots", name),
        Dependency(node.name, update, ahead(graph) + 1, "slots", order_channel_name(source.name, node.name), put),
    ]


def _in_order(ordered: Sequence[Event]) -> Iterator[Dependency]:
    """Make each worker do its events in this order, cyclically."""
    chains: dict[str, list[Event]] = {}
    for event in ordered:
        if event.kind != "receive":
            chains.setdefault(event.worker, []).append(event)
    for chain in chains.values():
        if len(chain) > 1:
            yield from (Dependency(a.name, b.name, 0, "order") for a, b in pairwise(chain))
            yield Dependency(chain[-1].name, chain[0].name, 1, "order")
