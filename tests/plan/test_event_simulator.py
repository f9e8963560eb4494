"""What a plan predicts is what the runtime's own rules give, firing by firing, on random graphs."""

from typing import Any

import pytest
from support.event_simulator import Simulator
from support.random_graphs import Nothing, random_case

import rlgraph as rg
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Output, declare, feedback
from rlgraph.plan.play import play
from rlgraph.values.pool import Pool

STEPS = 24
CLOSE_S = 1e-6


def differences(seed: int) -> list[str]:
    """List where playing a random plan's schedule and simulating its workers differ."""
    case = random_case(seed)
    plan = rg.compile(case.graph, case.cluster, case.costs)
    simulated, played = Simulator(plan, STEPS, window=STEPS), play(plan.schedule, STEPS)
    return [
        f"seed {seed}: {event} at step {step} begins at {at:.3f} s, by the schedule at {played.starts[event][step]:.3f} s"
        for (event, step), at in sorted(simulated.started.items(), key=lambda item: item[1])
        if step < STEPS and abs(at - played.starts[event][step]) > CLOSE_S
    ]


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_every_firing_begins_when_the_rules_of_workers_channels_and_slots_let_it(first: int) -> None:
    for seed in range(first, first + 50):
        assert not differences(seed)


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_the_predicted_period_is_the_simulated_one_with_as_many_steps_in_flight_as_the_plan_allows(first: int) -> None:
    for seed in range(first, first + 20):
        case = random_case(seed)
        plan = rg.compile(case.graph, case.cluster, case.costs)
        assert Simulator(plan, 240).period(120) == pytest.approx(plan.prediction.period_s, abs=CLOSE_S), seed


def with_critic(depth: int, *, critic_on_its_own: bool = False, aside: int = 0) -> Graph:
    """A rollout on one pool; an update and a critic's on another; and `aside` stages of 1 s behind one another, each on a pool."""
    weights = feedback("weights", depth=depth)
    train, values = Pool("train"), Pool("values")
    source = Output(declare("prompts", Nothing(), (), reads=(), writes=("prompts",), rows=8))
    generator, policy, critic = (
        Model("g", pool=Pool("rollout")),
        Model("p", pool=train),
        Model("c", pool=values if critic_on_its_own else train),
    )
    operation: Any = Nothing("generate")
    rollout = Output(declare("rollout", operation, (source,), reads=("prompts",), writes=("c0",), model=generator, feedback=weights))
    update = declare("update", Nothing("train"), (rollout,), reads=("c0",), writes=(), model=policy)
    outputs = [Output(update, "metrics")]
    outputs.append(Output(declare("critic update", Nothing("train"), (rollout,), reads=("c0",), writes=(), model=critic), "metrics"))
    weights.close(Output(update, "weights"))
    last = rollout
    for index in range(aside):
        model = Model(f"m{index}", pool=Pool(f"aside {index}"))
        last = Output(declare(f"aside {index}", Nothing("forward"), (last,), reads=last.columns, writes=(f"x{index}",), model=model))
    return Graph("critic", *outputs, *([last] if aside else []))


@pytest.mark.parametrize(("depth", "apart", "period_s"), [(0, False, 1.0), (0, True, 1.0), (1, False, 0.8), (1, True, 0.8)])
def test_a_rollout_decodes_beside_the_critics_update_of_the_batch_before(depth: int, apart: bool, period_s: float) -> None:
    seconds = {"prompts": 0.0, "rollout": 0.8, "update": 0.2, "critic update": 0.6}
    plan = rg.compile(with_critic(depth, critic_on_its_own=apart), rg.Cluster(cpus=8), rg.planning.Costs(seconds))
    assert plan.prediction.period_s == pytest.approx(period_s)
    assert plan.prediction.simulated_s == pytest.approx(period_s)
    assert Simulator(plan, 60).period(30) == pytest.approx(period_s)
    assert "critic update" not in plan.prediction.critical


def test_a_critic_that_takes_longest_holds_up_the_put_of_the_rollout_and_not_its_start() -> None:
    seconds = {"prompts": 0.0, "rollout": 0.8, "update": 0.2, "critic update": 2.0}
    plan = rg.compile(with_critic(0, critic_on_its_own=True), rg.Cluster(cpus=8), rg.planning.Costs(seconds))
    assert plan.prediction.period_s == pytest.approx(2.0)
    waits = {(wait.who, wait.on, wait.reason): wait.seconds for wait in plan.prediction.waits}
    assert waits["rollout", "rollout", "slots"] == pytest.approx(1.0), "decoded at 1.0 s, and the one slot is free at 2.0 s"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_enough_steps_are_in_flight_that_stages_beside_the_loop_never_hold_it_up(depth: int) -> None:
    names = [f"aside {index}" for index in range(8)]
    seconds = {"prompts": 0.0, "rollout": 0.5, "update": 0.5, "critic update": 0.1, **dict.fromkeys(names, 1.0)}
    plan = rg.compile(with_critic(depth, aside=8), rg.Cluster(cpus=16), rg.planning.Costs(seconds))
    assert Simulator(plan, 120).period(60) == pytest.approx(1.0)
    assert Simulator(plan, 120, window=4).period(60) > 1.2


@pytest.mark.stage("exhaustive")
@pytest.mark.parametrize("first", range(200, 1000, 200))
def test_many_more_graphs_are_predicted_to_a_microsecond(first: int) -> None:
    for seed in range(first, first + 40):
        assert not differences(seed)
        case = random_case(seed)
        plan = rg.compile(case.graph, case.cluster, case.costs)
        assert Simulator(plan, 240).period(120) == pytest.approx(plan.prediction.period_s, abs=CLOSE_S), seed


def test_the_random_graphs_hold_what_a_schedule_can_hold() -> None:
    kinds, held = set[str](), 0
    for seed in range(60):
        case = random_case(seed)
        plan = rg.compile(case.graph, case.cluster, case.costs)
        kinds |= {event.kind for event in plan.schedule.events} | {channel.kind for channel in plan.channels}
        kinds |= {"critic"} if "critic update 0" in {node.name for node in plan.nodes} else set()
        kinds |= {"parts"} if any(node.chunks > 1 for node in plan.nodes) else set()
        held += any(wait.reason == "slots" for wait in plan.prediction.waits)
    assert kinds == {"fire", "publish", "receive", "load", "wake", "sleep", "batch", "order", "critic", "parts"}
    assert held > 10, "graphs in which a put waits for room"
