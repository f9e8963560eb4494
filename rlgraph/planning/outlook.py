"""What to expect of a schedule whose times vary: step time, first step, waits on each channel, staleness, by playing it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from rlgraph.graph import Feedback, Graph, Node
from rlgraph.planning.costs import Costs
from rlgraph.planning.engines import by_engine, engine_event
from rlgraph.planning.events import load_event, publish_event, readers
from rlgraph.planning.laws import Setting
from rlgraph.planning.period import WARM_UP_STEPS, Played, play
from rlgraph.planning.plan import PlannedWait
from rlgraph.planning.schedule import Dependency, Event, Reason, Schedule

Settings = Mapping[str, Setting]  # of each node, by name


@dataclass(frozen=True)
class Outlook:
    """A schedule, played over `steps` steps of which those before `warm_up` fill the pipeline."""

    schedule: Schedule
    played: Played
    steps: int
    warm_up: int
    engine_of: Mapping[str, int] = field(default_factory=dict)  # of events that each engine has for itself

    @property
    def step_s(self) -> float:
        ends = self.played.step_ends()
        return (ends[-1] - ends[self.warm_up - 1]) / (self.steps - self.warm_up)

    @property
    def first_step_s(self) -> float:
        return self.played.step_ends()[0]

    def waits(self) -> tuple[PlannedWait, ...]:
        """Return how long each pool, and each worker on the host, stands still for what; the longest first."""
        total: dict[tuple[str, str, Reason], float] = {}

        def add(event: Event, cause: Dependency | None, seconds: float) -> None:
            if cause is not None and cause.reason not in ("order", "self"):
                key = (event.pool or event.worker, cause.via, cause.reason)
                total[key] = total.get(key, 0.0) + seconds

        played, turns = self.played, self._turns()
        for event in (e for e in self.schedule.events if e.kind != "receive"):
            for step in range(self.warm_up, self.steps):
                free = max([ends[step - tokens] for ends, tokens in turns[event.name] if step >= tokens], default=0.0)
                add(event, played.causes[event.name][step], max(played.starts[event.name][step] - free, 0.0))
                add(event, played.held[event.name][step], played.ends[event.name][step] - played.worked[event.name][step])
        engines: dict[str, int] = {}
        for event in self.schedule.events:
            who = event.pool or event.worker
            engines[who] = max(engines.get(who, 1), self.engine_of.get(event.name, 0) + 1)
        counted = self.steps - self.warm_up
        found = [PlannedWait(who, on, reason, idle / counted / engines[who]) for (who, on, reason), idle in total.items() if idle > 0]
        return tuple(sorted(found, key=lambda wait: -wait.seconds))

    def _turns(self) -> Mapping[str, Sequence[tuple[Sequence[float], int]]]:
        """Return for each event when the one before it was done in the same pool, or worker of the host, and how many steps before.

        An engine waits for itself, and for all engines of any other node.
        """
        found: dict[str, list[tuple[Sequence[float], int]]] = {event.name: [] for event in self.schedule.events}
        chains: dict[str, dict[str, list[Event]]] = {}
        for event in (e for e in self.schedule.events if e.kind != "receive"):
            whole = event.name.removesuffix(f"[{self.engine_of.get(event.name, 0)}]")
            chains.setdefault(event.pool or event.worker, {}).setdefault(whole, []).append(event)
        for chain in chains.values():
            groups = list(chain.values())
            for index, group in enumerate(groups):
                for event, before in product(group, groups[index - 1]):
                    same = event.node == before.node
                    if not same or self.engine_of.get(event.name, 0) == self.engine_of.get(before.name, 0):
                        found[event.name].append((self.played.ends[before.name], int(index == 0)))
        return found

    def staleness(self, graph: Graph, feedback: Feedback) -> float:
        """Return the mean gap between the version a rollout takes and the one it is trained at."""
        if not feedback.freshest:
            return float(feedback.depth)
        published = sorted(self.played.ends[publish_event(feedback.name)])
        load = load_event(feedback.name, readers(graph, feedback)[0].name)
        starts = self.played.starts[load if load in self.played.starts else engine_event(load, 0)]
        gaps = [step - min(sum(end <= starts[step] for end in published), step) for step in range(self.warm_up, self.steps)]
        return sum(gaps) / len(gaps)


def outlook(schedule: Schedule, nodes: Sequence[Node], settings: Settings, costs: Costs) -> Outlook:
    """Return the schedule played with the lengths and spreads of the costs, or with plain seconds where there are none."""
    varying = [node.name for node in nodes if costs.varies(node.name)]
    if not varying:
        return Outlook(schedule, play(schedule, 2 * WARM_UP_STEPS), 2 * WARM_UP_STEPS, WARM_UP_STEPS)
    rows = max(node.rows for node in nodes)
    chunks = {node.name: node.chunks for node in nodes}
    steps = costs.steps_drawn(rows)
    relative: dict[tuple[str, int], list[float]] = {}
    parts: dict[str, list[list[float]]] = {}
    engines: dict[str, int] = {}
    for name in varying:
        drawn = costs.law(name).each(settings[name], costs.lengths, steps, rows)
        mean = max(float(drawn.max(axis=1).mean()), 1e-12)
        engines[name] = drawn.shape[1]
        shares = costs.law(name).parts(settings[name], costs.lengths, steps, rows, chunks[name])
        parts[name] = (shares / np.maximum(shares.mean(axis=0), 1e-12)).tolist()
        relative |= {(name, engine): (drawn[:, engine] / mean).tolist() for engine in range(drawn.shape[1])}
    apart, engine_of = by_engine(schedule, engines)

    def seconds(event: Event, step: int) -> float:
        key = event.node, engine_of[event.name]
        if event.kind != "fire" or key not in relative:
            return event.seconds
        return event.seconds * relative[key][step] * parts[event.node][step][event.part]

    return Outlook(apart, play(apart, steps, seconds), steps, steps // 8, engine_of)
