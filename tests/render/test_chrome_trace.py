"""Traces load in a viewer: one track a worker, spans that nest, and an arrow for each use of a version."""

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlgraph.plan.plan import Plan
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Span
from rlgraph.render.timeline import per_rank, trace, write_trace


def events(found: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == phase]


def tracks(found: dict[str, Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events(found, "M") if e["name"] == "thread_name"}


def assert_nested(found: dict[str, Any]) -> None:
    by_track = defaultdict(list)
    for event in events(found, "X"):
        by_track[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_track.values():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda s: (round(s[0], 3), -round(s[1], 3))):
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)


def test_a_predicted_trace_is_json_with_a_track_for_each_worker_in_the_order_of_the_plan(plans: dict[str, Plan], tmp_path: Path) -> None:
    for name, plan in plans.items():
        write_trace(tmp_path / f"{name}.json", simulate(plan.schedule, 6), plan)
        found = json.loads((tmp_path / f"{name}.json").read_text())
        names = [tracks(found)[tid] for tid in sorted(tracks(found))]
        assert [n for n in names if not n.endswith(" beside")] == [worker.name for worker in plan.workers]
        assert_nested(found)


def test_each_span_is_named_for_its_event_and_step_and_keeps_its_times(plans: dict[str, Plan]) -> None:
    plan = plans["ppo"]
    spans = simulate(plan.schedule, 4)
    found = {event["name"]: event for event in events(trace(spans, plan), "X")}
    assert len(found) == len(spans)
    span = next(s for s in spans if s.name == "rollout" and s.step == 3)
    event = found["rollout@3"]
    assert event["args"] == {"step": 3, "version": None, "kind": "fire"}
    assert (event["ts"], event["dur"]) == (round(span.start_s * 1e6, 3), round((span.end_s - span.start_s) * 1e6, 3))


def test_a_wait_names_its_channel_and_has_its_own_category(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    (event,) = events(trace([Span("advantages", "wait", 3, plan.workers[0].name, 1.0, 2.5)], plan), "X")
    assert event["name"] == "wait advantages@3"
    assert (event["cat"], event["cname"], event["dur"]) == ("wait", "grey", 1.5e6)


def test_a_wait_for_room_in_a_channel_that_bears_no_node_s_name_is_repeated_for_the_ranks_of_its_worker(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    update = next(event for event in plan.schedule.events if event.node == "policy.update")
    ranks = per_rank([Span("order update to evaluate", "room", 0, update.worker, 0.0, 1.0)], plan)
    assert [span.worker for span in ranks] == list(plan.node("policy.update").workers)


def test_receiving_weights_beside_decoding_is_on_a_second_track_under_the_worker(plans: dict[str, Plan]) -> None:
    plan = plans["k_step_off"]
    found = trace(simulate(plan.schedule, 6), plan)
    names = tracks(found)
    received = {names[event["tid"]] for event in events(found, "X") if event["cat"] == "receive"}
    generator = plan.node("rollout").workers[0]
    assert received == {f"{generator} beside"}
    numbers = {name: tid for tid, name in names.items()}
    assert numbers[f"{generator} beside"] == numbers[generator] + 1


def arrows(found: dict[str, Any]) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    starts, ends = ({event["id"]: event for event in events(found, phase)} for phase in ("s", "f"))
    assert len(starts) == len(events(found, "s"))
    assert starts.keys() == ends.keys()
    return {number: (starts[number], ends[number]) for number in starts}


def span_at(found: dict[str, Any], arrow: dict[str, Any]) -> str:
    inside = [e for e in events(found, "X") if e["tid"] == arrow["tid"] and e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"]]
    return str(max(inside, key=lambda e: (e["ts"], e["dur"]))["name"])


def test_an_arrow_leads_from_each_publish_to_the_load_of_that_version(plans: dict[str, Plan]) -> None:
    for name, depth in (("sync_colocated", 0), ("one_step_off", 1), ("k_step_off", 2)):
        plan = plans[name]
        found = trace(simulate(plan.schedule, 6), plan)
        joined = {(start["name"], span_at(found, start), span_at(found, end)) for start, end in arrows(found).values()}
        expected = range(depth + 1, 6)
        assert joined == {(f"weights v{k - depth}", f"publish weights@{k - depth - 1}", f"load weights for rollout@{k}") for k in expected}


def test_arrows_never_lead_back_in_time(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        for start, end in arrows(trace(simulate(plan.schedule, 8), plan)).values():
            assert start["ts"] <= end["ts"]


def test_arrows_join_update_and_rollout_if_loading_and_publishing_have_no_spans(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    found = trace([span for span in simulate(plan.schedule, 5) if span.kind == "fire"], plan)
    joined = {(span_at(found, start), span_at(found, end)) for start, end in arrows(found).values()}
    assert joined == {(f"policy.update@{k - 2}", f"rollout@{k}") for k in range(2, 5)}


def test_a_measured_version_decides_where_its_arrow_begins(plans: dict[str, Plan]) -> None:
    plan = plans["one_step_off"]
    spans = [span for span in simulate(plan.schedule, 5) if span.kind == "fire"]
    spans = [replace(span, version=1) if span.name == "rollout" and span.step == 4 else span for span in spans]
    found = trace(spans, plan)
    assert ("policy.update@0", "rollout@4") in {(span_at(found, start), span_at(found, end)) for start, end in arrows(found).values()}


def test_the_latest_version_is_the_newest_one_published_before(plans: dict[str, Plan]) -> None:
    plan = plans["k_step_off"]
    (loop,) = plan.loops
    eager = replace(plan, loops=(replace(loop, latest=True),))
    spans = [
        Span("policy.update", "fire", 0, "trainer", 0.0, 1.0),
        Span("policy.update", "fire", 1, "trainer", 1.0, 2.0),
        Span("rollout", "fire", 2, "generator", 2.0, 3.0),
    ]
    ((start, _),) = arrows(trace(spans, eager)).values()
    assert start["name"] == "weights v2"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["fire", "receive", "wait"]), st.integers(0, 60), st.integers(0, 20)), max_size=30))
def test_spans_of_one_worker_that_overlap_are_spread_over_tracks_on_which_they_nest(
    plans: dict[str, Plan], drawn: list[tuple[Any, int, int]]
) -> None:
    plan = plans["one_step_off"]
    spans = [Span("x", kind, i, plan.workers[1].name, start / 7, (start + length) / 7) for i, (kind, start, length) in enumerate(drawn)]
    found = trace(spans, plan)
    assert len(events(found, "X")) == len(spans)
    assert_nested(found)
    assert all(
        name.startswith(plan.workers[1].name) for tid, name in tracks(found).items() if tid in {e["tid"] for e in events(found, "X")}
    )


def test_a_worker_the_plan_does_not_know_gets_a_track_too(plans: dict[str, Plan]) -> None:
    found = trace([Span("step", "fire", 0, "driver", 0.0, 1.0)], plans["single"])
    assert "driver" in tracks(found).values()
