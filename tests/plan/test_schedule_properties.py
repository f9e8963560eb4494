"""Random graphs, depths, timings and orders of firing: the bound holds, nothing locks up, credits stay, predictions agree."""

import random
from dataclasses import dataclass

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_graphs import Nothing

import rlgraph as rg
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Output, declare
from rlgraph.plan.costs import Costs
from rlgraph.plan.events import load_event, publish_event
from rlgraph.plan.play import critical_cycle, simulate, simulated_period
from rlgraph.plan.schedule import Schedule


@dataclass(frozen=True)
class Case:
    graph: Graph
    costs: Costs
    depth: int

    @property
    def schedule(self) -> Schedule:
        return rg.compile(self.graph, rg.Cluster(cpus=8), self.costs).schedule


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A loop of prompts, rollout in one or more parts, up to six nodes between on the host or on pools, and the update."""
    depth, buffers, chunks = draw(st.integers(0, 3)), 1, draw(st.sampled_from([1, 2, 4]))
    if depth:
        buffers = draw(st.integers(1, 2))
    pools = [rg.Pool(f"pool {i}") for i in range(3)]
    models = [Model(f"model {i}", pool=pools[draw(st.integers(0, 2))]) for i in range(3)]
    rollout_model, policy = Model("generator", pool=pools[0]), Model("policy", pool=pools[1])
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    source = Output(declare("prompts", Nothing(), (), reads=(), writes=("prompts",), rows=4))
    node = declare(
        "rollout", Nothing(), (source,), reads=("prompts",), writes=("c0",), model=rollout_model, feedback=weights, chunks=chunks
    )
    made = [Output(node), Output(declare("reward", Nothing(by_group=True), (Output(node),), reads=("c0",), writes=("r0",)))]
    for i in range(1, draw(st.integers(0, 6)) + 1):
        inputs = [made[j] for j in sorted(draw(st.sets(st.integers(0, len(made) - 1), min_size=1, max_size=3)))]
        reads = tuple(output.columns[0] for output in inputs)
        model = draw(st.sampled_from([None, *models]))
        by_group = Nothing(by_group=draw(st.booleans()))
        made.append(Output(declare(f"node {i}", by_group, inputs, reads=reads, writes=(f"c{i}",), model=model)))
    reads = tuple(output.columns[0] for output in made)
    update = declare("update", Nothing(), made, reads=reads, writes=(), model=policy)
    weights.close(Output(update, "weights"))
    graph = Graph("random", Output(update, "metrics"))
    seconds = st.integers(0, 20).map(lambda tenths: tenths / 10)
    costs = Costs(
        {node.name: draw(seconds) for node in graph.nodes}, publish_s=draw(seconds), receive_s=draw(seconds), swap_s=draw(seconds)
    )
    return Case(graph, costs, depth)


@settings(max_examples=30, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_no_batch_is_ever_behind_by_more_than_the_depth_whatever_the_timing(case: Case, chance: random.Random) -> None:
    spans = simulate(case.schedule, 25, lambda event, step: event.seconds * chance.choice([0.0, 0.5, 1.0, 3.0]))
    published = {s.step + 1: s.end_s for s in spans if s.name == publish_event("weights")}
    loaded = {s.step: s.start_s for s in spans if s.name == load_event("weights", "rollout")}
    ended = {s.step: s.end_s for s in spans if s.name.startswith("rollout") and s.kind == "fire"}
    trained = {s.step: s.start_s for s in spans if s.name == "update"}
    for step, start in loaded.items():
        version = max(0, step - case.depth)
        assert version == 0 or published[version] <= start + 1e-9, "the version it uses must be there"
        open_batches = sum(1 for other, begin in loaded.items() if begin <= start and published[other + 1] > start)
        assert open_batches <= case.depth + 1
        assert trained[step] >= ended[step] >= start


@settings(max_examples=20, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_any_order_of_firing_keeps_going_and_keeps_the_credits_of_every_cycle(case: Case, chance: random.Random) -> None:
    schedule = case.schedule
    credits = {index: d.credits for index, d in enumerate(schedule.dependencies)}
    needs = {e.name: [i for i, d in enumerate(schedule.dependencies) if d.after == e.name] for e in schedule.events}
    feeds = {e.name: [i for i, d in enumerate(schedule.dependencies) if d.before == e.name] for e in schedule.events}
    fewest = nx.DiGraph()
    for index, d in enumerate(schedule.dependencies):
        if not fewest.has_edge(d.before, d.after) or schedule.dependencies[fewest.edges[d.before, d.after]["at"]].credits > d.credits:
            fewest.add_edge(d.before, d.after, at=index)
    cycles = [[fewest.edges[a, b]["at"] for a, b in zip(c, c[1:] + c[:1], strict=True)] for c in _some_cycles(fewest)]
    before = [sum(credits[i] for i in cycle) for cycle in cycles]
    fired = dict.fromkeys(needs, 0)
    for _ in range(40 * len(fired)):
        ready = [name for name, wanted in needs.items() if all(credits[i] > 0 for i in wanted)]
        assert ready, "nothing can fire: a deadlock"
        name = chance.choice(ready)
        for index in needs[name]:
            credits[index] -= 1
        for index in feeds[name]:
            credits[index] += 1
        fired[name] += 1
        assert max(fired[name] for name in fired if name.startswith("rollout")) - fired[publish_event("weights")] <= case.depth + 1
    assert [sum(credits[i] for i in cycle) for cycle in cycles] == before
    assert min(fired.values()) > 0


def _some_cycles(graph: "nx.DiGraph[str]") -> list[list[str]]:
    found = []
    for cycle in nx.simple_cycles(graph, length_bound=6):
        found.append(cycle)
        if len(found) == 200:
            break
    return found


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_critical_cycle_and_playing_the_schedule_give_the_same_period(case: Case) -> None:
    schedule = case.schedule
    cycle = critical_cycle(schedule)
    assert simulated_period(schedule, warm_up=120) == pytest.approx(cycle.period_s, rel=0.02, abs=1e-9)
    seconds = schedule.seconds()
    assert sum(seconds[name] for name in cycle.events) / cycle.credits == pytest.approx(cycle.period_s)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_the_certificate_derives_the_depth_that_was_declared(case: Case) -> None:
    plan = rg.compile(case.graph, rg.Cluster(cpus=8), case.costs)
    assert plan.certificate.staleness_bound == case.depth
    assert plan.certificate.deadlock_free


@settings(max_examples=40, deadline=None)
@given(cases())
def test_every_random_plan_survives_json(case: Case) -> None:
    plan = rg.compile(case.graph, rg.Cluster(cpus=8), case.costs)
    assert rg.Plan.from_json(plan.to_json()) == plan
