"""How long a step takes in the steady state: by the critical cycle, and by playing the schedule forward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx

from rlgraph.planning.schedule import Dependency, Event, Schedule, Span

WARM_UP_STEPS = 60  # divisible by 1 to 6, the token counts of common loops, so that the average covers whole rounds


@dataclass(frozen=True)
class Cycle:
    """The cycle that sets the period: the largest sum of seconds over tokens."""

    period_s: float
    events: tuple[str, ...]
    tokens: int


def critical_cycle(schedule: Schedule) -> Cycle:
    """Return the largest (sum of seconds) / (tokens) over all cycles of the schedule.

    Parametric search (Dinkelbach, 1967, for the maximum cycle ratio): guess a period, look for a cycle that exceeds it,
    take that cycle's ratio as the next guess; each guess is the ratio of a cycle, so the search ends.
    """
    seconds = schedule.seconds()
    tightest: dict[tuple[str, str], int] = {}
    for d in schedule.dependencies:
        tightest[d.before, d.after] = min(d.tokens, tightest.get((d.before, d.after), d.tokens))
    slowest = max(schedule.events, key=lambda e: e.seconds)
    best = Cycle(slowest.seconds, (slowest.name,), 1)
    tolerance = 1e-9 * max(sum(seconds.values()), 1e-9)
    while True:
        found = _cycle_above(best.period_s, tightest, seconds, tolerance)
        if not found:
            return best
        total = sum(seconds[name] for name in found)
        tokens = sum(tightest[a, b] for a, b in zip(found, found[1:] + found[:1], strict=True))
        if tokens == 0:
            raise AssertionError(f"schedule has a cycle without a token, so it would never start: {found}")
        if total / tokens <= best.period_s:
            return best
        best = Cycle(total / tokens, _rotated(found, schedule), tokens)


def _cycle_above(period_s: float, tokens: Mapping[tuple[str, str], int], seconds: Mapping[str, float], tolerance: float) -> list[str]:
    """Return the events of a cycle whose seconds over tokens exceed `period_s`, or none if there is no such cycle.

    Longest paths by relaxation (Bellman, 1958): they end after a round for each event, unless a cycle feeds them. The event
    raised last may lie behind that cycle, so its parents are followed until they must be on it.
    """
    longest, parent, raised = dict.fromkeys(seconds, 0.0), dict[str, str](), ""
    for _ in seconds:
        raised = ""
        for (before, after), held in tokens.items():
            reached = longest[before] + seconds[before] - period_s * held - tolerance
            if reached > longest[after]:
                longest[after], parent[after], raised = reached, before, after
        if not raised:
            return []
    for _ in seconds:
        raised = parent[raised]
    cycle = [raised]
    while parent[cycle[-1]] != raised:
        cycle.append(parent[cycle[-1]])
    return cycle[::-1]


def _rotated(cycle: list[str], schedule: Schedule) -> tuple[str, ...]:
    """Begin a cycle at the event that comes first in a step, so that equal cycles print alike."""
    place = {event.name: index for index, event in enumerate(schedule.events)}
    first = min(range(len(cycle)), key=lambda i: place[cycle[i]])
    return tuple(cycle[first:] + cycle[:first])


@dataclass(frozen=True)
class Played:
    """When each event's firings start and end, by event name, and which dependency each waited for last."""

    order: tuple[Event, ...]
    starts: Mapping[str, Sequence[float]]
    ends: Mapping[str, Sequence[float]]
    causes: Mapping[str, Sequence[Dependency | None]]

    def step_ends(self) -> list[float]:
        """Return when each step is finished: all its firings and those of the steps before."""
        last = [max(at) for at in zip(*self.ends.values(), strict=True)]
        return list(accumulate(last, max))


def play(schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None) -> Played:
    """Return the firings of `steps` steps if each starts as soon as it may; `seconds(event, step)` may vary."""
    order = firing_order(schedule)
    starts: dict[str, list[float]] = {event.name: [] for event in order}
    ends: dict[str, list[float]] = {event.name: [] for event in order}
    causes: dict[str, list[Dependency | None]] = {event.name: [] for event in order}
    waits = {event.name: [(d, ends[d.before], d.tokens) for d in schedule.dependencies if d.after == event.name] for event in order}
    for step in range(steps):
        for event in order:
            start, cause = 0.0, None
            for dependency, done, tokens in waits[event.name]:
                if step >= tokens and done[step - tokens] > start:
                    start, cause = done[step - tokens], dependency
            starts[event.name].append(start)
            ends[event.name].append(start + (event.seconds if seconds is None else seconds(event, step)))
            causes[event.name].append(cause)
    return Played(tuple(order), starts, ends, causes)


def simulate(schedule: Schedule, steps: int, seconds: Callable[[Event, int], float] | None = None) -> list[Span]:
    """Return when each event of each step runs if everything starts as soon as it may; `seconds(event, step)` may vary."""
    played = play(schedule, steps, seconds)
    return [
        Span(event.name, event.kind, step, event.worker, played.starts[event.name][step], played.ends[event.name][step])
        for step in range(steps)
        for event in played.order
    ]


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
