"""How long a step takes in the steady state: by the critical cycle, and by playing the schedule forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import networkx as nx

from rlgraph.planning.schedule import Dependency, Event, Schedule, Span

Point: TypeAlias = tuple[str, int]  # an event and which of its puts is done; 0 is its start
WARM_UP_STEPS = 60  # divisible by 1 to 6, the token counts of common loops, so that the average covers whole rounds


@dataclass(frozen=True)
class Cycle:
    """The cycle that sets the period: the largest sum of seconds over tokens."""

    period_s: float
    events: tuple[str, ...]
    tokens: int


def critical_cycle(schedule: Schedule) -> Cycle:
    """Find the largest (sum of seconds) / (tokens) over all cycles of the schedule.

    Parametric search (Dinkelbach, 1967, for the maximum cycle ratio): guess a period, look for a cycle that exceeds it,
    take that cycle's ratio as the next guess; each guess is the ratio of a cycle, so the search ends.
    """
    points, links = _links(schedule)
    slowest = max(schedule.events, key=lambda e: e.seconds)
    best = Cycle(slowest.seconds, (slowest.name,), 1)
    tolerance = 1e-9 * max(sum(event.seconds for event in schedule.events), 1e-9)
    while True:
        found = _cycle_above(best.period_s, len(points), links, tolerance)
        if not found:
            return best
        total, tokens = sum(link.seconds for link in found), sum(link.tokens for link in found)
        events = [points[link.before][0] for link in found if points[link.before][1] == 0]
        if tokens == 0:
            raise AssertionError(f"schedule has a cycle without a token, so it would never start: {events}")
        if total / tokens <= best.period_s:
            return best
        best = Cycle(total / tokens, _rotated(events, schedule), tokens)


class _Link(NamedTuple):
    """One point of an event, by number, comes `seconds` after another, or later; of the step `tokens` before."""

    before: int
    after: int
    seconds: float
    tokens: int


def _links(schedule: Schedule) -> tuple[list[Point], list[_Link]]:
    """Return the points of all events, their starts and puts, and what each comes after."""
    puts = sorted({(d.before if d.left_at else d.after, d.put) for d in schedule.dependencies if d.put})
    points: list[Point] = [*((event.name, 0) for event in schedule.events), *puts]
    number = {point: index for index, point in enumerate(points)}
    seconds, last = schedule.seconds(), {name: (name, 0) for name, _ in points}
    tightest: dict[tuple[int, int], int] = {}
    for name, put in puts:
        tightest[number[last[name]], number[name, put]] = 0
        last[name] = (name, put)
    for d in schedule.dependencies:
        link = number[(d.before, d.left_at) if d.left_at else last[d.before]], number[d.after, d.holds]
        tightest[link] = min(d.tokens, tightest.get(link, d.tokens))

    def spent(point: Point) -> float:  # between this point and the next of the event
        return seconds[point[0]] if point[1] == 0 else 0.0

    return points, [_Link(before, after, spent(points[before]), tokens) for (before, after), tokens in tightest.items()]


def _cycle_above(period_s: float, points: int, links: Sequence[_Link], tolerance: float) -> list[_Link]:
    """Return the links of a cycle whose seconds over tokens exceed `period_s`, or none if there is no such cycle.

    Longest paths by relaxation (Bellman, 1958): they end after a round for each point, unless a cycle feeds them. The point
    raised last may lie behind that cycle, so its parents are followed until they must be on it.
    """
    longest = [0.0] * points
    parent: dict[int, _Link] = {}
    weights = [(link, link.before, link.after, link.seconds - period_s * link.tokens - tolerance) for link in links]
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


def _rotated(cycle: list[str], schedule: Schedule) -> tuple[str, ...]:
    """Begin a cycle at the event that comes first in a step, so that equal cycles print alike."""
    place = {event.name: index for index, event in enumerate(schedule.events)}
    first = min(range(len(cycle)), key=lambda i: place[cycle[i]])
    return tuple(cycle[first:] + cycle[:first])


@dataclass(frozen=True)
class Played:
    """When each event's firings start, have worked, and end, by event name; and which dependency the start and the end waited
    for last. They end after their work only where a put waited for room."""

    order: tuple[Event, ...]
    starts: Mapping[str, list[float]]
    worked: Mapping[str, list[float]]
    ends: Mapping[str, list[float]]
    causes: Mapping[str, list[Dependency | None]]
    held: Mapping[str, list[Dependency | None]]

    def step_ends(self) -> list[float]:
        """Return when each step is finished: all its firings and those of the steps before."""
        last = [max(at) for at in zip(*self.ends.values(), strict=True)]
        return list(accumulate(last, max))


Wait: TypeAlias = tuple[Dependency, Sequence[float], int]  # with the times that it waits for, and how many steps before


def play(schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None) -> Played:
    """Return the firings of `steps` steps if each starts as soon as it may; `seconds(event, step)` may vary."""
    order = firing_order(schedule)
    found = Played(tuple(order), *({event.name: [] for event in order} for _ in range(5)))
    puts: dict[tuple[str, int], list[float]] = {}  # when each put was done that somebody waits for
    for d in schedule.dependencies:
        if d.put:
            puts.setdefault((d.before if d.left_at else d.after, d.put), [])
    done = {**puts, **{(name, 0): ends for name, ends in found.ends.items()}}
    waits: dict[tuple[str, int], list[Wait]] = {}
    for d in schedule.dependencies:
        waits.setdefault((d.after, d.holds), []).append((d, done[d.before, d.left_at], d.tokens))
    for key in puts:
        waits.setdefault(key, [])
    by_event = {event.name: sorted(put for name, put in puts if name == event.name) for event in order}
    for step in range(steps):
        for event in order:
            name = event.name
            at, cause = _latest(waits.get((name, 0), ()), step, 0.0)
            found.starts[name].append(at)
            found.causes[name].append(cause)
            at += event.seconds if seconds is None else seconds(event, step)
            found.worked[name].append(at)
            held: Dependency | None = None
            for put in by_event[name]:
                at, cause = _latest(waits[name, put], step, at)
                held = cause or held
                puts[name, put].append(at)
            found.ends[name].append(at)
            found.held[name].append(held)
    return found


def _latest(waits: Sequence[Wait], step: int, at: float) -> tuple[float, Dependency | None]:
    """Return when all of these have come, not before `at`, and which was the last if it came later."""
    cause = None
    for dependency, done, tokens in waits:
        if step >= tokens and done[step - tokens] > at:
            at, cause = done[step - tokens], dependency
    return at, cause


def simulate(schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None) -> list[Span]:
    """Return when each event of each step runs if everything starts as soon as it may, and what waits for room after its work.

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
    """Return the events of a step so that each follows all it waits for within the step.

    Raises networkx.NetworkXUnfeasible for a schedule that would never start.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(event.name for event in schedule.events)
    graph.add_edges_from((d.before, d.after) for d in schedule.dependencies if d.tokens == 0)
    by_name = {event.name: event for event in schedule.events}
    return [by_name[name] for name in nx.topological_sort(graph)]


def simulated_period(schedule: Schedule, warm_up: int = WARM_UP_STEPS) -> float:
    """Return seconds a step, averaged over as many steps again after `warm_up` of them."""
    ends = play(schedule, 2 * warm_up).step_ends()
    return (ends[2 * warm_up - 1] - ends[warm_up - 1]) / warm_up
