"""Dividing many devices: the search finds what trying every division finds, and takes a time that hardly grows with them."""

from collections.abc import Callable
from dataclasses import replace
from math import comb

import pytest
from support.tunable_graph import build, costs

import rlgraph as rg
from rlgraph import tuning
from rlgraph.plan import compile as compiling
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.lengths import Lengths
from rlgraph.plan.placement import Counts, Divisions, best_first


def works(*seconds: float) -> Callable[[Counts], float]:
    """Return the period of pools that work at the same time, each so many device-seconds."""
    return lambda counts: max(s / counts[f"pool {i}"] for i, s in enumerate(seconds))


def open_pools(total: int, *groups: int) -> Divisions:
    return Divisions({}, tuple((f"pool {i}", group) for i, group in enumerate(groups)), (), total)


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 1, 1), (2, 4, 1)])
def test_divisions_come_out_by_their_period_and_each_of_them_once(groups: tuple[int, ...]) -> None:
    divisions, period = open_pools(24, *groups), works(30.0, 7.0, 3.0)
    found = list(best_first(divisions, period if len(groups) == 3 else works(30.0, 7.0)))
    assert [d.period_s for d in found] == sorted(d.period_s for d in found)
    every = sorted(tuple(counts.values()) for counts in divisions)
    assert sorted(tuple(division.counts.values()) for division in found) == every
    assert len(divisions) == len(every)
    assert all(sum(counts) <= 24 and all(count % group == 0 for count, group in zip(counts, groups, strict=True)) for counts in every)


def test_the_number_of_divisions_is_known_without_making_them() -> None:
    assert len(open_pools(4096, 1, 1, 1)) == comb(4095, 2)


def test_the_best_of_millions_of_divisions_is_found_by_looking_at_few() -> None:
    looked_at = 0

    def period(counts: Counts) -> float:
        nonlocal looked_at
        looked_at += 1
        return works(300.0, 700.0, 24.0)(counts)

    best = next(best_first(open_pools(4096, 1, 1, 1), period))
    assert tuple(best.counts.values()) == (1200, 2800, 96)
    assert looked_at < 1000


def test_a_division_that_does_not_fit_is_left_out() -> None:
    found = best_first(open_pools(16, 1, 1), lambda counts: works(1.0, 1.0)(counts) if counts["pool 1"] >= 12 else float("inf"))
    assert {division.counts["pool 1"] for division in found} == {12, 13, 14, 15}


@pytest.mark.stage("exhaustive")
@pytest.mark.parametrize("train_s", [40.0, 300.0])
def test_compiling_and_tuning_choose_the_same_where_divisions_are_searched(monkeypatch: pytest.MonkeyPatch, train_s: float) -> None:
    cluster, priced = Cluster(gpus=24), costs(train_s)
    plan, tuned = rg.compile(build(1), cluster, priced), rg.tune(build, cluster, priced, depth=(1, 2))
    for module in (compiling, tuning):
        monkeypatch.setattr(module, "FEW", 4)
    searched, retuned = rg.compile(build(1), cluster, priced), rg.tune(build, cluster, priced, depth=(1, 2))
    assert searched.prediction.period_s == pytest.approx(plan.prediction.period_s)
    assert retuned.best.step_s == pytest.approx(tuned.best.step_s)
    assert retuned.best.settings == tuned.best.settings
    assert retuned.looked_at == tuned.looked_at == 2 * 23


@pytest.mark.parametrize("train_s", [10.0, 60.0])
def test_the_division_of_the_shortest_step_is_chosen_where_engines_do_not_wait_for_each_other(train_s: float) -> None:
    """The mean of the longest rollout hardly depends on the number of engines here; how long an engine waits for the trainer does."""
    cluster, graph = Cluster(gpus=12), build(1)
    priced = replace(costs(train_s), lengths=Lengths((0.0, 0.5, 0.9, 1.0), (20.0, 150.0, 600.0, 1024.0)))
    steps = {n: compiling.build_plan(graph, cluster, priced, {"rollout": n, "train": 12 - n}, {}).prediction.step_s for n in range(1, 12)}
    assert rg.compile(graph, cluster, priced).prediction.step_s == min(steps.values())


def test_a_division_whose_workers_would_lie_on_two_hosts_is_passed_over() -> None:
    plan = rg.compile(build(1, tensor_parallel=2), Cluster(gpus=16), costs(300.0))
    assert all(len({plan.cluster.host_of_gpu(gpu) for gpu in worker.gpus}) <= 1 for worker in plan.workers)
