"""Models that time-share a pool: the costs of waking and sleeping are measured, scaled, estimated and predicted."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.calibrate import measured_costs
from rlgraph.plan.cost_functions import Setting, SleepCost
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Event, Span

STEPS = 12
SECONDS = {"prompts": 0.0, "rollout": 3.0, "reward": 0.25, "update": 2.0}
SLEEP = {"generator": SleepCost(sleep_s=0.5, wake_s=0.125), "policy": SleepCost(sleep_s=0.0625, wake_s=1.0)}
COSTS = rg.planning.Costs(SECONDS, publish_s=0.25, receive_s=0.125, swap_s=0.125, sleep=SLEEP)
WHOLE_S = 3.0 + 0.25 + 2.0 + 0.25 + 0.125 + 0.125 + 0.5 + 0.125 + 0.0625 + 1.0  # all events of a time-shared step, one after another
IN_TURNS = Loop(depth=0, shared=True)
H200, GB = rg.Cluster(gpus=1, gpu="H200"), 10**9


def compiled(loop: Loop, costs: rg.planning.Costs = COSTS, gpus: int = 1, gpu: str | None = None) -> rg.Plan:
    return rg.compile(loop.graph(), rg.Cluster(gpus=gpus, gpu=gpu), costs)


def test_an_engine_wakes_before_it_loads_weights_and_sleeps_before_the_next_of_the_pool() -> None:
    events = [event.name for event in compiled(IN_TURNS).schedule.events if event.pool is not None]
    assert events == [
        "wake for rollout",
        "load weights for rollout",
        "rollout",
        "sleep after rollout",
        "wake for update",
        "update",
        "sleep after update",
        "publish weights",
    ]


def test_cycle_play_and_certificate_count_the_wakes_and_sleeps_of_a_time_shared_step() -> None:
    plan = compiled(IN_TURNS)
    told = plan.prediction
    assert [told.period_s, told.simulated_s, told.step_s, plan.certificate.period_s] == [pytest.approx(WHOLE_S)] * 4
    assert {"wake for rollout", "sleep after rollout", "wake for update", "sleep after update"} <= set(told.critical)
    assert plan.loops[0].publish_s == pytest.approx(0.5), "waking is no part of moving weights"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cluster", [rg.Cluster(gpus=2), rg.Cluster(gpus=2, gpu="H200"), rg.Cluster(cpus=2)])
def test_a_plan_with_a_pool_for_each_model_ignores_sleep_costs(depth: int, cluster: rg.Cluster) -> None:
    plans = [rg.compile(Loop(depth=depth).graph(), cluster, replace(COSTS, sleep=sleep)) for sleep in (SLEEP, {})]
    assert plans[0].to_json() == plans[1].to_json()
    assert not plans[0].sleeps


def test_models_that_share_cores_keep_their_memory() -> None:
    plan = rg.compile(IN_TURNS.graph(), rg.Cluster(cpus=1), COSTS)
    assert plan.prediction.step_s == pytest.approx(WHOLE_S - 0.5 - 0.125 - 0.0625 - 1.0)


def test_unmeasured_sleep_costs_are_estimated_from_bytes_and_the_link_to_the_host_and_marked() -> None:
    plan = compiled(IN_TURNS, replace(COSTS, sleep={}, publish_bytes=4 * GB), gpu="H200")  # a billion parameters, in float32
    assert [(s.model, s.bytes, s.cost) for s in plan.sleeps] == [("generator", 4 * GB, "estimated"), ("policy", 8 * GB, "estimated")]
    assert [s.wake_s for s in plan.sleeps] == [pytest.approx(4 / 26.775), pytest.approx(8 / 26.775)]  # PCIe 5, 63 GB/s, of which 0.425
    moved_s = 2 * (4 + 8) / 26.775
    assert plan.prediction.step_s == pytest.approx(WHOLE_S - 1.6875 + moved_s)
    assert "(estimated: sleep and wake of generator, sleep and wake of policy)" in " ".join(str(plan).split())
    assert "~0.15 s" in str(plan)
    older = compiled(IN_TURNS, replace(COSTS, sleep={}, publish_bytes=4 * GB), gpu="A100")
    assert older.sleeps[0].wake_s == pytest.approx(2 * plan.sleeps[0].wake_s)


def test_the_plan_marks_scaled_and_estimated_sleep_costs() -> None:
    sleep = {"generator": SleepCost(0.5, 0.25, measured=Setting(1, 1)), "policy": SleepCost(0.5, 0.25, measured=Setting(2, 2))}
    costs = replace(COSTS, sleep=sleep, source="measured")
    plan = compiled(IN_TURNS, costs, gpu="H200")
    assert [s.cost for s in plan.sleeps] == ["measured", "scaled"]
    assert "scaled to this plan: sleep and wake of policy" in " ".join(str(plan).split())
    assert [s.cost for s in compiled(IN_TURNS, replace(costs, sleep={"policy": sleep["policy"]})).sleeps] == ["estimated", "scaled"]


@pytest.mark.parametrize(
    ("setting", "generator_s", "policy_s"),
    [(Setting(4, 4), 1.0, 0.5), (Setting(2, 8), 4.0, 1.0), (Setting(4, 1), 0.25, 0.5)],
    ids=["twice the devices", "four engines a device", "an engine over four devices"],
)
def test_sleep_costs_are_scaled_by_the_bytes_that_a_device_holds(setting: Setting, generator_s: float, policy_s: float) -> None:
    cost = SleepCost(sleep_s=1.0, wake_s=2.0, bytes=GB, measured=Setting(2, 2))
    whole, part = cost.at(setting, sharded=False), cost.at(setting, sharded=True)
    assert (whole.sleep_s, whole.wake_s, whole.bytes) == (generator_s, 2 * generator_s, generator_s * GB)
    assert (part.sleep_s, part.wake_s, part.bytes) == (policy_s, 2 * policy_s, policy_s * GB)


def run_of(loop: Loop, gpus: int, seconds: Mapping[str, float], late_s: float = 0.0) -> tuple[rg.Plan, list[Span]]:
    """Return the spans of a run whose events take `seconds`, each of them begun late; its sleeping engines tell a gigabyte."""
    plan = compiled(loop, gpus=gpus)

    def taken(event: Event, step: int) -> float:
        return late_s + seconds[event.name] * (5 if step == 0 else 1)  # the first step warms up

    spans = [replace(span, start_s=span.start_s + late_s) for span in simulate(plan.schedule, STEPS, taken)]
    ranks = [replace(span, worker=rank) for span in spans for rank in plan.node(nodes(plan)[span.name]).workers]
    return plan, [replace(span, bytes=GB) if span.kind == "sleep" else span for span in ranks]


def nodes(plan: rg.Plan) -> Mapping[str, str]:
    return {event.name: event.node for event in plan.schedule.events}


TAKEN = {
    **SECONDS,
    "prompts": 0.0625,
    "wake for rollout": 0.125,
    "load weights for rollout": 0.25,
    "sleep after rollout": 0.5,
    "wake for update": 1.0,
    "sleep after update": 0.0625,
    "publish weights": 0.25,
}


def test_engines_that_share_a_gpu_move_their_bytes_over_one_link() -> None:
    plan, spans = run_of(replace(IN_TURNS, generators=2, trainers=2), 2, TAKEN)
    together = replace(plan, pools=(replace(plan.pools[0], gpus=(0,)),))
    assert measured_costs(plan, spans, []).sleep["generator"].bytes == GB
    assert measured_costs(together, spans, []).sleep["generator"].bytes == 2 * GB


def test_costs_of_a_run_with_a_pool_for_each_model_have_no_sleep_costs() -> None:
    plan, spans = run_of(Loop(depth=1), 2, TAKEN)
    assert measured_costs(plan, spans, []).sleep == {}


def test_sleep_costs_come_back_from_a_costs_file_and_are_estimated_where_it_has_none(tmp_path: Path) -> None:
    plan, spans = run_of(IN_TURNS, 1, TAKEN)
    costs = measured_costs(plan, spans, [])
    costs.to_file(tmp_path / "costs.yaml")
    assert rg.planning.Costs.from_file(tmp_path / "costs.yaml") == costs
    (tmp_path / "old.yaml").write_text("nodes: {prompts: 0.0, rollout: 3.0, reward: 0.25, update: 2.0}\npublish_bytes: 4000000000\n")
    old = rg.planning.Costs.from_file(tmp_path / "old.yaml")
    assert old.sleep == {}
    assert {s.cost for s in compiled(IN_TURNS, old, gpu="H200").sleeps} == {"estimated"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: {a: 1}\nsleep: {policy: {sleep: 1}}", r"sleep.policy has no 'sleep'; did you mean 'sleep_s'"),
        ("nodes: {a: 1}\nsleep: {policy: {wake_s: -1.0}}", "wake_s is a finite number of at least 0"),
    ],
)
def test_bad_sleep_costs_in_a_file_are_refused_with_the_place(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "costs.yaml").write_text(text)
    with pytest.raises(PlanError, match=message):
        rg.planning.Costs.from_file(tmp_path / "costs.yaml")


def test_sleep_costs_of_a_model_that_the_graph_lacks_are_refused() -> None:
    with pytest.raises(PlanError, match=r"name a model 'critic' in `sleep`.*its models are \['generator', 'policy'\]"):
        compiled(IN_TURNS, replace(COSTS, sleep={**SLEEP, "critic": SleepCost()}))


def test_tune_counts_sleep_costs() -> None:
    def build(depth: int) -> rg.Graph:
        return Loop(depth=depth, shared=depth == 0, generators=1 + (depth == 0), trainers=1 + (depth == 0)).graph()

    free, costly = ({name: SleepCost(cost, cost) for name in SLEEP} for cost in (0.0, 2.0))
    seconds = {**SECONDS, "rollout": {1: 3.0, 2: 3.0}, "update": {1: 3.0, 2: 3.0}}
    best = {
        name: rg.tune(build, rg.Cluster(gpus=2), rg.planning.Costs(seconds, sleep=sleep), depth=(0, 1))
        for name, sleep in (("free", free), ("costly", costly))
    }
    time_shared = {name: next(t for t in found if t.settings["depth"] == 0).step_s for name, found in best.items()}
    assert time_shared["costly"] - time_shared["free"] == pytest.approx(4 * 2.0)


def test_consecutive_firings_of_one_model_are_one_time_slice() -> None:
    plan = compiled(replace(IN_TURNS, reference="train", chunks=4), rg.planning.Costs({**SECONDS, "ref_log_probs": 0.5}))
    names = [event.name for event in plan.schedule.events if event.kind in ("wake", "sleep")]
    assert names == [
        "wake for rollout 1/4",
        "sleep after rollout 4/4",
        "wake for ref_log_probs",
        "sleep after ref_log_probs",
        "wake for update",
        "sleep after update",
    ]


def test_an_engine_wakes_after_all_inputs_of_its_firing_have_arrived() -> None:
    """While a slow reward works the pool is idle; the trainer wakes when it may fire."""
    slow = compiled(IN_TURNS, replace(COSTS, nodes={**SECONDS, "reward": 4.0}))
    assert slow.prediction.step_s == pytest.approx(WHOLE_S - 0.25 + 4.0)
    assert [(w.who, w.on) for w in slow.prediction.waits if w.who == "shared"] == [("shared", "reward")]
