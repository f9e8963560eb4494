"""Costs by device count, and the warning where a plain number of seconds is compared across device counts."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.errors import PlanError, PlanWarning
from rlgraph.plan.cost_functions import Setting

TWO = rg.Cluster(gpus=2)
HOST = {"prompts": 0.0, "reward": 0.0, "advantages": 0.0}
# Measured of one job on H200s: 38.2 and 9.2 s on one GPU each, 19.0 and 4.9 s on two. A step took 24.2 s time-shared, 38 to 40 s ahead.
ON_ONE: dict[str, float] = {"rollout": 38.2, "update": 9.2}
BY_DEVICES: dict[str, Mapping[int, float]] = {"rollout": {1: 38.2, 2: 19.0}, "update": {1: 9.2, 2: 4.9}}


def lengths(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def build(depth: int = 1, count: int = 8, gpus: int | None = None) -> rg.Graph:
    together = rg.Pool("gpus")
    apart = rg.Pool("rollout", gpus=gpus) if gpus else rg.Pool("rollout", share=None)
    pools = (together, together) if depth == 0 else (apart, rg.Pool("train", share=None))
    generator, policy = rg.Generator("m", pool=pools[0]), rg.Policy("m", pool=pools[1])
    return grpo_graph(generator, policy, reward=lengths, count=count, group_size=4, depth=depth)


def seconds(cost: rg.planning.NodeCost | Mapping[int, float], devices: int) -> float:
    return rg.planning.Costs({"node": cost}).mean("node", Setting(devices))


def test_plain_numbers_from_one_gpu_warn_before_the_verdict_on_stale_batches() -> None:
    with pytest.warns(PlanWarning, match="'rollout' and 'update'.*on 1 and 2 devices.*{1: 38.2, 2: …}"):
        found = rg.tune(build, TWO, rg.planning.Costs({**HOST, **ON_ONE}), depth=(0, 1))
    assert "38.2, 2: …}" in found.verdict
    assert found.verdict.index("plain numbers") < found.verdict.index("async wins")
    assert "plain numbers" in str(found)
    assert all("warning: " in str(tuned.plan) for tuned in found)


def test_with_both_counts_given_time_sharing_wins_as_measured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rg.tune(build, TWO, rg.planning.Costs({**HOST, **BY_DEVICES}, publish_s=0.1, swap_s=0.1), depth=(0, 1))
    assert found.verdict.startswith("async loses")
    steps = {tuned.settings["depth"]: tuned.step_s for tuned in found}
    assert steps[0] == pytest.approx(24.2, rel=0.02)
    assert 38 <= steps[1] <= 40
    assert "warning" not in str(found.best.plan)


def test_a_plan_whose_split_is_chosen_by_plain_numbers_warns_and_one_with_a_given_split_does_not() -> None:
    costs = rg.planning.Costs({**HOST, **ON_ONE})
    with pytest.warns(PlanWarning, match="'rollout' and 'update'.*on 1, 2 and 3 devices"):
        plan = rg.compile(build(), rg.Cluster(gpus=4), costs)
    assert "warning: the seconds of 'rollout' and 'update'" in " ".join(str(plan).split())
    assert rg.compile(build(gpus=1), TWO, costs).prediction.warnings == ()


def test_a_plain_number_that_is_compared_across_batches_warns_too() -> None:
    with pytest.warns(PlanWarning, match="for 32 and 64 rows"):
        rg.tune(build, TWO, rg.planning.Costs({**HOST, **ON_ONE}), count=(8, 16))


def test_a_node_that_a_plan_has_at_its_plain_number_says_so() -> None:
    plan = rg.compile(build(), TWO, rg.planning.Costs({**HOST, "rollout": 38.2, "update": {1: 9.2}}))
    rows = {
        words[0]: " ".join(words) for line in str(plan).splitlines() if len(words := line.split()) > 2 and words[1] in ("generate", "train")
    }
    assert "given, any devices" in rows["rollout"]
    assert "any devices" not in rows["update"]


def test_seconds_by_device_count_are_those_given_and_others_follow_the_nearest_two() -> None:
    given = {1: 40.0, 2: 24.0, 4: 16.0}  # 8 + 32 / n
    assert [seconds(given, n) for n in (1, 2, 4)] == [40.0, 24.0, 16.0]
    assert seconds(given, 3) == pytest.approx(8 + 32 / 3)
    assert seconds(given, 8) == pytest.approx(12.0)
    assert seconds({2: 10.0}, 4) == pytest.approx(5.0)  # one count alone scales as work that is shared
    assert seconds({2: 10.0}, 1) == pytest.approx(20.0)
    assert seconds({1: 38.2, 2: 19.0}, 64) == pytest.approx(38.0 / 64)  # never below 0
    assert seconds({1: 1.0, 2: 1.5}, 8) == 1.5  # what grows with devices is not said to grow on
    assert rg.planning.Costs({"node": given}).source_at("node", Setting(2)) == "given"
    assert rg.planning.Costs({"node": given}).source_at("node", Setting(3)) == "scaled"


def test_seconds_by_device_count_come_back_from_their_file(tmp_path: Path) -> None:
    costs = rg.planning.Costs({"reward": 0.5, "update": {1: 9.2, 2: 4.9}})
    costs.to_file(tmp_path / "costs.yaml")
    assert "update: {1: 9.2, 2: 4.9}" in (tmp_path / "costs.yaml").read_text()
    assert rg.planning.Costs.from_file(tmp_path / "costs.yaml") == costs


@pytest.mark.parametrize("wrong", [{}, {0: 1.0}, {1: -1.0}, {1.5: 1.0}, {True: 1.0}, {"1": 1.0}, {1: "9"}, {1: float("nan")}])
def test_what_is_no_time_by_device_count_is_refused(wrong: Mapping[int, float]) -> None:
    with pytest.raises(
        PlanError, match=r"the cost of 'node' is .*; a cost is a number of seconds of at least 0, .* e\.g\. \{1: 38.2, 2: 19.0\}"
    ):
        rg.planning.Costs({"node": wrong})


def test_a_bad_time_by_device_count_in_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text("nodes: {update: {0: 9.2}}")
    with pytest.raises(PlanError, match=r"costs.yaml': the cost of 'update'"):
        rg.planning.Costs.from_file(tmp_path / "costs.yaml")


def test_what_an_error_tells_to_write_is_exported() -> None:
    with pytest.raises(PlanError, match=r"rg.planning.Lengths\(at="):
        rg.planning.Costs({"node": rg.planning.NodeCost(token_s=1.0)})
    assert rg.planning.Costs(
        {"node": rg.planning.NodeCost(token_s=1.0)}, lengths=rg.planning.Lengths(at=(0, 0.5, 1), tokens=(10, 200, 4096))
    ).varies("node")
