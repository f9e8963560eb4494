"""What a run spends between its events: how long after it could have begun each of them began; and what interrupts a firing."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from rlgraph.compiler.schedule import WORK, Dependency, Schedule, Span
from rlgraph.costs import outliers
from rlgraph.simulate.play import firing_order

Ends = dict[tuple[str, int], dict[str, float]]  # by event and step: when each worker was done


def interruptions(spans: Iterable[Span]) -> Mapping[Span, Sequence[Span]]:
    """Return for each firing that weights interrupted their loading, and the waits for them, within it."""
    everything = list(spans)
    firings: dict[tuple[str, int], list[Span]] = {}
    for span in everything:
        if span.kind == "fire":
            firings.setdefault((span.worker, span.step), []).append(span)
    found: dict[Span, list[Span]] = {}
    for span in everything:
        if span.kind in ("load", "wait"):
            for firing in firings.get((span.worker, span.step), ()):
                if firing.start_s <= span.start_s < firing.end_s:
                    found.setdefault(firing, []).append(span)
    return found


def latencies(schedule: Schedule, spans: Sequence[Span], first_step: int, together: Collection[str] = ()) -> Mapping[str, float]:
    """Return mean seconds from when all that an event waits for was done until it began: copies, wake-ups, messages.

    Played with its events' own seconds and these, the schedule takes as long as the run did. What waited for room in a channel
    ended when the room was there. Weights that are loaded within a
    firing came when they came: nothing was handed over late. What waits for a step before the first of the spans tells nothing.
    Of the nodes that work `together` the last rank counts, for which the others wait.
    """
    within = {span for inner in interruptions(spans).values() for span in inner}
    measured: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.kind in WORK and span not in within:
            measured.setdefault((span.name, span.step), []).append(span)
    steps = sorted({span.step for span in spans})
    within_run = set(steps)
    waits: dict[str, list[Dependency]] = {event.name: [] for event in schedule.events}
    for dependency in schedule.dependencies:
        waits[dependency.after].append(dependency)
    ends: Ends = {}
    unknown: set[tuple[str, int]] = set()  # done when nobody saw it
    late: dict[str, list[float]] = {event.name: [] for event in schedule.events}
    order = firing_order(schedule)
    for turn in range(steps[0], steps[-1] + 1 + schedule.most_lag) if steps else ():
        for event, step in ((event, turn - event.lag) for event in order if turn - event.lag in within_run):
            found = measured.get((event.name, step), [])
            before = [(d.before, step - d.credits) for d in waits[event.name] if d.before != event.name]
            known = not any(place in unknown or 0 <= place[1] < steps[0] or place[1] > steps[-1] for place in before)
            if not found:  # weights of a step that needs none, or what runs unmeasured: done as soon as it could begin
                ends[event.name, step] = {"": max((_ready(ends, d, step, "") for d in waits[event.name]), default=0.0)}
                if not known:
                    unknown.add((event.name, step))
                continue
            starts = [d for d in waits[event.name] if not d.holds]
            ends[event.name, step] = {
                span.worker: max([span.end_s, *(_ready(ends, d, step, span.worker) for d in waits[event.name] if d.holds)])
                for span in found
            }
            began = [(span.start_s, max((_ready(ends, d, step, span.worker) for d in starts), default=0.0)) for span in found]
            if event.node in together:
                began = [(max(start_s for start_s, _ in began), max(ready_s for _, ready_s in began))]
            if step >= first_step and known:
                late[event.name] += [start_s - ready_s for start_s, ready_s in began if ready_s > 0]
    return {name: max(outliers.mean(np.array(values)), 0.0) if values else 0.0 for name, values in late.items()}


def _ready(ends: Ends, dependency: Dependency, step: int, worker: str) -> float:
    done = ends.get((dependency.before, step - dependency.credits), {})
    return done[worker] if worker in done else max(done.values(), default=0.0)
