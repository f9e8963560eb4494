"""Which updates come a round later, what a step in one pool then takes, and that tuning finds it."""

import pytest
from support import fakes
from support.event_simulator import Simulator
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Output, declare
from rlgraph.graph.rules import lags
from rlgraph.plan.cost_functions import SleepCost

SECONDS = {"prompts": 0.0, "rollout": 1.0, "reward": 0.5, "update": 0.75}
MOVED = {"publish_s": 0.25, "swap_s": 0.125, "receive_s": 0.125}
SLEEP = {"generator": SleepCost(0.1, 0.2), "policy": SleepCost(0.3, 0.4)}


def late(graph: Graph) -> dict[str, int]:
    return {node.name: lag for node, lag in lags(graph).items() if lag}


def one_pool(depth: int) -> Graph:
    return Loop(depth=depth, shared=True).graph()


@pytest.mark.parametrize(("depth", "lag"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3)])
def test_an_update_in_the_rollouts_pool_comes_later_by_its_depth(depth: int, lag: int) -> None:
    assert late(one_pool(depth)) == ({"update": lag} if lag else {})


def test_an_update_in_a_pool_of_its_own_and_a_reference_beside_the_rollout_never_come_later() -> None:
    assert late(Loop(depth=1).graph()) == {}
    assert late(Loop(depth=2, reference="rollout").graph()) == {}
    assert late(Loop(depth=1, shared=True, reference="train").graph()) == {"update": 1}


def test_all_that_a_late_model_does_comes_late_with_it() -> None:
    """Old log-probs are those at the start of the update, so they may not come before the update of the step before."""
    pool = rg.Pool("shared")
    generator, policy = rg.Generator("m", pool=pool), rg.Policy("m", pool=pool)
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(fakes.ITEMS, 4)
    rollout = generator.rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(lambda responses: [0.0 for _ in responses], prompts, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, policy.log_probs(rollout), loss=rg.ClippedLoss())
    weights.close(step.weights)
    graph = rg.Graph("old", step.metrics)
    assert late(graph) == {"old_log_probs": 1, "update": 1}
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    assert [e.name for e in plan.schedule.events if e.kind == "fire" and e.pool] == ["rollout", "old_log_probs", "update"]
    assert plan.certificate.staleness_bound == 1
    assert plan.certificate.deadlock_free


def test_a_generator_that_is_used_again_after_the_reward_cannot_go_first() -> None:
    pool = rg.Pool("shared")

    def again(rollout: Output) -> Output:
        scored = fakes.score(rollout)
        judge = declare(
            "judge", fakes.Judge(), (rollout, scored), reads=("values", "rewards"), writes=("rewards",), model=rollout.node.model
        )
        return Output(judge)

    with pytest.raises(rg.errors.GraphError, match=r"nothing can overlap.*for no other generator"):
        fakes.vector_loop(1, pools=(pool, pool), middle=again)


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize("reward_s", [0.5, 4.0])
def test_a_step_in_one_pool_takes_the_sum_of_its_nodes_or_its_reward(gpus: int, reward_s: float) -> None:
    """The sum of all at depth 0; at depth 1 the pool's own work and moving the weights; at depth 2 the pool's own work and loading."""
    costs = rg.planning.Costs({**SECONDS, "reward": reward_s}, **MOVED, sleep=SLEEP if gpus else {})
    cluster = rg.Cluster(gpus=gpus, cpus=2)
    plans = [rg.compile(one_pool(depth), cluster, costs) for depth in range(4)]
    pool_s = 1.0 + 0.75 + 0.25 + (1.0 if gpus else 0.0)
    wanted = [pool_s + 0.25 + reward_s, max(pool_s + 0.25, reward_s), max(pool_s, reward_s), max(pool_s, reward_s)]
    for depth, plan in enumerate(plans):
        told = plan.prediction
        assert [told.period_s, told.simulated_s, told.step_s, plan.certificate.period_s] == [pytest.approx(wanted[depth])] * 4
        assert Simulator(plan, 60).period(30) == pytest.approx(wanted[depth])
        assert (plan.certificate.staleness_bound, plan.certificate.deadlock_free) == (depth, True)
        assert "reward" not in told.critical or depth == 0 or told.critical == ("reward",)


def test_tuning_finds_that_a_stale_batch_hides_a_slow_reward_in_one_pool() -> None:
    found = rg.tune(one_pool, rg.Cluster(cpus=1), rg.planning.Costs(SECONDS), depth=(0, 1))
    assert [candidate.settings["depth"] for candidate in found] == [1, 0]
    assert [candidate.step_s for candidate in found] == [pytest.approx(1.75), pytest.approx(2.25)]
    quick = rg.tune(one_pool, rg.Cluster(cpus=1), rg.planning.Costs({**SECONDS, "reward": 0.0}), depth=(0, 1))
    assert quick[0].settings["depth"] == 0, "as good and less stale comes first"


def test_a_late_update_is_written_and_read_again_with_its_plan() -> None:
    plan = rg.compile(one_pool(1), rg.Cluster(cpus=1), rg.planning.Costs(SECONDS))
    assert rg.Plan.from_json(plan.to_json()).schedule == plan.schedule
    order = next(channel for channel in plan.channels if channel.kind == "order")
    assert (order.writer, order.readers, order.credits) == ("rollout", ("update",), -1)
    ahead = plan.steps_ahead()
    assert (ahead["prompts"], ahead["generator"], ahead["policy"], ahead["reward"]) == (1, 1, 0, 0)
