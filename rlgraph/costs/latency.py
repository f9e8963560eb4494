"""Measure a run's latencies (from when an event could have begun until it did) and what interrupts its firings."""

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from rlgraph.compiler.schedule import WORK, Dependency, Schedule, Span
from rlgraph.costs import outliers
from rlgraph.simulate.play import firing_order

Ends = dict[tuple[str, int], dict[str, float]]  # by event and step: when each worker was done


def interruptions(spans: Iterable[Span]) -> Mapping[Span, Sequence[Span]]:
    """Find, for each firing, the loads of weights that interrupted it, and the waits for them."""
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
    """Average, by event, the seconds from the end of all that it waits for until it began: copies, wake-ups, messages.

    Played with the events' own seconds and these, the schedule takes as long as the run did. An event that waited for room in a
    channel ends when the room is there. Weights that load within a firing have no latency. Events that wait for a step before the
    first span are left out. Of nodes that work `together` the last rank counts, because the others wait for it.
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
    unknown: set[tuple[str, int]] = set()  # ended outside the spans
    late: dict[str, list[float]] = {event.name: [] for event in schedule.events}
    order = firing_order(schedule)
    for number in range(steps[0], steps[-1] + 1 + schedule.most_lag) if steps else ():
        for event, step in ((event, number - event.lag) for event in order if number - event.lag in within_run):
            found = measured.get((event.name, step), [])
            before = [(d.before, step - d.credits) for d in waits[event.name] if d.before != event.name]
            known = not any(place in unknown or 0 <= place[1] < steps[0] or place[1] > steps[-1] for place in before)
            if not found:  # weights of a step that needs none, and events that nobody measures, count as done as soon as they could begin
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
