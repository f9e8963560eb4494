"""A rehearsed run: undisturbed it is what the plan predicts; failures, checkpoints, links and stragglers cost what formulas say."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from support.grpo import grpo_graph
from support.simulated_stages import LONG_TAIL, Loop

import rlgraph as rg
from benchmarks.prediction import daly
from rlgraph.channels.host.channel import PART_BYTES
from rlgraph.errors import PlanError
from rlgraph.plan import compile as compiling
from rlgraph.plan import rehearse, roofline
from rlgraph.plan.channels import crossing_s, ends_on_hosts, shape_of
from rlgraph.plan.cost_functions import Decode, NodeCost, SleepCost
from rlgraph.plan.rehearse import Rehearsal, with_failures

PLAIN = {"prompts": 0.0, "rollout": 4.0, "reward": 0.25, "update": 5.0}
CALM = rg.planning.ClusterSite()
LOOP = Loop()
ROUGH = rg.planning.ClusterSite(host_mtbf_s=20_000, restart_s=120, checkpoint_s=10)


def costs(**more: Any) -> rg.planning.Costs:
    return rg.planning.Costs({**PLAIN, **more.pop("nodes", {})}, lengths=LONG_TAIL, **more)


def run(site: rg.planning.ClusterSite = CALM, every: int | None = None, loop: Loop = LOOP, **more: Any) -> Rehearsal:
    hosts = more.pop("hosts", 1)
    priced = more.pop("costs", costs())
    return rg.planning.rehearse(loop.graph(), rg.Cluster(cpus=loop.devices, hosts=hosts), priced, site=site, every=every, **more)


@pytest.mark.parametrize(
    "loop", [Loop(depth=0), Loop(depth=1), Loop(depth=2, buffers=2), Loop(depth=0, chunks=4), Loop(shared=True, depth=0)]
)
def test_undisturbed_a_step_takes_the_predicted_period(loop: Loop) -> None:
    moving = costs(publish_s=0.5, receive_s=0.5, swap_s=0.25)
    predicted = rg.compile(loop.graph(), rg.Cluster(cpus=loop.devices), moving).prediction
    found = run(loop=loop, costs=moving, steps=200)
    assert found.step_s == pytest.approx(predicted.period_s, rel=1e-9)
    assert found.wall_s == found.calm_s == pytest.approx(predicted.first_step_s + 199 * predicted.period_s, rel=1e-9)
    assert found.failures == found.redone == 0


def test_a_rehearsal_plays_the_schedule_of_its_plan_and_makes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"with_sleep": roofline, "place_and_configure": compiling}  # costs, and schedules of which each places its workers
    made = dict.fromkeys(places, 0)

    def counted(name: str) -> None:
        original = getattr(places[name], name)

        def call(*given: Any) -> Any:
            made[name] += 1
            return original(*given)

        monkeypatch.setattr(places[name], name, call)

    for name in made:
        counted(name)
    rg.compile(LOOP.graph(), rg.Cluster(cpus=LOOP.devices), costs())
    alone, made["with_sleep"], made["place_and_configure"] = dict(made), 0, 0
    run()
    assert made == alone == {"with_sleep": 1, "place_and_configure": 1}


def test_with_lengths_drawn_the_mean_step_is_the_predicted_one() -> None:
    loop = Loop(depth=1, generators=4, lengths=LONG_TAIL)
    priced = costs(nodes={"rollout": NodeCost(decode=Decode(step_s=0.01)), "update": 1.0})
    predicted = rg.compile(loop.graph(), rg.Cluster(cpus=loop.devices), priced).prediction
    found = run(loop=loop, costs=priced, steps=2000)
    assert found.wall_s / 2000 == pytest.approx(predicted.step_s, rel=0.02)
    assert found.step_s < found.p95_s


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    assert run(ROUGH, 50, steps=3000, seed=3) == run(ROUGH, 50, steps=3000, seed=3)
    assert run(ROUGH, 50, steps=3000, seed=3).wall_s != run(ROUGH, 50, steps=3000, seed=4).wall_s


def mean_wall_s(site: rg.planning.ClusterSite, every: int, steps: int = 4000, seeds: int = 3) -> float:
    return statistics.fmean(run(site, every, steps=steps, seed=seed).wall_s for seed in range(seeds))


def test_failures_cost_what_daly_expects() -> None:
    step_s = run(steps=200).step_s
    steps, every, seeds = 20_000, 60, 3
    expected = daly.expected_s(steps * step_s, every * step_s, ROUGH.checkpoint_s, ROUGH.restart_s, 20_000)
    found = [run(ROUGH, every, steps=steps, seed=seed) for seed in range(seeds)]
    assert statistics.fmean(each.failures for each in found) == pytest.approx(expected / 20_000, rel=0.2)
    assert statistics.fmean(each.wall_s for each in found) == pytest.approx(expected, rel=0.01)


def test_the_best_interval_lies_inside_and_is_dalys() -> None:
    step_s = run(steps=200).step_s
    best = daly.best_interval_s(ROUGH.checkpoint_s, 20_000) / step_s
    walls = {every: mean_wall_s(ROUGH, every) for every in (5, 80, 120, 180, 1500)}
    least = min(walls, key=lambda every: walls[every])
    assert least in (80, 120, 180)
    assert best == pytest.approx(125, abs=1)
    assert walls[5] > 1.1 * walls[least]
    assert walls[1500] > 1.05 * walls[least]


def test_more_failures_never_help() -> None:
    walls = [mean_wall_s(replace(ROUGH, host_mtbf_s=mtbf_s), 60) for mtbf_s in (1e9, 2e4, 2e3)]
    assert walls == sorted(walls)
    calm = run(replace(ROUGH, host_mtbf_s=1e9), 60, steps=4000).calm_s
    assert all(run(ROUGH, 60, steps=4000, seed=seed).wall_s >= calm for seed in range(2))


def test_a_failure_takes_the_run_back_to_its_last_checkpoint() -> None:
    gaps = iter([25.5, 7.0, 3.0, 100.0])  # in the 26th second, then in the restart, and once more

    def ends(first: int, count: int) -> list[float]:
        return [1.0 + step for step in range(count)]

    walls = with_failures(ends, 50, 1.0, 10, 8.0, lambda: next(gaps))
    assert walls.failures == 3
    assert walls.redone == 5
    assert walls.seconds == 25.5 + 7.0 + 3.0 + 8.0 + 30.0


def test_a_run_without_headway_is_refused() -> None:
    with pytest.raises(PlanError, match=r"failures in a row came before a checkpoint, 500 steps of .* save more often"):
        run(replace(ROUGH, host_mtbf_s=200.0), 500)


def test_checkpoints_cost_their_seconds_where_training_sets_the_step() -> None:
    found = run(rg.planning.ClusterSite(checkpoint_s=10), 10, steps=400)
    assert found.calm_s * found.lost_to["checkpoints"] == pytest.approx(400.0)
    assert found.lost_to["failures"] == 0


def test_stragglers_slow_the_step_that_waits_for_them() -> None:
    loop = Loop(depth=1, generators=7, trainers=1)
    site = rg.planning.ClusterSite(stragglers=0.1, slow_down=3.0)
    found = run(site, loop=loop, hosts=8, steps=4000, costs=costs(nodes={"rollout": 5.0, "reward": 0.0}))
    none_slow = 0.9**8
    assert found.lost_to["stragglers"] == pytest.approx(1 - 5.0 / (5.0 * none_slow + 15.0 * (1 - none_slow)), rel=0.1)
    assert run(replace(site, stragglers=1.0), steps=200).step_s == pytest.approx(3 * 5.0)


def test_what_crosses_a_link_takes_the_time_of_its_bytes() -> None:
    site = rg.planning.ClusterSite(bandwidth=1e6, latency_s=0.5)
    moving = costs(publish_bytes=3_000_000)
    apart = run(site, hosts=2, loop=Loop(depth=0), costs=moving, steps=100)
    together = run(site, hosts=1, loop=Loop(depth=0), costs=moving, steps=100)
    assert any(channel.transport == "tcp" for channel in apart.plan.channels)
    assert apart.step_s > together.step_s + 3.5
    assert apart.lost_to["weights"] * apart.wall_s == pytest.approx(3.5 * 100, rel=0.01)
    with pytest.raises(PlanError, match="publish_bytes"):
        run(site, hosts=2)


def test_a_version_that_crosses_a_link_takes_the_place_of_its_receiving_and_not_of_a_wake() -> None:
    site, loop = rg.planning.ClusterSite(bandwidth=1e6, latency_s=0.5), Loop(depth=0, shared=True, generators=2, trainers=2)
    cluster, sleep = rg.Cluster(gpus=2, cpus=4, gpus_per_node=1), {"generator": SleepCost(wake_s=1.0, sleep_s=0.5)}
    found = []
    for receive_s in (0.0, 0.8):
        priced = costs(publish_bytes=3_000_000, receive_s=receive_s, sleep=sleep)
        found.append(rg.planning.rehearse(loop.graph(), cluster, priced, site=site, steps=50).step_s)
    assert found[0] == found[1] == pytest.approx(10.75 + 2.0 + 2 * 0.5, abs=0.1), "half a version, and two small batches, cross"


def test_a_version_takes_the_seconds_of_the_shape_that_its_plan_chose() -> None:
    site, loop, size = rg.planning.ClusterSite(bandwidth=1e6, latency_s=0.1), Loop(depth=0, generators=6), 2_000_000
    found = run(site, loop=loop, hosts=7, costs=costs(publish_bytes=size), steps=100)
    [weights] = found.plan.loops
    writers, readers = ends_on_hosts(found.plan, weights)
    assert (len(readers), shape_of(found.plan, weights)) == (6, "tree")
    seconds = {shape: crossing_s(size, site, writers, readers, shape=shape) for shape in ("tree", "chain")}
    assert seconds == {"tree": pytest.approx(0.2 + 2 * 4), "chain": pytest.approx(0.6 + 6 * 2)}
    assert found.lost_to["weights"] * found.wall_s == pytest.approx(100 * seconds["tree"], rel=0.01)


def test_a_version_comes_into_each_host_once() -> None:
    site, far = rg.planning.ClusterSite(bandwidth=50e9), dict.fromkeys(range(2, 10), 8)
    trainers = {0: 8, 1: 8}
    assert crossing_s(16e9, site, trainers, far) == pytest.approx(16 / 50), "however many generators a host has"
    assert crossing_s(16e9, site, trainers, far, least=None) == pytest.approx(16 / 50), "16 ranks keep eight links busy"
    assert crossing_s(16e9, site, {0: 1, 1: 1}, far, least=None) == pytest.approx(4 * 16 / 50), "two ranks keep two of eight busy"
    assert crossing_s(16e9, site, {0: 8, 1: 8}, {0: 8, 1: 8}) == pytest.approx(8 / 50), "half of it is there"
    assert crossing_s(16e9, site, trainers, {0: 8}) == pytest.approx(8 / 50)
    assert crossing_s(16e9, site, {0: 8}, {0: 8}) == 0.0
    assert crossing_s(16e9, site, trainers, dict.fromkeys(range(2, 10), 0.5)) == pytest.approx(8 / 50), "half a version on each host"


def test_a_message_is_passed_on_in_parts_if_it_has_several() -> None:
    site, two = rg.planning.ClusterSite(bandwidth=1e9), {1: 1, 2: 1}
    assert crossing_s(1e6, site, {0: 1}, two) == pytest.approx(2e-3), "a small one once it is there"
    assert crossing_s(2e8, site, {0: 1}, two) == pytest.approx(0.2 + PART_BYTES / 1e9)
    assert crossing_s(1e9, site, {0: 1}, {1: 1}) == pytest.approx(1)


def test_of_many_engines_some_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(depth=1, generators=64, rows=256, lengths=LONG_TAIL)
    priced = costs(nodes={"rollout": NodeCost(decode=Decode(step_s=0.01)), "update": 1.0})
    every = run(loop=loop, costs=priced, steps=300)
    monkeypatch.setattr(rehearse, "ALIKE", 32)
    some = run(loop=loop, costs=priced, steps=300)
    assert some.wall_s == pytest.approx(every.wall_s, rel=0.02)
    assert some.idle == pytest.approx(every.idle, abs=0.02)


WRONG = {
    "no checkpoints where something fails": (lambda: run(ROUGH), r"every=None\): .* begins again each time; pass every=10"),
    "checkpoints without effect": (lambda: run(every=10), r"every=10\): .* has no effect; leave it out"),
    "seconds of no checkpoint": (
        lambda: run(rg.planning.ClusterSite(checkpoint_s=5)),
        r"checkpoint_s=5\) has no effect without checkpoints",
    ),
    "a restart of nothing": (lambda: rg.planning.ClusterSite(restart_s=5), "pass gpu_mtbf_s or host_mtbf_s, or leave it out"),
    "stragglers that keep up": (lambda: rg.planning.ClusterSite(stragglers=0.1), "pass slow_down above 1"),
    "a slow-down of nobody": (lambda: rg.planning.ClusterSite(slow_down=2.0), "pass stragglers, a share above 0"),
    "a link without bandwidth": (lambda: rg.planning.ClusterSite(latency_s=0.1), "pass bandwidth, or leave it out"),
    "faster stragglers": (lambda: rg.planning.ClusterSite(stragglers=0.1, slow_down=0.5), "slow_down is a finite number of at least 1"),
    "no steps": (lambda: run(steps=0), r"rehearse\(steps=0\): steps is a whole number of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_an_error_with_the_fix(name: str) -> None:
    wrong, said = WRONG[name]
    with pytest.raises(PlanError, match=said):
        wrong()


def test_a_graph_in_which_batches_join_is_refused() -> None:
    generator, policy = rg.Generator("m", pool=rg.Pool("rollout")), rg.Policy("m", pool=rg.Pool("train"))
    graph = grpo_graph(generator, policy, depth=2, continuous=True)
    priced = rg.planning.Costs(
        {"prompts": 0.0, "rollout": NodeCost(decode=Decode(step_s=0.01)), "reward": 0.1, "advantages": 0.0, "update": 1.0},
        lengths=LONG_TAIL,
    )
    with pytest.raises(PlanError, match="batches or versions join while 'rollout' decodes"):
        rg.planning.rehearse(graph, rg.Cluster(gpus=2), priced)


def test_it_prints_what_each_cause_costs() -> None:
    found = str(run(ROUGH, 50, steps=3000))
    for words in ("3000 steps on 2 cores", "lost to failures", "checkpoints", "steps done again", "devices idle"):
        assert words in found
    assert not math.isnan(run().idle)
