"""Replay: a recorded run played under another depth or split gives what a run under it would have given."""

from pathlib import Path

import numpy as np
import pytest
from support.simulated_stages import LONG_TAIL, PROMPT_TOKENS, Loop

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.calibrate import Trace
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Event, Sampled
from rlgraph.tuning import Replayed, replay_trace

STEPS = 60
LENGTHS = LONG_TAIL.batches(STEPS, 16).astype(int)


def seconds(loop: Loop, event: str, step: int) -> float:
    lengths = LENGTHS[step]
    if event == "rollout":
        parts = np.array_split(lengths, loop.generators)
        return float(max(1e-3 * part.max() + 1e-3 * part.sum() for part in parts))
    return 2e-3 * float(lengths.sum() + 16 * PROMPT_TOKENS) / loop.trainers if event == "update" else 0.0


def recorded(loop: Loop) -> Trace:
    plan = rg.compile(loop.graph(), rg.Cluster(cpus=loop.devices))

    def taken(event: Event, step: int) -> float:
        return seconds(loop, event.name, step)

    spans = simulate(plan.schedule, STEPS, taken)
    sampled = [Sampled("rollout", s, "generator", PROMPT_TOKENS * 16, tuple(LENGTHS[s].tolist())) for s in range(STEPS)]
    return Trace(plan, tuple(spans), tuple(sampled))


@pytest.fixture(scope="module")
def trace() -> Trace:
    return recorded(Loop(depth=1))


def test_played_as_recorded_it_takes_as_long_as_it_did(trace: Trace) -> None:
    found = replay_trace(trace, None, None)
    assert found.again_s == pytest.approx(found.recorded_s, rel=0.03)
    assert found.ratio == 1


@pytest.mark.parametrize("depth", [0, 2, 3])
def test_another_depth_gives_what_a_run_of_that_depth_records(trace: Trace, depth: int) -> None:
    assert replay_trace(trace, None, depth).step_s == pytest.approx(
        replay_trace(recorded(Loop(depth=depth)), None, None).recorded_s, rel=0.04
    )


def test_another_split_scales_each_firing_by_the_cost_functions_of_the_run() -> None:
    found = replay_trace(recorded(Loop(depth=1, trainers=3)), {"rollout": 1, "train": 1}, None)
    assert found.changed == "rollout 2, train 2"
    slower = replay_trace(recorded(Loop(depth=1, trainers=3)), {"rollout": 3, "train": 1}, None)
    assert slower.step_s == pytest.approx(np.mean([seconds(Loop(), "update", step) for step in range(1, STEPS)]), rel=0.05)


def test_a_trace_comes_back_from_its_folder(trace: Trace, tmp_path: Path) -> None:
    trace.to_file(tmp_path / "trace.json")
    again = rg.planning.replay(tmp_path, depth=2)
    assert isinstance(again, Replayed)
    assert again == replay_trace(trace, None, 2)
    assert str(again).startswith("depth 2: ")


WRONG = {
    "a pool that is not there": ({"shares": {"score": 1}}, "the plan has no pool 'score'; its pools are"),
    "a share of nothing": ({"shares": {"rollout": 0}}, "'rollout' is 0"),
    "a depth below 0": ({"depth": -1}, "whole number of at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_change_that_the_plan_does_not_allow_is_refused(name: str, trace: Trace, tmp_path: Path) -> None:
    changes, message = WRONG[name]
    trace.to_file(tmp_path / "trace.json")
    with pytest.raises(PlanError, match=message):
        rg.planning.replay(tmp_path, **changes)  # type: ignore[arg-type]


def test_a_colocated_run_cannot_be_replayed_at_a_depth() -> None:
    with pytest.raises(PlanError, match=r"shares pool 'shared' .*the order of nodes there changes with the depth"):
        replay_trace(recorded(Loop(depth=0, shared=True)), None, 1)


def test_a_missing_trace_and_a_short_one_are_refused(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"there is no such trace; rg.record writes trace.json"):
        rg.planning.replay(tmp_path)
    (tmp_path / "trace.json").write_text("{}")
    with pytest.raises(PlanError, match=r"pass the trace.json that rg.record writes"):
        rg.planning.replay(tmp_path)
    short = Trace(trace.plan, tuple(s for s in trace.spans if s.step < 2), trace.sampled)
    with pytest.raises(PlanError, match="has 2 steps; at least 4 are needed"):
        replay_trace(short, None, 1)
