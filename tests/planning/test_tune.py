"""Tuning: the ranking is that of trying everything, limits hold, and the verdict on stale batches has its reason."""

from collections.abc import Sequence

import pytest

import rlgraph as rg
from rlgraph.errors import GraphError, PlanError
from rlgraph.planning.laws import Decode, NodeCost, Setting
from rlgraph.planning.lengths import Lengths

ONE = Setting(1, 1, 32)
TAIL = Lengths((0.0, 0.5, 0.9, 1.0), (100.0, 800.0, 3000.0, 8000.0), prompt_tokens=200.0)


def exact(responses: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [0.0 for _ in responses]


def build(depth: int = 1, buffers: int = 1, tensor_parallel: int = 1, colocated: bool = False) -> rg.Graph:
    together = rg.Pool("shared")
    rollout_pool, train_pool = (together, together) if colocated else (rg.Pool("rollout", share=None), rg.Pool("train", share=None))
    generator = rg.Generator("m", pool=rollout_pool, tensor_parallel=tensor_parallel)
    policy = rg.Policy("m", pool=train_pool)
    weights = rg.feedback("weights", depth=depth, buffers=buffers)
    prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], count=8)
    rollout = generator.rollout(prompts, weights, group_size=4)
    advantages = rg.advantages(rollout, rg.reward(exact, prompts, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)


def costs(train_s: float, step_s: float = 0.01, start_s: float = 0.0) -> rg.Costs:
    decode = NodeCost(decode=Decode(step_s, 1e-4, start_s=start_s), measured=ONE)
    nodes = {"prompts": 0.0, "reward": 0.0, "advantages": 0.0, "rollout": decode, "update": NodeCost(parallel_s=train_s, measured=ONE)}
    return rg.Costs(nodes, lengths=TAIL, swap_s=0.5, publish_s=0.1)


def test_the_best_plan_is_that_of_compiling_every_split() -> None:
    priced = costs(train_s=200.0)
    found = rg.tune(build, rg.Cluster(gpus=8), priced, depth=(1, 2), buffers=(1, 2))

    def fixed(depth: int, buffers: int, gpus: int) -> float:
        graph = build(depth, buffers)
        pools = {pool.name: pool for pool in graph.pools}
        object.__setattr__(pools["rollout"], "share", float(gpus))
        object.__setattr__(pools["train"], "share", float(8 - gpus))
        return rg.compile(graph, rg.Cluster(gpus=8), priced).prediction.step_s

    every = min(fixed(depth, buffers, gpus) for depth in (1, 2) for buffers in (1, 2) for gpus in range(1, 8))
    assert found.looked_at == 2 * 2 * 7
    assert found.best.step_s == pytest.approx(every, rel=1e-3)


def test_of_plans_as_good_the_least_stale_comes_first() -> None:
    found = rg.tune(build, rg.Cluster(gpus=4), costs(train_s=500.0), depth=(1, 2, 3))
    assert found.best.settings == {"depth": 1}


def test_staleness_is_limited_and_what_was_left_out_is_told() -> None:
    found = rg.tune(build, rg.Cluster(gpus=4), costs(train_s=20.0), depth=range(4), max_staleness=1)
    assert {tuned.staleness for tuned in found} == {0, 1}
    assert found.left_out == {"staleness 2 is above max_staleness=1": 1, "staleness 3 is above max_staleness=1": 1}
    assert "left out 1: staleness 3 is above max_staleness=1" in str(found)


def sync_or_async(depth: int) -> rg.Graph:
    return build(depth, colocated=depth == 0)


def test_stale_batches_win_where_two_equal_sides_overlap() -> None:
    found = rg.tune(sync_or_async, rg.Cluster(gpus=8), costs(train_s=300.0), depth=(0, 1))
    assert found.best.settings == {"depth": 1}
    assert found.verdict.startswith("async wins")
    assert found.verdict in " ".join(str(found).split())


def test_stale_batches_lose_where_one_side_takes_nearly_all_and_the_reason_is_given() -> None:
    found = rg.tune(sync_or_async, rg.Cluster(gpus=4), costs(train_s=900.0, step_s=1e-4), depth=(0, 1))
    assert found.best.settings == {"depth": 0}
    assert "async loses" in found.verdict
    assert "splitting the devices makes both longer" in found.verdict


def test_a_wider_engine_is_chosen_where_the_longest_response_sets_the_step() -> None:
    found = rg.tune(build, rg.Cluster(gpus=8), costs(train_s=40.0, step_s=0.02), tensor_parallel=(1, 2, 4))
    assert found.best.settings == {"tensor_parallel": 4}


def test_a_tuned_plan_has_its_graph_and_prints() -> None:
    found = rg.tune(build, rg.Cluster(gpus=4), None, depth=(1,))
    assert found.best.plan.source is not None
    assert found[0].tokens_per_s is None
    assert "samples/s" in str(found)
    assert len(list(found)) == len(found)


def test_a_graph_that_build_refuses_is_left_out_with_its_reason() -> None:
    def picky(depth: int) -> rg.Graph:
        if depth == 2:
            raise GraphError("depth 2 is not for this task")
        return build(depth)

    assert rg.tune(picky, rg.Cluster(gpus=4), costs(1.0), depth=(1, 2)).left_out == {"depth 2 is not for this task": 1}


WRONG = {
    "no values": (lambda: rg.tune(build, rg.Cluster(gpus=4), None, depth=()), r"tune\(depth=\(\)\): give the values to try"),
    "one value": (lambda: rg.tune(build, rg.Cluster(gpus=4), None, depth=1), r"as depth=\(1, 2\)"),  # type: ignore[arg-type]
    "an objective that is none": (lambda: rg.tune(build, rg.Cluster(gpus=4), by="speed"), "'tokens_per_s', 'gpu_s"),  # type: ignore[arg-type]
    "a cluster too small": (lambda: rg.tune(build, rg.Cluster(gpus=1), None), "tune found no plan: graph 'grpo' needs at least 2 GPUs"),
    "costs that lack a node": (lambda: rg.tune(build, rg.Cluster(gpus=4), rg.Costs({"rollout": 1.0})), "costs lack node 'prompts'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_tuned_is_refused(name: str) -> None:
    attempt, message = WRONG[name]
    with pytest.raises(PlanError, match=message):
        attempt()
