"""The invariant monitor accepts every run within its certificate and names each bound that a run exceeds."""

from dataclasses import replace

import pytest
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph.analysis.run import InvariantMonitor
from rlgraph.errors import CertificateError
from rlgraph.plan.plan import ChannelEnd
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Schedule, Span


def played(plan: rg.Plan, schedule: Schedule | None = None) -> list[list[Span]]:
    spans = simulate(schedule or plan.schedule, 12)
    return [[span for span in spans if span.step == step] for step in range(12)]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_run_that_keeps_the_plan_passes_and_reaches_its_bound(depth: int) -> None:
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": 0.1, "reward": 0.0, "update": 1.0})
    plan = rg.compile(Loop(depth=depth).graph(), rg.Cluster(cpus=2), costs)
    monitor = InvariantMonitor(plan)
    for step, spans in enumerate(played(plan)):
        monitor.check(step, spans, min(step, depth), {ChannelEnd("rollout", "put"): depth + 1})
    assert (monitor.observed.staleness, monitor.observed.open_batches) == (depth, depth + 1)
    assert monitor.observed.channel_slots == {"rollout": depth + 1}


def test_a_wait_for_the_rollout_channel_does_not_count_as_a_rollout() -> None:
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": 1.0, "reward": 0.0, "update": 0.1})
    plan = rg.compile(Loop(depth=1).graph(), rg.Cluster(cpus=2), costs)
    monitor = InvariantMonitor(plan)
    for step, spans in enumerate(played(plan)):
        monitor.check(step, [*spans, Span("rollout", "wait", step, "reward", 0.0, spans[0].end_s)], 1, {})
    assert monitor.observed.open_batches == 2


def test_a_batch_admitted_too_early_is_an_error() -> None:
    costs = rg.planning.Costs({"prompts": 0.0, "rollout": 0.1, "reward": 0.0, "update": 1.0})
    plan = rg.compile(Loop(depth=1).graph(), rg.Cluster(cpus=2), costs)
    early = tuple(
        replace(d, credits=d.credits + 1) if d.reason in ("loop", "slots") and d.credits else d for d in plan.schedule.dependencies
    )

    def run() -> None:
        monitor = InvariantMonitor(plan)
        for step, spans in enumerate(played(plan, replace(plan.schedule, dependencies=early))):
            monitor.check(step, spans, 1, {})

    with pytest.raises(CertificateError, match=r"\(at most 2 open\): 3 batches were open when it was admitted"):
        run()


def test_clocks_that_differ_by_less_than_the_slack_break_no_bound() -> None:
    plan = rg.compile(
        Loop(depth=1).graph(), rg.Cluster(cpus=2), rg.planning.Costs({"prompts": 0.0, "rollout": 0.1, "reward": 0.0, "update": 1.0})
    )

    def run(slack_s: float) -> None:
        monitor = InvariantMonitor(plan)
        for step, spans in enumerate(played(plan)):
            apart = [replace(s, start_s=s.start_s + 0.05, end_s=s.end_s + 0.05) if s.worker == "policy" else s for s in spans]
            monitor.check(step, apart, 1, {}, slack_s)

    run(slack_s=0.06)
    with pytest.raises(CertificateError, match="3 batches were open"):
        run(slack_s=0.04)


def test_a_run_may_resume_at_any_step() -> None:
    plan = rg.compile(Loop(depth=1).graph(), rg.Cluster(cpus=2))
    monitor = InvariantMonitor(plan)
    for step, spans in enumerate(played(plan)[7:], start=7):
        monitor.check(step, spans, 1, {})
    assert monitor.observed.open_batches == 2


def test_a_stale_batch_and_an_overfull_channel_are_errors() -> None:
    plan = rg.compile(Loop(depth=1).graph(), rg.Cluster(cpus=2))
    with pytest.raises(CertificateError, match=r"staleness at most 1\): its oldest token is 2 versions behind"):
        InvariantMonitor(plan).check(5, [], 2, {})
    with pytest.raises(CertificateError, match=r"2 slots\): channel 'rollout' held 3 messages"):
        InvariantMonitor(plan).check(5, [], 1, {ChannelEnd("rollout", "take", 1): 3})


def test_a_wait_for_a_channel_named_like_its_writer_is_no_admission() -> None:
    plan = rg.compile(Loop(depth=0).graph(), rg.Cluster(cpus=2))
    monitor = InvariantMonitor(plan)
    for step, spans in enumerate(played(plan)):
        first = min(span.start_s for span in spans)
        waits = [Span("rollout", "wait", step, "reward", first - 100, first)]
        monitor.check(step, [*spans, *waits], 0, {})
    assert monitor.observed.open_batches == 1
