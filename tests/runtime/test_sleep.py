"""Models that time-share a pool: waking and sleeping have names and are predicted, and one engine is awake at a time."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import forked_workers, simulated_stages  # noqa: F401 (the dispatch of that name)
from support.simulated_stages import Loop, Turns

import rlgraph as rg
from rlgraph.analysis.attribution import attribute
from rlgraph.plan.calibrate import Trace, costs_of
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.cost_functions import SleepCost
from rlgraph.plan.costs import Costs
from rlgraph.plan.schedule import WORK, Sampled, Span
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.measure import Step
from rlgraph.runtime.worker import activity
from rlgraph.runtime.worker.progress import Reported

STEPS = 8
TURNS = {"generator": Turns(wake_s=0.125, sleep_s=0.25, bytes=1 << 30), "policy": Turns(wake_s=0.5, sleep_s=1.0, bytes=2 << 30)}
IN_TURNS = Loop(depth=0, shared=True, turns=TURNS)


class Clock:
    """Time that passes only where something waits."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(simulated_stages, "time", clock)
    monkeypatch.setattr(activity, "time", clock)
    return clock


def run(loop: Loop) -> tuple[rg.Plan, list[Step], list[Span], Costs]:
    """Run a loop whose devices are taken for GPUs, node after node; return its plan, its steps, its spans and what it has cost."""
    plan = rg.compile(loop.graph(), rg.Cluster(gpus=loop.devices))
    sampled: list[Sampled] = []
    spans: list[Span] = []

    def heard(report: Callable[[int], Reported], step: int) -> Reported:
        spans.extend((told := report(step))[1])
        return told

    with plan.run_here() as job:
        workers = job.progress.values()
        for progress in workers:
            progress.step = partial(heard, progress.step)  # type: ignore[method-assign]
        steps = list(job.steps(STEPS))
        sampled = [found for progress in workers for found in progress.worker.take_token_counts()]
    return plan, steps, spans, costs_of([Trace(plan, spans, sampled)])


def step_s(spans: list[Span]) -> float:
    ends = [max(span.end_s for span in spans if span.step == step) for step in range(STEPS)]
    return (ends[-1] - ends[0]) / (STEPS - 1)


def test_a_time_shared_step_takes_what_its_own_costs_predict(clock: Clock) -> None:
    _, _, spans, costs = run(IN_TURNS)
    assert costs.sleep["generator"].wake_s == pytest.approx(0.125)
    assert (costs.sleep["policy"].sleep_s, costs.sleep["policy"].bytes) == (pytest.approx(1.0), 2 << 30)
    told = rg.compile(IN_TURNS.graph(), rg.Cluster(gpus=1), costs)
    assert told.prediction.step_s == pytest.approx(step_s(spans), rel=0.02)
    assert {sleep.cost for sleep in told.sleeps} == {"measured"}


def test_a_time_shared_step_takes_what_costs_of_two_pools_and_of_time_sharing_predict(clock: Clock) -> None:
    _, _, _, apart = run(Loop(depth=0))
    _, _, spans, _ = run(IN_TURNS)
    assert apart.sleep == {}
    turns = {name: SleepCost(turn.sleep_s, turn.wake_s) for name, turn in TURNS.items()}
    told, without = (
        rg.compile(IN_TURNS.graph(), rg.Cluster(gpus=1), replace(apart, sleep=sleep)).prediction.step_s for sleep in (turns, {})
    )
    assert told == pytest.approx(step_s(spans), rel=0.02)
    assert told - without == pytest.approx(0.125 + 0.25 + 0.5 + 1.0)


def test_waking_and_sleeping_are_spans_of_their_own_and_no_time_of_a_node(clock: Clock) -> None:
    plan, steps, spans, _ = run(IN_TURNS)
    second = sorted((span for span in spans if span.step == 1 and span.worker in TURNS), key=lambda span: span.start_s)
    assert [span.name for span in second if span.kind in WORK] == [
        "wake for rollout",
        "rollout",
        "sleep after rollout",
        "wake for update",
        "update",
        "sleep after update",
    ]
    assert steps[1].metrics["timing_s/wake"] == pytest.approx(0.125 + 0.5)
    assert steps[1].metrics["timing_s/sleep"] == pytest.approx(0.25 + 1.0)
    free = run(replace(IN_TURNS, turns={}))[1]
    for name in ("timing_s/gen", "timing_s/update_actor"):
        assert steps[1].metrics[name] == pytest.approx(free[1].metrics[name])
    bubbles = attribute(spans, plan)
    assert bubbles.residual == 0
    rows = {row.name: row.seconds for row in bubbles.of_pool("shared") if row.use == "sleep"}
    assert rows["sleep after update"] == pytest.approx(STEPS * 1.0)
    assert rows["wake for rollout"] == pytest.approx(STEPS * 0.125)


def job_of(loop: Loop) -> Job:
    graph = loop.graph()
    return Job(graph, compile_plan(graph, rg.Cluster(gpus=loop.devices)), dispatch_name="forked", deadline_s=60)


@pytest.mark.stage("jobs")
@pytest.mark.parametrize(
    "loop",
    [Loop(depth=depth, shared=True, reference="train") for depth in (0, 3)] + [Loop(depth=2, buffers=2, reference="rollout")],
    ids=["on policy", "two rounds later", "reference beside the generator"],
)
def test_one_engine_of_a_pool_is_awake_at_a_time(loop: Loop, tmp_path: Path) -> None:
    """The pool's memory is a file, which an engine that wakes makes, and which must not be there: it raises where another is awake."""
    sharing = ["generator", "reference", "policy"] if loop.shared else ["generator", "reference"]
    turns = {role: Turns(sleep_s=0.01, memory=str(tmp_path / "memory")) for role in sharing}
    with job_of(replace(loop, turns=turns)) as job:
        steps = list(job.steps(STEPS))
        assert job.bubbles().residual <= 0.01
    assert all(step.metrics["timing_s/sleep"] > 0.01 for step in steps)
    assert not (tmp_path / "memory").exists()
