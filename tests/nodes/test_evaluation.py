"""Evaluations as they are declared and planned, and what they say of rewards."""

from collections.abc import Callable
from typing import Any

import pytest

import rlgraph as rg
from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Due

ITEMS = [{"prompt": "?", "answer": "!"}] * 4


def right(response: str, answer: str) -> float:
    return float(response == answer)


class Parts:
    def __init__(self, depth: int = 1) -> None:
        self.rollout_pool, self.train_pool = rg.Pool("rollout"), rg.Pool("train")
        self.generator, self.policy = rg.Generator("m", pool=self.rollout_pool), rg.Policy("m", pool=self.train_pool)
        self.weights = rg.feedback("weights", depth=depth)
        prompts = rg.prompts(ITEMS, count=4)
        self.rollout = self.generator.rollout(prompts, self.weights)
        self.advantages = rg.advantages(self.rollout, rg.reward(right, prompts, self.rollout), estimator=rg.GRPO())

    def graph(self, *evaluations: rg.Output) -> rg.Graph:
        step = self.policy.update(self.rollout, self.advantages, loss=rg.ClippedLoss())
        self.weights.close(step.weights)
        return rg.Graph("evaluated", step.metrics, *evaluations)

    def apart(self, pool: rg.Pool | None = None, every: int = 10) -> rg.Graph:
        other = rg.Generator("m", pool=pool or rg.Pool("evaluate"))
        return self.graph(rg.evaluate(other, ITEMS, self.weights, reward=right, every=every))

    def in_turns(self, every: int = 10) -> rg.Graph:
        return self.graph(rg.evaluate(self.generator, ITEMS, self.weights, reward=right, every=every))


def plan(graph: rg.Graph, **seconds: float) -> rg.Plan:
    return rg.compile(
        graph, rg.Cluster(gpus=3, cpus=8), rg.planning.Costs({node.name: seconds.get(node.name, 0.0) for node in graph.nodes})
    )


def test_it_is_due_every_so_many_steps_at_the_last_and_at_the_first_if_asked() -> None:
    assert [step for step in range(10) if Due(4)(step)] == [3, 7]
    assert [step for step in range(10) if Due(4, steps=10)(step)] == [3, 7, 9]
    assert [step for step in range(10) if Due(4, at_start=True)(step)] == [0, 3, 7]


def test_in_turns_it_costs_its_own_share_and_apart_nothing() -> None:
    seconds = {"rollout": 1.0, "update": 0.5, "evaluate": 4.0}
    assert plan(Parts().graph(), **{**seconds, "evaluate": 0.0}).prediction.period_s == pytest.approx(1.0)
    assert plan(Parts().in_turns(), **seconds).prediction.period_s == pytest.approx(1.4)
    assert plan(Parts().apart(), **seconds).prediction.period_s == pytest.approx(1.0)
    assert plan(Parts().apart(every=2), **seconds).prediction.period_s == pytest.approx(2.0), "longer than its steps: training waits"


def test_training_is_ahead_of_an_evaluation_apart_by_the_steps_between_two_of_them() -> None:
    """Two versions to publish, one to load, and an evaluation take 2.0 s: more than a step of 1.5 s, which overlaps them."""
    graph = Parts(depth=2).apart(every=1)
    seconds = {**{node.name: 0.0 for node in graph.nodes}, "rollout": 0.1, "update": 0.5, "evaluate": 0.1}
    found = rg.compile(graph, rg.Cluster(gpus=3, cpus=8), rg.planning.Costs(seconds, publish_s=0.5, receive_s=0.9))
    assert found.prediction.period_s == pytest.approx(1.5)


@pytest.mark.parametrize(("depth", "late_s"), [(0, 0.7), (1, 0.8), (2, 0.5)])
def test_an_evaluation_in_turns_comes_at_once_and_its_step_waits_for_what_nothing_hides(depth: int, late_s: float) -> None:
    """Of its second in ten steps training hides 0.3 s at depth 0, and the batches that are ahead, of which later rollouts make up."""
    seconds = {"rollout": 0.2, "update": 0.3, "evaluate": 1.0}
    whole, undisturbed = plan(Parts(depth).in_turns(), **seconds).prediction, 0.5 if depth == 0 else 0.3
    assert whole.step_s == pytest.approx(undisturbed + late_s / 10)
    assert plan(Parts(depth).apart(), **seconds).prediction.step_s == pytest.approx(undisturbed)
    costs = rg.planning.Costs({"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "evaluate rewards": 0.0, **seconds})
    rehearsed = rg.planning.rehearse(Parts(depth).in_turns(), rg.Cluster(gpus=3, cpus=8), costs, site=rg.planning.ClusterSite(), steps=200)
    assert rehearsed.wall_s / 200 == pytest.approx(whole.step_s, rel=0.02)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_bound_on_staleness_is_that_of_the_training(depth: int) -> None:
    for graph in (Parts(depth).in_turns(), Parts(depth).apart()):
        found = plan(graph)
        assert found.certificate.staleness_bound == depth
        assert found.certificate.deadlock_free


def test_a_plan_with_an_evaluation_prints_draws_and_survives_json(tmp_path: object) -> None:
    for found in (plan(Parts().in_turns(), evaluate=1.0), plan(Parts().apart(), evaluate=1.0)):
        assert rg.Plan.from_json(found.to_json()) == found
        assert "1.00 s / 10" in str(found)
        found.draw(f"{tmp_path}/plan.svg")
        found.timeline(f"{tmp_path}/plan.json", steps=12)
    assert "every 10 steps" in str(plan(Parts().apart()))


def test_what_does_not_happen_at_each_step_is_the_evaluation_and_its_weights_but_not_the_update() -> None:
    assert set(plan(Parts().in_turns()).due_events()) == {"evaluate", "evaluate rewards"}
    assert set(plan(Parts().apart()).due_events()) == {
        "evaluate",
        "evaluate rewards",
        "publish weights to evaluate",
        "load weights to evaluate",
    }


def asked(**given: Any) -> Callable[[], object]:
    settings: dict[str, Any] = {"reward": right, "every": 1, **given}
    return lambda: rg.evaluate(Parts().generator, ITEMS, rg.feedback("w", depth=0), **settings)


def twice() -> object:
    parts = Parts()
    return parts.graph(*(rg.evaluate(parts.generator, ITEMS, parts.weights, reward=right, every=2) for _ in range(2)))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "never": (asked(every=0), "every=0"),
    "a pool of others": (lambda: shared(), r"in pool 'train', where \['update'\] would wait for it"),
    "greedy samples": (asked(samples=4, sampling=rg.Sampling(temperature=0)), "samples=4 of a greedy sampling, .* leave samples out"),
    "a source that is not there": (asked(source="subject"), "has source='subject', which the items lack; there are answer"),
    "two of one name": (twice, "'evaluate'"),
    "a reward of a column that is not there": (asked(reward=lambda response, level: 1.0), "'levels'"),
}


def shared() -> rg.Graph:
    parts = Parts()
    return parts.apart(parts.train_pool)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_evaluated_is_refused_with_the_reason(name: str) -> None:
    declare, message = REFUSED[name]
    with pytest.raises(GraphError, match=message):
        declare()


def test_several_evaluations_of_one_graph_have_metrics_of_their_own() -> None:
    parts = Parts()
    evaluations = [rg.evaluate(parts.generator, ITEMS, parts.weights, reward=right, every=2, **named) for named in ({}, {"name": "aime"})]
    assert [one.node.operation.prefix for one in evaluations] == ["val", "val/aime"]  # type: ignore[attr-defined]
    assert plan(parts.graph(*evaluations)).certificate.deadlock_free


def test_a_checkpoint_knows_its_items_and_their_order() -> None:
    def cursor(items: list[dict[str, str]]) -> object:
        evaluation = rg.evaluate(Parts().generator, items, rg.feedback("w", depth=0), reward=right, every=1)
        return evaluation.node.inputs[0].node.operation.cursor(3)

    items = [{"prompt": "?", "answer": answer} for answer in "ab"]
    assert cursor(items) == cursor(list(items)) != cursor(items[::-1])
