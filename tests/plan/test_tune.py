"""Tuning: the ranking is that of trying everything, limits hold, and the verdict on stale batches has its reason."""

import pytest
from support.tunable_graph import build, costs

import rlgraph as rg
from rlgraph.errors import GraphError, PlanError


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


def test_staleness_is_limited_and_the_result_says_what_was_left_out() -> None:
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
    assert isinstance(found.best.plan.source, rg.Graph)
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
    "no values": (lambda: rg.tune(build, rg.Cluster(gpus=4), None, depth=()), r"tune\(depth=\(\)\): pass the values to try"),
    "one value": (lambda: rg.tune(build, rg.Cluster(gpus=4), None, depth=1), r"e\.g\. depth=\(1, 2\)"),  # type: ignore[arg-type]
    "an objective that is none": (lambda: rg.tune(build, rg.Cluster(gpus=4), by="speed"), "'tokens_per_s', 'gpu_s"),  # type: ignore[arg-type]
    "a cluster too small": (lambda: rg.tune(build, rg.Cluster(gpus=1), None), "tune found no plan: graph 'grpo' needs at least 2 GPUs"),
    "costs that lack a node": (
        lambda: rg.tune(build, rg.Cluster(gpus=4), rg.planning.Costs({"rollout": 1.0})),
        "costs lack node 'prompts'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_tuned_is_refused(name: str) -> None:
    attempt, message = WRONG[name]
    with pytest.raises(PlanError, match=message):
        attempt()
