"""Looks at a run under way: whether another split is predicted to pay, and whether the last change did."""

from dataclasses import replace
from functools import cache

import pytest
from support.recorded_runs import STEPS, record_run
from support.simulated_stages import LONG_TAIL, Loop

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.calibrate import Trace
from rlgraph.plan.plan import Replan
from rlgraph.plan.replan import Change, Replanner

LOOP = Loop()  # an engine and a rank, on two of four cores each
OTHERS = tuple(replace(LOOP, generators=generators, trainers=4 - generators).graph() for generators in (1, 3))
MEAN_TOKENS = LOOP.rows * LONG_TAIL.mean


@cache
def recorded(generate_s: float, train_s: float, share: int | None = None) -> Trace:
    """A run whose rollouts and updates take so long on average, each in proportion to its tokens."""
    mean = {"rollout": generate_s / MEAN_TOKENS, "update": train_s / MEAN_TOKENS}
    return Trace(*record_run(replace(LOOP, rollout_share=share), lambda event, lengths: sum(lengths) * mean.get(event, 0.0), cores=4))


def look(replanner: Replanner, trace: Trace, taken_s: float, left: int = 100) -> Change | None:
    assert [replanner.note(taken_s) for _ in range(STEPS)][-1]
    return replanner.look(trace, trace.plan, trace.plan.cluster, steps_left=left, change_s=5.0)


def looks(*graphs: rg.Graph, gain: float = 0.1) -> Replanner:
    return Replanner(Replan(every=STEPS, gain=gain, graphs=graphs), lambda graph: {})


@pytest.mark.parametrize(
    ("generate_s", "train_s", "said"),
    [(2.0, 0.5, "rollout 2, train 2 -> rollout 3, train 1"), (0.5, 2.0, "rollout 2, train 2 -> rollout 1, train 3")],
)
def test_the_longer_side_gets_devices_where_that_pays(generate_s: float, train_s: float, said: str) -> None:
    trace = recorded(generate_s, train_s)
    change = look(looks(*OTHERS), trace, 2.0)
    assert change is not None
    assert said in str(change)
    assert change.after.prediction.step_s < 0.7 * change.before.prediction.step_s == pytest.approx(1.4, rel=0.2)
    assert look(looks(*OTHERS), trace, 2.0, left=6) is None  # the change takes longer than it saves
    assert look(looks(*OTHERS, gain=0.8), trace, 2.0) is None


def test_sides_that_take_equally_long_stay() -> None:
    assert look(looks(*OTHERS), recorded(1.0, 1.0), 1.0) is None


def changed(replanner: Replanner) -> tuple[Trace, Change]:
    """Look at a run whose rollouts take four times as long as its updates: their engine gets three cores."""
    before = recorded(2.0, 0.5)
    change = look(replanner, before, 2.0)
    assert change is not None
    return before, change


def test_a_change_that_did_not_pay_is_taken_back_once_and_not_tried_again() -> None:
    replanner = looks(replace(LOOP, rollout_share=3).graph())
    before, change = changed(replanner)
    after = replace(recorded(1.6, 1.2, share=3), plan=change.after)  # responses are 1.2 times as long, and a step lasts longer than that
    back = look(replanner, after, 2.6)
    assert back is not None
    assert (str(back), back.after.source) == (
        "rollout 3, train 1 did not pay, so the run returns to rollout 2, train 2",
        before.plan.source,
    )
    assert look(replanner, before, 2.0) is None


def test_a_change_that_pays_for_longer_responses_stays() -> None:
    replanner = looks(replace(LOOP, rollout_share=3).graph())
    _, change = changed(replanner)
    assert look(replanner, replace(recorded(2.6, 2.0, share=3), plan=change.after), 2.6) is None


def test_a_change_whose_workers_could_not_start_is_not_tried_again() -> None:
    replanner = looks(replace(LOOP, rollout_share=3).graph())
    before, _ = changed(replanner)
    assert look(replanner, before, 2.0) is None


def test_costs_need_steps_to_be_fitted_to() -> None:
    with pytest.raises(PlanError, match=r"Replan\(every=2\): costs are fitted"):
        Replan(every=2)
