"""Every device-second has a row, and the row says the truth: who worked, who waited, on which channel, because of whom."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import fakes

from rlgraph.analysis.attribution import Bubbles, Use, attribute, devices
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Span
from rlgraph.values.pool import Pool


def loop_plan(depth: int, shared: bool = False) -> Plan:
    """Compile prompts, rollout, score and update, a worker each, on four cores."""
    pool = Pool("shared")
    return compile_plan(fakes.vector_loop(depth, pools=(pool, pool) if shared else None), Cluster(cpus=4))


def seconds(bubbles: Bubbles, pool: str | None) -> dict[tuple[Use, str, str], float]:
    return {(row.use, row.name, row.cause): round(row.seconds, 9) for row in bubbles.of_pool(pool)}


def test_a_wait_is_traced_through_waiting_workers_to_the_late_node() -> None:
    spans = [
        Span("load weights for rollout", "load", 0, "generator", 0.0, 1.0),
        Span("rollout", "fire", 0, "generator", 1.0, 6.0),
        Span("rollout", "wait", 0, "score", 0.0, 6.0),
        Span("score", "fire", 0, "score", 6.0, 7.5),
        Span("score", "wait", 0, "policy", 0.0, 8.0),
        Span("update", "fire", 0, "policy", 8.0, 10.0),
    ]
    assert seconds(attribute(spans, loop_plan(1)), "train") == {  # a pool of two cores
        ("data", "score", "load weights for rollout"): 2.0,
        ("data", "score", "rollout"): 10.0,
        ("data", "score", "score"): 3.0,
        ("data", "score", "message in transit"): 1.0,  # the score was done at 7.5, and taken at 8
        ("node", "update", ""): 4.0,
    }


def test_a_wait_for_a_version_names_the_update_that_makes_it() -> None:
    spans = [
        Span("update", "fire", 0, "policy", 0.0, 3.0),
        Span("publish weights", "publish", 0, "policy", 3.0, 3.5, 1),
        Span("weights", "wait", 1, "generator", 0.0, 3.5, 1),
        Span("load weights for rollout", "load", 1, "generator", 3.5, 4.0, 1),
    ]
    found = attribute(spans, loop_plan(0))
    causes = {row.cause: row.seconds for row in found.of_worker("generator") if row.use == "weights"}
    assert causes == {"update": 3.0, "publish weights": 0.5}


def test_a_wait_for_a_free_slot_names_the_reader_that_is_late() -> None:
    plan = loop_plan(1)
    late = 5 - next(c.slots for c in plan.channels if c.name == "rollout")
    spans = [
        Span("rollout", "room", 5, "generator", 0.0, 4.0),
        Span("score", "fire", late, "score", 0.0, 1.0),
        Span("update", "fire", late, "policy", 0.0, 4.0),
    ]
    waits = [(row.use, row.name, row.cause) for row in attribute(spans, plan).of_worker("generator")]
    assert waits == [("room", "rollout", "update")]


def test_a_shared_device_is_busy_while_one_of_its_workers_works_and_the_other_waits() -> None:
    plan = loop_plan(0, shared=True)
    spans = [
        Span("rollout", "fire", 0, "generator", 0.0, 4.0),
        Span("score", "wait", 0, "policy", 0.0, 5.0),
        Span("update", "fire", 0, "policy", 5.0, 7.0),
        Span("weights", "wait", 1, "generator", 4.0, 7.0, 1),
    ]
    found = attribute(spans, plan)
    assert found.busy("shared") == pytest.approx(6 / 7)
    assert sum(row.seconds for row in found.of_pool("shared")) == pytest.approx(7 * plan.cluster.cpus)
    rows = found.of_worker("generator")
    assert found.share((row for row in rows if row.use == "weights"), rows) == pytest.approx(3 / 7)


def test_a_wait_for_data_outranks_a_wait_for_order_on_a_shared_device(plans: dict[str, Plan]) -> None:
    plan = plans["ppo_cores"]
    turn = next(c for c in plan.channels if c.kind == "order")
    after, before = plan.node(turn.readers[0]), plan.node(turn.writer)
    spans = [Span(turn.name, "wait", 3, after.workers[0], 0.0, 4.0), Span("rollout", "wait", 3, before.workers[0], 0.0, 4.0)]
    uses = {row.use for row in attribute(spans, plan).of_pool(before.pool)}
    assert uses == {"data"}


LOADED_MEANWHILE = [
    Span("rollout", "fire", 3, "generator", 0.0, 10.0),
    Span("weights", "wait", 3, "generator", 2.0, 3.0, 3),
    Span("load weights for rollout", "load", 3, "generator", 3.0, 5.0, 3),
]
RESTARTED = [
    Span("rollout", "fire", 4, "generator", 0.0, 3.0),
    Span("start-up", "start", 5, "generator", 5.0, 6.0),
    Span("rollout", "fire", 5, "generator", 6.0, 7.0),
]


@pytest.mark.parametrize(
    ("spans", "rows"),
    [
        (LOADED_MEANWHILE, {("node", "rollout"): 7.0, ("weights", "weights"): 1.0, ("moving", "load weights for rollout"): 2.0}),
        (RESTARTED, {("node", "rollout"): 4.0, ("start", "start-up"): 3.0}),
    ],
    ids=["weights loaded while a node decodes", "a worker that restarts"],
)
def test_what_interrupts_a_node_has_a_row_of_its_own(spans: list[Span], rows: dict[tuple[Use, str], float]) -> None:
    assert {(row.use, row.name): row.seconds for row in attribute(spans, loop_plan(1)).of_worker("generator")} == rows


def test_the_chunks_of_a_batch_are_one_row(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    event = next(e for e in plan.schedule.events if e.name == "rollout")
    parts = tuple(replace(event, name=f"rollout {i}/2") for i in (1, 2))
    parted = replace(plan, schedule=replace(plan.schedule, events=(*plan.schedule.events, *parts)))
    worker = plan.node("rollout").workers[0]
    spans = [Span("rollout 1/2", "fire", 0, worker, 0.0, 1.0), Span("rollout 2/2", "fire", 0, worker, 1.0, 3.0)]
    assert [(row.name, row.seconds) for row in attribute(spans, parted).of_worker(worker)] == [("rollout", 3.0)]


def test_time_without_a_span_is_the_residual() -> None:
    plan = loop_plan(1)
    lanes = [worker.name for worker in plan.workers]
    spans = [Span("rollout", "fire", 0, name, 0.0, 4.0) for name in lanes] + [Span("rollout", "fire", 1, name, 5.0, 10.0) for name in lanes]
    assert attribute(spans, plan).residual == pytest.approx(0.1)
    whole = [replace(span, end_s=5.0) if span.step == 0 else span for span in spans]
    assert attribute(whole, plan).residual == 0


def test_a_worker_starts_up_before_its_first_span_and_is_finished_after_its_last() -> None:
    found = attribute([Span("rollout", "fire", 0, "generator", 2.0, 3.0)], loop_plan(1), 0.0, 5.0)
    assert {(row.use, row.name): row.seconds for row in found.of_worker("generator")} == {
        ("start", "start-up"): 2.0,
        ("node", "rollout"): 1.0,
        ("idle", "after the last step"): 2.0,
    }
    assert found.residual == 0


KINDS = ["fire", "publish", "load", "wake", "sleep", "carry", "wait", "room", "idle", "start"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_rows_add_up_to_every_device_second_whatever_the_spans(plans: dict[str, Plan], data: st.DataObject) -> None:
    plan = plans[data.draw(st.sampled_from(["one_step_off", "sync_colocated", "ppo", "ppo_cores", "k_step_off"]))]
    names = [*(c.name for c in plan.channels), *(loop.name for loop in plan.loops), "rollout", "unknown"]
    drawn = st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(names),
        st.integers(0, 5),
        st.sampled_from([w.name for w in plan.workers]),
        st.integers(0, 60),
        st.integers(0, 30),
    )
    found: list[tuple[Any, str, int, str, int, int]] = data.draw(st.lists(drawn, min_size=1, max_size=25))
    spans = [Span(name, kind, step, worker, start / 7, (start + length) / 7) for kind, name, step, worker, start, length in found]
    bubbles = attribute(spans, plan, 1.0, 9.0)
    for pool in {device.pool for device in devices(plan)}:
        counted = sum(device.count for device in devices(plan) if device.pool == pool)
        assert sum(row.seconds for row in bubbles.of_pool(pool)) == pytest.approx(8.0 * counted)
    for worker in plan.workers:
        assert sum(row.seconds for row in bubbles.of_worker(worker.name)) == pytest.approx(8.0 * max(len(worker.gpus), 1))


def test_every_device_of_the_plan_is_counted_once(plans: dict[str, Plan]) -> None:
    for name in ("one_step_off", "sync_colocated", "ppo", "k_step_off", "ppo_cores"):
        plan = plans[name]
        for pool in plan.pools:
            assert sum(d.count for d in devices(plan) if d.pool == pool.name) == (len(pool.gpus) or pool.cpus)


def test_the_table_shows_each_pool_with_seconds_shares_and_reasons() -> None:
    spans = [
        Span("rollout", "fire", 0, "generator", 0.0, 6.0),
        Span("rollout", "wait", 0, "policy", 0.0, 6.0),
        Span("update", "fire", 0, "policy", 6.0, 8.0),
    ]
    shown = str(attribute(spans, loop_plan(1)))
    assert "75.0%  wait for data of 'rollout'; cause: rollout" in shown
    assert "25.0%  update" in shown
    assert "25.0%  after the last step" in shown
    assert "0.00% not explained" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())
