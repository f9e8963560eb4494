"""Forecast a schedule whose times vary by playing it: step time, first step, waits on each channel, staleness."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm

import numpy as np

from rlgraph.graph.nodes import Due, Feedback, Graph
from rlgraph.plan import continuous
from rlgraph.plan.cost_functions import Setting
from rlgraph.plan.costs import Costs
from rlgraph.plan.events import evaluation_loop, evaluations, load_event, publish_event, readers
from rlgraph.plan.lengths import Array
from rlgraph.plan.plan import PlannedWait
from rlgraph.plan.play import WARM_UP_STEPS, Engines, Played, play
from rlgraph.plan.schedule import Dependency, Event, Reason, Schedule

Settings = Mapping[str, Setting]  # of each node, by name
BURSTS = 600  # steps: rarer evaluations count as spread over the steps


@dataclass(frozen=True)
class Forecast:
    """A schedule that was played over `steps` steps; those before `warm_up` fill the pipeline."""

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
        """Sum the seconds a step that each pool, and each worker on the host, waits for each channel; the longest first."""
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
        """Yield each event with the one before it in the same pool or host worker, and the steps between them: (before, after, steps)."""
        chains: dict[str, list[str]] = {}
        lag = {event.name: event.lag for event in self.schedule.events}
        for event in (e for e in self.schedule.events if e.kind != "receive"):
            chains.setdefault(event.pool or event.worker, []).append(event.name)
        for chain in chains.values():
            for index, name in enumerate(chain):
                yield chain[index - 1], name, int(index == 0) + lag[chain[index - 1]] - lag[name]

    def _idle(self, before: str, after: str, back: int, own: bool, steps: Iterable[int]) -> Iterator[tuple[Dependency, float]]:
        """Yield what an event waited for, and its idle seconds meanwhile, as the mean of its engines."""
        played = self.played
        done, each = played.ends[before], played.engines.get(after)
        for step in steps:
            if each is None:
                if step - back >= self.steps:  # the one before it was not played so far
                    continue
                starting = played.causes[after][step], max(played.starts[after][step] - done[step - back], 0.0)
                ending = played.held[after][step], played.ends[after][step] - played.worked[after][step]
                yield from ((cause, seconds) for cause, seconds in (starting, ending) if cause is not None)
                continue
            free = played.engines[before].ends[step - back] if own else done[step - back]
            waited = each.late(step, np.maximum(each.starts[step] - free, 0.0)) + each.held[step]
            yield from ((cause, seconds / each.count) for cause, seconds in waited)

    def staleness(self, graph: Graph, feedback: Feedback) -> float:
        """Average the gap between the version that a rollout takes and the version at which it is trained."""
        if not feedback.latest:
            return float(feedback.depth)
        published = sorted(self.played.ends[publish_event(feedback.name)])
        load = load_event(feedback.name, readers(graph, feedback)[0].name)
        each = self.played.engines.get(load)
        starts = [float(at[0]) for at in each.starts] if each is not None else self.played.starts[load]
        gaps = [step - min(sum(end <= starts[step] for end in published), step) for step in range(self.warm_up, self.steps)]
        return sum(gaps) / len(gaps)


def forecast(schedule: Schedule, graph: Graph, settings: Settings, costs: Costs) -> Forecast:
    """Play the schedule with the lengths and spreads of the costs, or with plain seconds where there are none."""
    nodes = graph.nodes
    varying = [node.name for node in nodes if costs.varies(node.name)]
    if not varying:
        steps = WARM_UP_STEPS + rounds_of_evaluations(graph)
        uneven = {name: factors.tolist() for name, factors in bursts(schedule, graph, steps + schedule.most_lag).items()}
        once = play(schedule, steps, lambda event, step: event.seconds * (uneven[event.name][step] if event.name in uneven else 1.0))
        return Forecast(schedule, once, steps, WARM_UP_STEPS)
    rows = max(node.rows for node in nodes)
    together = [node for node in nodes if continuous.is_played(graph, node, costs)]
    steps = continuous.drawn_step_count(costs, rows) if together else costs.steps_drawn(rows)
    drawn = drawn_times(schedule, graph, settings, costs, steps)
    mean = schedule.seconds()
    for name, factors in bursts(schedule, graph, steps).items():
        drawn[name] = np.asarray(factors[:, None] * drawn.get(name, mean[name]))
    apart: dict[str, Engines] = {name: Engines(list(each)) for name, each in drawn.items() if each.shape[1] > 1}
    for node in together:
        apart |= continuous.decode_events(node, settings[node.name], costs, schedule, steps, rows)
    alone = {name: each[:, 0].tolist() for name, each in drawn.items() if name not in apart}

    def seconds(event: Event, step: int) -> float:
        return alone[event.name][step] if event.name in alone else event.seconds

    played = steps - schedule.most_lag  # events that fire rounds ahead of others need lengths of as many steps more
    return Forecast(schedule, play(schedule, played, seconds, apart), played, played // 8)


def rounds_of_evaluations(graph: Graph) -> int:
    """Count the steps, as many as fill the pipeline or more, in which each evaluation happens equally often from round to round."""
    whole = lcm(*(every for every in (node.due.every for node in graph.nodes if node.due is not None) if every <= BURSTS))
    return whole * -(-WARM_UP_STEPS // whole) if whole <= BURSTS else BURSTS


def bursts(schedule: Schedule, graph: Graph, steps: int) -> dict[str, Array]:
    """Find by how much each event of an evaluation takes more than its mean at each step `[steps]`: all at once, or nothing."""
    found: dict[str, Array] = {}
    for name, dues in _dues(schedule, graph).items():
        every = [due.every for due in dues]
        if max(every) <= BURSTS:
            happens = np.array([[(step + 1) % each == 0 for each in every] for step in range(steps)]).any(axis=1)
            found[name] = np.asarray(happens * float(min(every)))
    return found


def _dues(schedule: Schedule, graph: Graph) -> dict[str, list[Due]]:
    """List the evaluations of each event that happens only for them: they, their weights, and the time slices in which they are alone."""
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
    """Draw the seconds `[steps, engines]` of the events of each node whose firings differ, `[steps, 1]` where engines work together."""
    rows = max(node.rows for node in graph.nodes)
    relative: dict[str, Array] = {}  # seconds of each firing `[steps, engines]`, relative to the mean of the last engine
    of_chunks: dict[str, Array] = {}
    for node in (node for node in graph.nodes if costs.varies(node.name)):
        cost = costs.cost_of(node.name)
        drawn = cost.each(settings[node.name], costs.lengths, steps, rows)
        relative[node.name] = drawn / max(float(drawn.max(axis=1).mean()), 1e-12)
        shares = cost.chunk_shares(settings[node.name], costs.lengths, steps, rows, node.chunks)
        of_chunks[node.name] = shares / np.maximum(shares.mean(axis=0), 1e-12)

    def times(event: Event) -> Array:
        engines = relative[event.node].shape[1]
        if event.kind != "fire":
            return np.full((steps, engines), event.seconds)
        found: Array = event.seconds * relative[event.node] * of_chunks[event.node][:, event.chunk, None]
        return found

    return {event.name: times(event) for event in schedule.events if event.node in relative}
