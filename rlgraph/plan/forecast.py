"""Forecast a schedule whose times vary by playing it: step time, first step, waits on each channel, staleness.

A firing of a rollout with `continuous` or `interrupt` has no fixed seconds: its work depends on the batches that joined before, and on when
versions arrived. So the schedule is played with a stateful engine, from decode step to decode step.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import lcm

import numpy as np

from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Due, Feedback, Node
from rlgraph.plan.cost_functions import Decode, NodeCost, Setting
from rlgraph.plan.costs import Costs
from rlgraph.plan.events import evaluation_loop, evaluations, fire_event, load_event, publish_event, readers
from rlgraph.plan.lengths import Array, Lengths
from rlgraph.plan.plan import PlannedJoin, PlannedWait
from rlgraph.plan.play import WARM_UP_STEPS, Engines, Played, play
from rlgraph.plan.schedule import Dependency, Event, Reason, Schedule
from rlgraph.values.sampling import BatchAdmission

# Simulate batches and versions that join while responses decode: an engine, played from decode step to decode step.

Arrivals = Callable[[int], float]  # when a version arrives, in seconds; infinity while unknown
ALL = 1 << 20  # versions, more than any batch of a prediction needs
ROWS = 1 << 16  # the most steps drawn, since every end of a response is played


def never(version: int) -> float:
    """Say that no version comes."""
    return float("inf")


def rule_of(node: Node) -> BatchAdmission | None:
    """Look up the rule by which batches or versions join while a node decodes; None if none do."""
    rule = node.traits.admission
    return rule if rule is not None and (rule.continuous or rule.interrupt) else None


def shares_steps(node: Node) -> bool:
    """Whether responses that join later share decode steps with the running responses."""
    return node.model is None or node.model.traits.shares_steps


def is_played(graph: Graph, node: Node, costs: Costs) -> bool:
    """Whether a prediction counts batches that join while a node decodes.

    It does if the node's cost has decode steps, each response has one turn and belongs to one batch that leaves whole, and no other
    node uses the model."""
    cost = costs.cost_of(node.name)
    alone = all(other is node or other.model is not node.model for other in graph.nodes)
    whole = node.chunks == 1 and node.traits.one_turn and alone
    return rule_of(node) is not None and cost.decode is not None and costs.lengths is not None and whole


@dataclass
class Batch:
    """The responses of one batch on an engine: their number, and how many are done."""

    rows: int
    done: int = 0

    @property
    def tail(self) -> bool:
        return 2 * self.done >= self.rows


@dataclass
class Machine:
    """One engine. `lengths` are the lengths of its responses `[steps, rows]`, and repeat after the last step.

    With `shared` all running responses share each decode step; else responses that began together have separate steps.
    """

    rule: BatchAdmission
    decode: Decode
    lengths: Array
    prompt_tokens: float
    load_s: float
    arrives: Arrivals
    shared: bool = True
    now: float = 0.0
    version: int = 0
    steps: int = 0  # decoded so far
    batches: dict[int, Batch] = field(default_factory=dict)
    running: list[tuple[float, int, int]] = field(default_factory=list)  # a heap of responses: last decode step, batch, first decode step
    waiting: list[tuple[int, float]] = field(default_factory=list)  # waiting for a slot: batch and length
    decoded: list[list[float]] = field(default_factory=list)  # of each firing: decode steps, sequences summed over them, batches begun

    def load(self, step: int) -> float:
        """Load the version that batch `step` needs. Returns the seconds for it; 0 if it is loaded already."""
        missing = max(self.rule.needs(step) - self.version, 0)
        self.version += missing
        return missing * self.load_s

    def fire(self, step: int, at: float, pace: float = 1.0) -> float:
        """Decode from time `at` until batch `step` is done. Returns the time of its end. A decode step lasts `pace` times its cost."""
        self.now = at + self.decode.start_s
        self.decoded.append([0.0, 0.0, 0.0])
        self.batches = {number: batch for number, batch in self.batches.items() if number >= step}
        if step not in self.batches:
            self._submit(step, pace)
        batch = self.batches[step]
        while batch.done < batch.rows:
            self._join(step, pace)
            self._advance(pace)
        return self.now

    def _submit(self, step: int, pace: float) -> None:
        drawn = self.lengths[step % len(self.lengths)].tolist()
        self.batches[step] = Batch(len(drawn))
        self.decoded[-1][2] += 1
        self.waiting += [(step, length) for length in drawn]
        self.now += pace * self.decode.prefill_s * self.prompt_tokens * len(drawn)
        self._admit()

    def _admit(self) -> None:
        slots = self.decode.slots
        free = len(self.waiting) if slots is None else min(slots - len(self.running), len(self.waiting))
        for batch, length in self.waiting[:free]:
            heapq.heappush(self.running, (self.steps + max(length, 1), batch, self.steps))
        del self.waiting[:free]

    def _join(self, step: int, pace: float) -> None:
        while self.rule.interrupt and self.arrives(self.version + 1) <= self.now:
            self._swap(pace)
        newest = max(self.batches)
        while newest < step + self.rule.ahead() and self.batches[newest].tail:
            needed = self.rule.needs(newest + 1)
            while not self.rule.interrupt and self.version < needed:
                self.now = max(self.now, self.arrives(self.version + 1))
                self._swap(pace)
            if self.version < needed:
                return
            newest += 1
            self._submit(newest, pace)

    def _swap(self, pace: float) -> None:
        """Load the next version; with "recompute" all running responses are prefilled again."""
        self.version += 1
        self.now += self.load_s
        if self.rule.interrupt_rule == "recompute":
            read = sum(self.prompt_tokens + self.steps - began for _, _, began in self.running)
            self.now += pace * self.decode.prefill_s * read

    def _advance(self, pace: float) -> None:
        """Decode until the next response ends, or a version arrives that may interrupt."""
        groups = 1 if self.shared else len({began for _, _, began in self.running})
        step_s = pace * (self.decode.step_s * groups + self.decode.sequence_s * len(self.running))
        count = int(self.running[0][0] - self.steps)
        if self.rule.interrupt and step_s > 0:
            left = (self.arrives(self.version + 1) - self.now) / step_s
            count = min(count, max(int(np.ceil(left)), 1)) if np.isfinite(left) else count
        self.decoded[-1][0] += count * groups
        self.decoded[-1][1] += count * len(self.running)
        self.steps += count
        self.now += count * step_s
        while self.running and self.running[0][0] <= self.steps:
            self.batches[heapq.heappop(self.running)[1]].done += 1
        self._admit()


@dataclass
class JoinedLoads(Engines):
    """The loading of versions before a batch, without versions that were loaded while the previous batch decoded."""

    machines: Sequence[Machine] = ()

    def fire(self, step: int) -> None:
        self.seconds[step][:] = [machine.load(step) for machine in self.machines]
        super().fire(step)


@dataclass
class JoinedFirings(Engines):
    """The firings of a rollout with stateful engines. `seconds` excludes decoding until the firing has been played."""

    machines: Sequence[Machine] = ()
    paces: Sequence[float] = ()

    def fire(self, step: int) -> None:
        at, _ = self._latest(0, step, np.zeros(self.count))
        own_s = self.seconds[step]
        ends = [m.fire(step, a + s, self.paces[step]) for m, a, s in zip(self.machines, at, own_s, strict=True)]
        self.seconds[step][:] = np.array(ends) - at
        super().fire(step)


@dataclass(frozen=True)
class Decoder:
    """A rollout whose batches join: its rule, its cost and its setting, from which engines are built. See `Machine` for `shared`."""

    rule: BatchAdmission
    cost: NodeCost
    setting: Setting
    lengths: Lengths
    shared: bool

    def machines(self, steps: int, rows: int, load_s: float, arrives: Arrivals, version: int = 0) -> list[Machine]:
        """Make the engines in their state before the first step, with drawn responses of `steps` steps and `rows` rows."""
        assert self.cost.decode is not None
        setting, decode = self.setting, self.cost.decode_at(self.cost.decode, self.setting)
        drawn = self.lengths.batches(steps, rows)[:, : setting.rows]
        count = min(setting.engines, setting.rows)
        firsts = [setting.rows * rank // count for rank in range(count + 1)]
        prompts = self.lengths.prompt_tokens
        return [
            Machine(self.rule, decode, drawn[:, first:end], prompts, load_s, arrives, self.shared, version=version)
            for first, end in pairwise(firsts)
        ]


def decoder(node: Node, setting: Setting, costs: Costs) -> Decoder:
    """Describe the rollout of a node whose batches join."""
    rule = rule_of(node)
    assert rule is not None
    assert costs.lengths is not None
    return Decoder(rule, costs.cost_of(node.name), setting, costs.lengths, shares_steps(node))


def beside(cost: NodeCost, setting: Setting, steps: int) -> Array:
    """Predict the seconds `[steps]` of firings besides decoding."""
    return replace(cost, decode=None, spread=()).of(setting, None, 0.0, steps)[:, 0]


def saturated_seconds(node: Node, setting: Setting, costs: Costs, rows: int) -> float:
    """Predict the mean seconds of a firing if every version arrives before it is needed; the load events count its loading."""
    return _saturated_seconds(decoder(node, setting, costs), drawn_step_count(costs, rows), rows)


@lru_cache(maxsize=1024)
def _saturated_seconds(rollout: Decoder, steps: int, rows: int) -> float:
    each = rollout.machines(steps, rows, 0.0, never, version=steps + ALL)
    ends = np.array([[machine.fire(step, 0.0) for machine in each] for step in range(steps)])
    return float((ends.max(axis=1) + beside(rollout.cost, rollout.setting, steps))[steps // 8 :].mean())


def drawn_step_count(costs: Costs, rows: int) -> int:
    """Choose the number of steps for which lengths are drawn if batches join."""
    return max(min(costs.choose_draws(rows), ROWS // max(rows, 1)), 64)


def decode_events(node: Node, setting: Setting, costs: Costs, schedule: Schedule, steps: int, rows: int) -> dict[str, Engines]:
    """Make the events of a node with stateful engines, by name: its loading and its firings."""
    feedback, cost = node.feedback, costs.cost_of(node.name)
    load = load_event(feedback.name, node.name) if feedback is not None else ""
    load_s = schedule.seconds().get(load, 0.0)
    count = min(setting.engines, setting.rows)
    loads = JoinedLoads([np.zeros(count) for _ in range(steps)])

    def arrives(version: int) -> float:
        assert feedback is not None
        published = loads.others[publish_event(feedback.name)]
        received_s = costs.receive_s if feedback.buffers == 2 else 0.0
        return published[version - 1] + received_s if 0 < version <= len(published) else float("inf")

    each = decoder(node, setting, costs).machines(steps, rows, load_s, arrives if feedback is not None else never)
    loads.machines = each
    own_s = [np.full(count, seconds) for seconds in beside(cost, setting, steps)]
    found: dict[str, Engines] = {fire_event(node.name): JoinedFirings(own_s, machines=each, paces=cost.paces(steps))}
    return found if feedback is None else {load: loads, **found}


def plan_join(node: Node) -> PlannedJoin | None:
    """Describe how batches join a rollout; None if each batch decodes separately."""
    rule = rule_of(node)
    return PlannedJoin(rule.ahead(), shares_steps(node)) if rule is not None and rule.continuous else None


def count_decode_work(lengths: Array, join: PlannedJoin) -> Array:
    """Count `[steps, 3]` the decode steps of each firing of an engine, the sequences summed over them, and the batches that it began,
    for responses `[steps, rows]`.

    They follow from the lengths: a batch joins when half of the responses before it have ended, whenever that is.
    """
    rule = BatchAdmission("keep", continuous=True, depth=join.ahead)  # with every version at hand, depth is what joins ahead
    machine = Machine(rule, Decode(), lengths, 0.0, 0.0, never, join.shared, version=ALL)
    for step in range(len(lengths)):
        machine.fire(step, 0.0)
    return np.array(machine.decoded)


def left_out(graph: Graph, costs: Costs) -> Iterator[str]:
    """List what the prediction leaves out and why: work of decoding nodes, and of nodes that are due at some steps only."""
    for node in graph.nodes:
        if node.due is not None and costs.source == "measured" and not costs.cost_of(node.name).measured:
            yield f"'{node.name}' is due every {node.due.every} steps and did not fire in the run that was measured: it counts as no time"
        rule = rule_of(node)
        if rule is None:
            continue
        if not is_played(graph, node, costs):
            if rule.continuous:
                yield f"'{node.name}' is predicted as if batches did not join while others decode (continuous=True): the run may be faster"
            if rule.interrupt:
                yield (
                    f"'{node.name}' is predicted as if no version came while it decodes (interrupt={rule.interrupt!r}): each one that does "
                    "takes a swap, and where the keys and values are recomputed, a prefill of the responses under way"
                )
            continue
        decode = costs.cost_of(node.name).decode
        if rule.interrupt_rule == "recompute" and node.feedback is not None and decode is not None and not decode.prefill_s:
            yield (
                f"'{node.name}' is predicted as if reading took no time: its costs tell nothing of prompts (prefill_s), so that the "
                "responses under way are read again with each version that joins is not counted; profile prompts of two lengths"
            )


# Forecast a schedule whose times vary by playing it: step time, first step, waits on each channel, staleness.

Settings = Mapping[str, Setting]  # of each node, by name
BURSTS = 600  # steps: rarer evaluations count as spread over the steps


@dataclass(frozen=True)
class Forecast:
    """A schedule that was played over `steps` steps; the steps before `warm_up` fill the pipeline."""

    schedule: Schedule
    played: Played
    steps: int
    warm_up: int

    @property
    def step_s(self) -> float:
        """Average the seconds of a step in the steady state."""
        ends = self.played.step_ends()
        return (ends[-1] - ends[self.warm_up - 1]) / (self.steps - self.warm_up)

    @property
    def first_step_s(self) -> float:
        """Measure the seconds from the first tick to the end of the first step."""
        return self.played.step_ends()[0]

    def waits(self) -> tuple[PlannedWait, ...]:
        """Sum the seconds per step that each pool, and each worker on the host, waits for each channel; the longest first."""
        total: dict[tuple[str, str, Reason], float] = {}
        events = {event.name: event for event in self.schedule.events}
        counted = range(self.warm_up, self.steps)
        for before, after, back in self._neighbours():
            who = events[after].pool or events[after].worker
            for cause, seconds in self._idle(before, after, back, events[before].node == events[after].node, counted):
                if cause.reason not in ("order", "self"):
                    key = (who, cause.via, cause.reason)
                    total[key] = total.get(key, 0.0) + seconds / len(counted)
        found = [PlannedWait(who, on, reason, idle) for (who, on, reason), idle in total.items() if idle > 0]
        return tuple(sorted(found, key=lambda wait: -wait.seconds))

    def _neighbours(self) -> Iterator[tuple[str, str, int]]:
        """Yield each event with the previous event of the same pool or host worker, and the steps between them: (before, after, steps)."""
        chains: dict[str, list[str]] = {}
        lag = {event.name: event.lag for event in self.schedule.events}
        for event in (e for e in self.schedule.events if e.kind != "receive"):
            chains.setdefault(event.pool or event.worker, []).append(event.name)
        for chain in chains.values():
            for index, name in enumerate(chain):
                yield chain[index - 1], name, int(index == 0) + lag[chain[index - 1]] - lag[name]

    def _idle(self, before: str, after: str, back: int, own: bool, steps: Iterable[int]) -> Iterator[tuple[Dependency, float]]:
        """Yield what an event waited for, and its idle seconds meanwhile, averaged over its engines."""
        played = self.played
        done, each = played.ends[before], played.engines.get(after)
        for step in steps:
            if each is None:
                if step - back >= self.steps:  # the previous event was not played so far
                    continue
                starting = played.causes[after][step], max(played.starts[after][step] - done[step - back], 0.0)
                ending = played.held[after][step], played.ends[after][step] - played.worked[after][step]
                yield from ((cause, seconds) for cause, seconds in (starting, ending) if cause is not None)
                continue
            free = played.engines[before].ends[step - back] if own else done[step - back]
            waited = each.late(step, np.maximum(each.starts[step] - free, 0.0)) + each.held[step]
            yield from ((cause, seconds / each.count) for cause, seconds in waited)

    def staleness(self, graph: Graph, feedback: Feedback) -> float:
        """Average the gap between the version of a rollout and the version at which it is trained."""
        if not feedback.latest:
            return float(feedback.depth)
        published = sorted(self.played.ends[publish_event(feedback.name)])
        load = load_event(feedback.name, readers(graph, feedback)[0].name)
        each = self.played.engines.get(load)
        starts = [float(at[0]) for at in each.starts] if each is not None else self.played.starts[load]
        gaps = [step - min(sum(end <= starts[step] for end in published), step) for step in range(self.warm_up, self.steps)]
        return sum(gaps) / len(gaps)


def forecast(schedule: Schedule, graph: Graph, settings: Settings, costs: Costs) -> Forecast:
    """Play the schedule with the lengths and spreads of the costs, or with plain seconds without them."""
    nodes = graph.nodes
    varying = [node.name for node in nodes if costs.varies(node.name)]
    if not varying:
        steps = WARM_UP_STEPS + rounds_of_evaluations(graph)
        uneven = {name: factors.tolist() for name, factors in bursts(schedule, graph, steps + schedule.most_lag).items()}
        once = play(schedule, steps, lambda event, step: event.seconds * (uneven[event.name][step] if event.name in uneven else 1.0))
        return Forecast(schedule, once, steps, WARM_UP_STEPS)
    rows = graph.rows
    together = [node for node in nodes if is_played(graph, node, costs)]
    steps = drawn_step_count(costs, rows) if together else costs.choose_draws(rows)
    drawn = drawn_times(schedule, graph, settings, costs, steps)
    mean = schedule.seconds()
    for name, factors in bursts(schedule, graph, steps).items():
        drawn[name] = np.asarray(factors[:, None] * drawn.get(name, mean[name]))
    apart: dict[str, Engines] = {name: Engines(list(each)) for name, each in drawn.items() if each.shape[1] > 1}
    for node in together:
        apart |= decode_events(node, settings[node.name], costs, schedule, steps, rows)
    alone = {name: each[:, 0].tolist() for name, each in drawn.items() if name not in apart}

    def seconds(event: Event, step: int) -> float:
        return alone[event.name][step] if event.name in alone else event.seconds

    played = steps - schedule.most_lag  # events that fire rounds ahead of others need lengths of that many more steps
    return Forecast(schedule, play(schedule, played, seconds, apart), played, played // 8)


def rounds_of_evaluations(graph: Graph) -> int:
    """Count the steps, at least as many as fill the pipeline, in which each evaluation happens equally often from round to round."""
    whole = lcm(*(every for every in (node.due.every for node in graph.nodes if node.due is not None) if every <= BURSTS))
    return whole * -(-WARM_UP_STEPS // whole) if whole <= BURSTS else BURSTS


def bursts(schedule: Schedule, graph: Graph, steps: int) -> dict[str, Array]:
    """Find by how much each event of an evaluation exceeds its mean at each step `[steps]`: it happens fully, or not at all."""
    found: dict[str, Array] = {}
    for name, dues in _dues(schedule, graph).items():
        every = [due.every for due in dues]
        if max(every) <= BURSTS:
            happens = np.array([[(step + 1) % each == 0 for each in every] for step in range(steps)]).any(axis=1)
            found[name] = np.asarray(happens * float(min(every)))
    return found


def _dues(schedule: Schedule, graph: Graph) -> dict[str, list[Due]]:
    """List the evaluations of each event that happens only for them: their firings, their weights, and their separate time slices."""
    edges = {evaluation_loop(f.name, node.name): node.due for f in graph.feedbacks for node in evaluations(graph, f)}
    found: dict[str, list[Due]] = {}
    open_slices: dict[str | None, tuple[str, list[Due | None]]] = {}
    for event in schedule.events:
        due = edges.get(event.edge) if event.edge else graph.node(event.node).due if event.kind == "fire" else None
        if due is not None:
            found[event.name] = [due]
        if event.kind == "wake":
            open_slices[event.pool] = event.name, []
        elif event.kind == "fire" and event.pool in open_slices:
            open_slices[event.pool][1].append(due)
        elif event.kind == "sleep" and event.pool in open_slices:
            wake, dues = open_slices.pop(event.pool)
            alone = [each for each in dues if each is not None]
            if len(alone) == len(dues):
                found[wake] = found[event.name] = alone
    return found


def drawn_times(schedule: Schedule, graph: Graph, settings: Settings, costs: Costs, steps: int) -> dict[str, Array]:
    """Draw the seconds `[steps, engines]` of the events of each node whose firings differ, `[steps, 1]` if engines work together."""
    relative: dict[str, Array] = {}  # seconds of each firing `[steps, engines]`, relative to the mean of the last engine
    of_chunks: dict[str, Array] = {}
    for node in (node for node in graph.nodes if costs.varies(node.name)):
        cost = costs.cost_of(node.name)
        drawn = cost.each(settings[node.name], costs.lengths, steps, graph.rows)
        relative[node.name] = drawn / max(float(drawn.max(axis=1).mean()), 1e-12)
        shares = cost.chunk_shares(settings[node.name], costs.lengths, steps, graph.rows, node)
        of_chunks[node.name] = shares / np.maximum(shares.mean(axis=0), 1e-12)

    def times(event: Event) -> Array:
        engines = relative[event.node].shape[1]
        if event.kind != "fire":
            return np.full((steps, engines), event.seconds)
        found: Array = event.seconds * relative[event.node] * of_chunks[event.node][:, event.chunk, None]
        return found

    return {event.name: times(event) for event in schedule.events if event.node in relative}
