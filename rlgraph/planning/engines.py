"""A schedule with the engines of a generator apart: one that is done goes on to the next step while another still decodes."""

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.planning.schedule import Dependency, Event, Schedule


def engine_event(event: str, engine: int) -> str:
    """Return the name of one engine's part of an event."""
    return f"{event}[{engine}]"


def by_engine(schedule: Schedule, engines: Mapping[str, int]) -> tuple[Schedule, Mapping[str, int]]:
    """Return the schedule in which each engine of a node has events of its own, and the engine of each event.

    Engines of one node wait only for their own earlier events, and for all engines of any other node. Nodes that are not
    among `engines`, or have one, stay as they are.
    """

    def parts(event: Event) -> list[str]:
        count = engines.get(event.node, 1)
        return [engine_event(event.name, engine) for engine in range(count)] if count > 1 else [event.name]

    events = {event.name: event for event in schedule.events}
    apart = [replace(event, name=name) for event in schedule.events for name in parts(event)]
    engine_of = {name: engine for event in schedule.events for engine, name in enumerate(parts(event))}
    dependencies: list[Dependency] = []
    for d in schedule.dependencies:
        before, after = parts(events[d.before]), parts(events[d.after])
        same = events[d.before].node == events[d.after].node
        pairs = zip(before, after, strict=True) if same else ((a, b) for a in before for b in after)
        dependencies += [replace(d, before=a, after=b) for a, b in pairs]
    return Schedule(tuple(apart), tuple(dependencies)), engine_of
