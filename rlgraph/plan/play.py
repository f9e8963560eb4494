"""Find the seconds of a step in the steady state: by the critical cycle, and by playing the schedule forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import networkx as nx
import numpy as np

from rlgraph.plan.lengths import Array
from rlgraph.plan.schedule import Dependency, Event, Schedule, Span

# Simulate each engine of a generator separately: an engine that is done continues with the next step while another still decodes.

Wait: TypeAlias = tuple[Dependency, Sequence[Any], int]  # its times, one or `[engines]` per step, and how many steps before
Waited: TypeAlias = list[tuple[Dependency, float]]  # for what, and how long
NOTHING = -1  # was waited for


@dataclass
class Engines:
    """One event that each engine of a node has separately. `seconds` and all times here are `[engines]` per step."""

    seconds: Sequence[Array]
    starts: list[Array] = field(default_factory=list)
    worked: list[Array] = field(default_factory=list)
    ends: list[Array] = field(default_factory=list)
    puts: dict[int, list[Array]] = field(default_factory=dict)
    causes: list[Array] = field(default_factory=list)  # the number of what each start waited for last
    held: list[Waited] = field(default_factory=list)
    waits: dict[int, Sequence[Wait]] = field(default_factory=dict)  # of the start (0) and of each put
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)  # when each event of the schedule ended, by step

    @property
    def count(self) -> int:
        return len(self.seconds[0])

    def fire(self, step: int) -> None:
        """Play the event of one step, after everything that it waits for."""
        at, cause = self._latest(0, step, np.zeros(self.count))
        self.starts.append(at)
        self.causes.append(cause)
        at = at + self.seconds[step]
        self.worked.append(at)
        held: Waited = []
        for put, done in self.puts.items():
            before = at
            at, cause = self._latest(put, step, before)
            held += self._wait_seconds(put, cause, at - before)
            done.append(at)
        self.held.append(held)
        self.ends.append(at)

    def late(self, step: int, seconds: Array) -> Waited:
        """Sum the `seconds` `[engines]` of a step's starts by what each waited for last."""
        return self._wait_seconds(0, self.causes[step], seconds)

    def _latest(self, put: int, step: int, at: Array) -> tuple[Array, Array]:
        """Find when each engine has everything that a put waits for, at `at` or later, and the number of the wait that ended last after
        `at`."""
        cause = np.full(self.count, NOTHING)
        for number, (_, done, credits) in enumerate(self.waits.get(put, ())):
            if step >= credits and (later := done[step - credits] > at).any():
                at, cause = np.where(later, done[step - credits], at), np.where(later, number, cause)
        return at, cause

    def _wait_seconds(self, put: int, causes: Array, seconds: Array) -> Waited:
        numbers = set(causes.tolist()) - {NOTHING}
        return [(self.waits[put][number][0], float(seconds[causes == number].sum())) for number in sorted(numbers)]


Point: TypeAlias = tuple[str, int]  # an event and which of its puts is done; 0 is its start
TOGETHER: Mapping[str, Engines] = {}
TIMES = ("starts", "worked", "ends", "causes", "held")  # of a play, by event
WARM_UP_STEPS = 60  # divisible by 1 to 6, the credit counts of common loops, so that the average covers whole rounds


@dataclass(frozen=True)
class Cycle:
    """The cycle that sets the period: the largest sum of seconds over credits."""

    period_s: float
    events: tuple[str, ...]
    credits: int


def critical_cycle(schedule: Schedule) -> Cycle:
    """Find the largest (sum of seconds) / (credits) over all cycles of the schedule.

    Parametric search (Dinkelbach, 1967, for the maximum cycle ratio): guess a period, look for a cycle that exceeds it,
    take that cycle's ratio as the next guess; each guess is the ratio of a cycle, so the search ends.
    """
    return _longest_cycle(schedule, *_links(schedule))


class Timed:
    """Finds the period of one schedule for other seconds of its events, much faster than building a new schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._points, self._links = _links(schedule)

    def period_s(self, seconds: Mapping[str, float]) -> float:
        """Find the period if the events, by name, last these seconds."""
        events = tuple(replace(event, seconds=seconds.get(event.name, event.seconds)) for event in self.schedule.events)
        spent = {event.name: event.seconds for event in events}
        links = [
            link._replace(seconds=spent[self._points[link.before][0]]) if self._points[link.before][1] == 0 else link
            for link in self._links
        ]
        return _longest_cycle(Schedule(events, self.schedule.dependencies), self._points, links).period_s


def _longest_cycle(schedule: Schedule, points: list[Point], links: "Sequence[_Link]") -> Cycle:
    slowest = max(schedule.events, key=lambda e: e.seconds)
    best = Cycle(slowest.seconds, (slowest.name,), 1)
    tolerance = 1e-9 * max(sum(event.seconds for event in schedule.events), 1e-9)
    while True:
        found = _cycle_above(best.period_s, len(points), links, tolerance)
        if not found:
            return best
        total, credits = sum(link.seconds for link in found), sum(link.credits for link in found)
        events = [points[link.before][0] for link in found if points[link.before][1] == 0]
        if credits == 0:
            raise AssertionError(f"schedule has a cycle without a credit, so it would never start: {events}")
        if total / credits <= best.period_s:
            return best
        best = Cycle(total / credits, _rotate_cycle(events, schedule), credits)


class _Link(NamedTuple):
    """One point of an event, by number, comes at least `seconds` after another point, which belongs to the step `credits` before."""

    before: int
    after: int
    seconds: float
    credits: int


def _links(schedule: Schedule) -> tuple[list[Point], list[_Link]]:
    """List the points of all events (starts and puts), and the links between them."""
    puts = _puts(schedule)
    points: list[Point] = [*((event.name, 0) for event in schedule.events), *puts]
    number = {point: index for index, point in enumerate(points)}
    seconds, last = schedule.seconds(), {name: (name, 0) for name, _ in points}
    tightest: dict[tuple[int, int], int] = {}
    for name, put in puts:
        tightest[number[last[name]], number[name, put]] = 0
        last[name] = (name, put)
    for d in schedule.dependencies:
        link = number[(d.before, d.left_at) if d.left_at else last[d.before]], number[d.after, d.holds]
        tightest[link] = min(d.credits, tightest.get(link, d.credits))

    def link_seconds(point: Point) -> float:  # between this point and the next of the event
        return seconds[point[0]] if point[1] == 0 else 0.0

    return points, [_Link(before, after, link_seconds(points[before]), credits) for (before, after), credits in tightest.items()]


def _puts(schedule: Schedule) -> list[Point]:
    """List the puts that wait, or that something waits for, in order."""
    return sorted({(d.before if d.left_at else d.after, d.put) for d in schedule.dependencies if d.put})


def _cycle_above(period_s: float, points: int, links: Sequence[_Link], tolerance: float) -> list[_Link]:
    """Find a cycle whose seconds over credits exceed `period_s`; an empty list if there is none.

    Longest paths by relaxation (Bellman, 1958): they end after a round for each point, unless a cycle feeds them. The point raised last may
    be behind that cycle, so its parents are followed until they must be on it.
    """
    longest = [0.0] * points
    parent: dict[int, _Link] = {}
    weights = [(link, link.before, link.after, link.seconds - period_s * link.credits - tolerance) for link in links]
    raised = -1
    for _ in range(points):
        raised = -1
        for link, before, after, weight in weights:
            reached = longest[before] + weight
            if reached > longest[after]:
                longest[after], parent[after], raised = reached, link, after
        if raised < 0:
            return []
    for _ in range(points):
        raised = parent[raised].before
    cycle = [parent[raised]]
    while cycle[-1].before != raised:
        cycle.append(parent[cycle[-1].before])
    return cycle[::-1]


def _rotate_cycle(cycle: list[str], schedule: Schedule) -> tuple[str, ...]:
    """Begin a cycle at the event that comes first in a step, so that equal cycles print equally."""
    place = {event.name: index for index, event in enumerate(schedule.events)}
    first = min(range(len(cycle)), key=lambda i: place[cycle[i]])
    return tuple(cycle[first:] + cycle[:first])


@dataclass(frozen=True)
class Played:
    """When each event's firings start, finish their work, and end, by event name; and what the start and the end waited for last.

    They end after their work only if a put waited for room. If the engines of a node have separate events, its times are the times of the
    last engine, and `engines` has the times of each.
    """

    order: tuple[Event, ...]
    starts: dict[str, list[float]]
    worked: dict[str, list[float]]
    ends: dict[str, list[float]]
    causes: dict[str, list[Dependency | None]]
    held: dict[str, list[Dependency | None]]
    engines: Mapping[str, Engines]

    def only(self, steps: int) -> "Played":
        """Leave out the steps beyond `steps`, which some events played ahead for others."""
        if all(len(ends) == steps for ends in self.ends.values()):
            return self
        times: dict[str, Any] = {name: {event: at[:steps] for event, at in getattr(self, name).items()} for name in TIMES}
        return replace(self, **times)

    def step_ends(self) -> list[float]:
        """Find when each step ends: all its firings and the firings of earlier steps."""
        last = [max(at) for at in zip(*self.ends.values(), strict=True)]
        return list(accumulate(last, max))


def play(
    schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None, engines: Mapping[str, Engines] = TOGETHER
) -> Played:
    """Play `steps` steps in which each firing starts as soon as it may; `seconds(event, step)` may vary. It is asked
    for more than `steps` steps of an event that fires rounds ahead of others.

    `engines` are the events that each engine of a node has separately. An engine waits for its own earlier events, and for all engines of
    any other node.
    """
    order = firing_order(schedule)
    found = Played(tuple(order), {}, {}, {}, {}, {}, engines)
    for event in order:
        for name in TIMES:
            getattr(found, name)[event.name] = []
    lines = [(event, engines.get(event.name), puts) for event, puts in _lines(schedule, found)]
    for number in range(steps + schedule.most_lag):
        for event, each, puts in lines:
            step = number - event.lag
            if step < 0:
                continue
            if each is not None:
                each.fire(step)
                _note_last(found, event.name, each, puts)
                continue
            starting, *putting = puts
            at, cause = _latest(starting.waits, step, 0.0)
            found.starts[event.name].append(at)
            found.causes[event.name].append(cause)
            at += event.seconds if seconds is None else seconds(event, step)
            found.worked[event.name].append(at)
            held: Dependency | None = None
            for put in putting:
                at, cause = _latest(put.waits, step, at)
                held = cause or held
                put.done.append(at)
            found.ends[event.name].append(at)
            found.held[event.name].append(held)
    return found.only(steps)


@dataclass(frozen=True)
class _Put:
    """The waits of an event's put (or of its start, as `number` 0), and when each put was done."""

    number: int
    waits: list[Wait] = field(default_factory=list)
    done: list[float] = field(default_factory=list)


def _lines(schedule: Schedule, found: Played) -> list[tuple[Event, list[_Put]]]:
    """Pair the events, in order, with their start and puts, each with the times that it waits for."""
    puts = {event.name: {0: _Put(0)} for event in found.order}
    for name, number in _puts(schedule):
        puts[name][number] = _Put(number)
    for name, each in found.engines.items():
        each.puts = {number: [] for number in puts[name] if number}
        each.waits = {number: put.waits for number, put in puts[name].items()}
        each.others = found.ends
    nodes = {event.name: event.node for event in found.order}
    for d in schedule.dependencies:
        times: Sequence[Any] = puts[d.before][d.left_at].done if d.left_at else found.ends[d.before]
        if d.before in found.engines and nodes[d.before] == nodes[d.after]:
            each = found.engines[d.before]
            times = each.puts[d.left_at] if d.left_at else each.ends
        puts[d.after][d.holds].waits.append((d, times, d.credits))
    return [(event, list(puts[event.name].values())) for event in found.order]


def _note_last(found: Played, name: str, each: Engines, puts: Sequence[_Put]) -> None:
    """Record when the last engine was done with an event: others wait for all of them."""
    for put in puts[1:]:
        put.done.append(float(each.puts[put.number][-1].max()))
    found.starts[name].append(float(each.starts[-1].max()))
    found.worked[name].append(float(each.worked[-1].max()))
    found.ends[name].append(float(each.ends[-1].max()))


def _latest(waits: Sequence[Wait], step: int, at: float) -> tuple[float, Dependency | None]:
    """Find when all waits are over, at `at` or later, and which wait ended last after `at`."""
    cause = None
    for dependency, done, credits in waits:
        if step >= credits and done[step - credits] > at:
            at, cause = done[step - credits], dependency
    return at, cause


def simulate(schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None) -> list[Span]:
    """Simulate `steps` steps in which everything starts as soon as it may; spans of kind `room` are waits for slots after the work.

    `seconds(event, step)` may vary.
    """
    played = play(schedule, steps, seconds)
    spans = []
    for step in range(steps):
        for event in played.order:
            worked, held = played.worked[event.name][step], played.held[event.name][step]
            spans.append(Span(event.name, event.kind, step, event.worker, played.starts[event.name][step], worked))
            if held is not None:
                spans.append(Span(held.via, "room", step, event.worker, worked, played.ends[event.name][step]))
    return spans


def firing_order(schedule: Schedule) -> list[Event]:
    """Order the events of a round so that each follows the events that it waits for in the round.

    Raises networkx.NetworkXUnfeasible for a schedule that would never start.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(event.name for event in schedule.events)
    graph.add_edges_from(schedule.within_rounds())
    by_name = {event.name: event for event in schedule.events}
    return [by_name[name] for name in nx.topological_sort(graph)]


def simulated_period(schedule: Schedule, warm_up: int = WARM_UP_STEPS) -> float:
    """Simulate the seconds per step, averaged over `warm_up` steps after the first `warm_up`."""
    ends = play(schedule, 2 * warm_up).step_ends()
    return (ends[2 * warm_up - 1] - ends[warm_up - 1]) / warm_up
