"""The search for the critical cycle finds what trying every cycle finds."""

import random

import networkx as nx
import pytest

from rlgraph.plan.play import critical_cycle
from rlgraph.plan.schedule import Dependency, Event, Schedule


def random_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    names = [f"e{i}" for i in range(rng.randint(3, 8))]
    events = tuple(Event(name, "fire", name, name, None, round(rng.random() * 5, 2)) for name in names)
    dependencies = [Dependency(name, name, 1, "self") for name in names]
    for _ in range(rng.randint(len(names), 3 * len(names))):
        a, b = rng.sample(range(len(names)), 2)
        dependencies.append(Dependency(names[a], names[b], 0 if a < b else rng.randint(1, 3), "data"))
    return Schedule(events, tuple(dependencies))


def largest_ratio(schedule: Schedule) -> float:
    seconds = schedule.seconds()
    graph: nx.DiGraph[str] = nx.DiGraph()
    for d in sorted(schedule.dependencies, key=lambda d: -d.credits):
        graph.add_edge(d.before, d.after, credits=d.credits)
    cycles = [(cycle, cycle[1:] + cycle[:1]) for cycle in nx.simple_cycles(graph)]
    return max(sum(map(seconds.__getitem__, a)) / sum(graph.edges[e]["credits"] for e in zip(a, b, strict=True)) for a, b in cycles)


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_the_search_finds_the_largest_ratio_of_all_cycles(first: int) -> None:
    for seed in range(first, first + 50):
        schedule = random_schedule(seed)
        assert critical_cycle(schedule).period_s == pytest.approx(largest_ratio(schedule)), seed


def test_events_of_the_cycle_found_add_up_to_its_period() -> None:
    for seed in range(50):
        schedule = random_schedule(seed)
        cycle = critical_cycle(schedule)
        assert sum(map(schedule.seconds().__getitem__, cycle.events)) / cycle.credits == pytest.approx(cycle.period_s)
