"""What a played schedule tells: who waits for what, the first step, and engines of one generator that go on by themselves."""

from dataclasses import replace
from typing import Any

import pytest
from support.grpo import grpo_graph
from support.simulated_stages import LONG_TAIL, Loop

import rlgraph as rg
from rlgraph.plan.cost_functions import Decode, NodeCost
from rlgraph.plan.play import Played

PLAIN = {"prompts": 0.0, "rollout": 1.0, "reward": 0.25, "update": 2.0}


def plan(loop: Loop, **seconds: float | NodeCost) -> rg.Plan:
    costs = rg.planning.Costs({**PLAIN, **seconds}, lengths=LONG_TAIL)
    return rg.compile(loop.graph(), rg.Cluster(cpus=loop.devices), costs)


def waits(found: rg.Plan) -> dict[tuple[str, str, str], float]:
    return {(wait.who, wait.on, wait.reason): wait.seconds for wait in found.prediction.waits}


def test_without_overlap_each_side_waits_for_the_other() -> None:
    found = waits(plan(Loop(depth=0)))
    assert found["rollout", "weights", "loop"] == pytest.approx(2.25)
    assert found["train", "reward", "data"] == pytest.approx(1.25)


def test_the_busy_side_waits_for_nothing_and_the_other_for_weights() -> None:
    found = waits(plan(Loop(depth=1)))
    assert not [key for key in found if key[0] == "train"]
    assert found["rollout", "weights", "loop"] == pytest.approx(1.0)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_first_step_takes_all_of_its_stages_whatever_the_depth(depth: int) -> None:
    assert plan(Loop(depth=depth)).prediction.first_step_s == pytest.approx(3.25)


def test_a_step_ends_with_all_of_its_firings_and_not_before_the_step_before() -> None:
    ends = {"rollout": [5.0, 6.0, 9.0], "aside": [8.0, 7.0, 7.5]}
    assert Played((), {}, {}, ends, {}, {}, {}).step_ends() == [8.0, 8.0, 9.0]


def test_an_engine_that_is_done_goes_on_while_another_decodes() -> None:
    loop = Loop(depth=3, generators=4, lengths=LONG_TAIL)
    decode = NodeCost(decode=Decode(step_s=0.01))
    found = plan(loop, rollout=decode, update=0.01)
    together = found.node("rollout").seconds  # until the last engine is done
    assert 0.6 * together < found.prediction.step_s < 0.95 * together


def test_waits_of_engines_are_averaged_and_those_of_chunks_add_up() -> None:
    for loop in (Loop(depth=0, generators=2), Loop(depth=0, chunks=4)):
        found = plan(replace(loop, lengths=LONG_TAIL), rollout=NodeCost(decode=Decode(step_s=0.01)))
        step_s, rollout = found.prediction.step_s, found.node("rollout").seconds
        idle = sum(wait.seconds for wait in found.prediction.waits if wait.who == "rollout")
        assert idle == pytest.approx(step_s - rollout, rel=0.35)
        train = sum(wait.seconds for wait in found.prediction.waits if wait.who == "train")
        assert train == pytest.approx(step_s - 2.0, rel=0.05)


@pytest.mark.parametrize(("settings", "said"), [({"continuous": True}, "continuous=True"), ({"interrupt": "keep"}, "interrupt='keep'")])
def test_what_joins_while_responses_decode_is_said_to_be_left_out_of_the_prediction(settings: dict[str, Any], said: str) -> None:
    def compiled(**more: Any) -> rg.Plan:
        generator, policy = rg.Generator("m", pool=rg.Pool("rollout")), rg.Policy("m", pool=rg.Pool("train"))
        return rg.compile(grpo_graph(generator, policy, name="joining", **more, depth=2), rg.Cluster(gpus=2))

    plan, plain = compiled(**settings), compiled()
    assert said in plan.prediction.left_out[0]
    assert "not predicted: 'rollout'" in str(plan)
    assert plain.prediction.left_out == ()
    assert "not predicted" not in str(plain)
    assert rg.Plan.from_json(plan.to_json()) == plan
