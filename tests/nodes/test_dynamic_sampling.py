"""Dynamic sampling: a batch is the first groups of the data order whose rewards differ, whatever ends first."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.letters import CONSTANT, Engine, Letters, data, last_letter, prompts_of

import rlgraph as rg
from rlgraph.algorithms import GRPO
from rlgraph.columns import Columns
from rlgraph.errors import GraphError, RlgraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rollout.dynamic_sampling import DynamicSampler, Refill


def rollout(kinds: str, count: int, group_size: int = 2, **refill: Any) -> rg.Output:
    generator, prompts = rg.Generator("m", pool=rg.Pool("p")), rg.prompts(data(kinds), count=count)
    return generator.rollout(prompts, group_size=group_size, refill=Refill(**{"reward": last_letter} | refill))


def sampler(output: rg.Output, engine: Engine, rank: int = 0, world: int = 1) -> DynamicSampler:
    context = Context(engine=engine, rank=rank, world=world, cache={"m": Letters()})
    stage = output.node.operation.start(context)
    assert isinstance(stage, DynamicSampler)
    return stage


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.text(alphabet=[CONSTANT, "d"], min_size=1, max_size=9).filter(lambda kinds: "d" in kinds),
    count=st.integers(1, 5),
    world=st.integers(1, 3),
    rank=st.integers(0, 2),
    timing=st.integers(0, 5),
)
def test_a_batch_is_the_first_groups_that_differ_and_the_next_goes_on_behind_them(
    kinds: str, count: int, world: int, rank: int, timing: int
) -> None:
    rank %= world
    output = rollout(kinds, count, rounds=1000)
    stage, source = sampler(output, Engine(random.Random(timing)), rank, world), output.node.operation.draws_from  # type: ignore[attr-defined]
    own = iter(range(rank, 10**9, world))
    for step in range(3):
        wanted = count * (rank + 1) // world - count * rank // world
        expected, passed = [], 0
        while len(expected) < wanted:
            position = next(own)
            passed += 1
            if not source.item(position)["prompt"].startswith(CONSTANT):
                expected.append(position)
        columns, metrics = stage(step, {})
        assert prompts_of(columns) == expected
        assert metrics["dynamic_sampling/prompts"] == passed * world
        assert metrics["dynamic_sampling/filtered_groups"] == (passed - wanted) * world
        assert len(columns["rewards"]) == wanted * 2
        assert columns["answers"] == [source.item(position)["answer"] for position in expected for _ in range(2)]


def test_a_constant_group_gives_its_place_to_the_next_prompt_while_others_decode() -> None:
    """Groups that differ take 20 decode steps, constant ones 1: all that are filtered fit beside the first that differ."""
    output = rollout("cdcdcdcd", 4)
    engine = Engine(random.Random(0), takes={CONSTANT: 1, "d": 20})
    columns, metrics = sampler(output, engine)(0, {})
    assert metrics["dynamic_sampling/filtered_groups"] > 0
    assert min(prompts_of(columns)) < 4 < max(prompts_of(columns))
    assert engine.steps <= 20 + metrics["dynamic_sampling/filtered_groups"]
    assert engine.most <= 4 * 2


def test_constant_groups_fill_the_batch_where_all_rounds_are_used_up() -> None:
    kinds = "cccccc"
    stage = sampler(rollout(kinds, 2, rounds=2), Engine(random.Random(0)))
    columns, metrics = stage(0, {})
    assert prompts_of(columns) == [0, 1]
    assert metrics["dynamic_sampling/prompts"] == 4
    assert metrics["dynamic_sampling/unfilled_groups"] == 2
    assert prompts_of(stage(1, {})[0]) == [4, 5]


def test_the_mean_reward_of_all_that_was_drawn_stands_beside_that_of_the_batch() -> None:
    stage = sampler(rollout("cd", 1, group_size=2), Engine(random.Random(0)))
    while True:
        columns, metrics = stage(0, {})
        if metrics["dynamic_sampling/prompts"] == 2:
            break
    rewards = columns["rewards"]
    assert isinstance(rewards, torch.Tensor)
    assert metrics["critic/rewards/mean"] == rewards.mean().item()
    assert metrics["critic/rewards/drawn_mean"] == pytest.approx((rewards.sum().item() + 2 * ord("0")) / 4)


def test_a_stage_goes_on_from_its_state() -> None:
    output = rollout("dcdddc", 2)
    first, second = (sampler(output, Engine(random.Random(seed))) for seed in (0, 1))
    first(0, {})
    second.load_state(first.state())
    assert prompts_of(second(1, {})[0]) == prompts_of(first(1, {})[0])


def test_weights_that_arrive_while_responses_decode_are_taken_if_they_may() -> None:
    prompts, weights = rg.prompts(data("dd"), count=1), rg.feedback("w", depth=1)
    generator = rg.Generator("m", pool=rg.Pool("p"))
    for interrupt, expected in (("keep", True), (None, False)):
        output = generator.rollout(prompts, weights, group_size=2, refill=Refill(reward=last_letter), interrupt=interrupt)  # type: ignore[arg-type]
        stage, arrivals = sampler(output, Engine(random.Random(0))), Arrivals()
        stage.context.arrivals = arrivals  # type: ignore[assignment]
        stage(0, {})
        assert bool(arrivals.polled) == expected


@dataclass
class Arrivals:
    polled: int = 0

    def poll(self) -> None:
        self.polled += 1


def test_a_reward_that_raises_names_the_prompt() -> None:
    def broken(response: str) -> float:
        raise ValueError("no")

    with pytest.raises(RlgraphError, match=r"reward function broken raised ValueError.*prompt 0 of the data order"):
        sampler(rollout("d", 1, reward=broken), Engine(random.Random(0)))(0, {})


def own_node() -> rg.Output:
    @rg.node(reads="prompt_texts prompt_ids", writes="prompt_texts prompt_ids")
    def shouting(batch: Columns) -> Columns:
        return batch

    return shouting(rg.prompts(data("dd"), count=1))


WRONG = {
    "a group of one": ({"group_size": 1}, {}, "a group of one is never constant"),
    "a batch ahead of none": ({"continuous": True, "weights": rg.feedback("w", depth=0)}, {}, "continuous=True at depth=0"),
    "parts": ({"chunks": 2}, {}, "refill= and chunks=2"),
    "one round": ({}, {"rounds": 1}, "Refill\\(rounds=1\\)"),
    "a column that there is": ({}, {"writes": "answers"}, "a column that it has already"),
    "a column of another kind": ({}, {"writes": "returns"}, "which holds regression target"),
    "a reward of what there is not": ({}, {"reward": lambda solutions: []}, "reads column 'solutions', which neither"),
    "no function": ({}, {"reward": 3}, "reward is a function"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_refill_cannot_go_with_is_refused_when_declared(name: str) -> None:
    options, refill, message = WRONG[name]
    generator, prompts = rg.Generator("m", pool=rg.Pool("p")), rg.prompts(data("dd"), count=1)
    with pytest.raises(GraphError, match=message):
        generator.rollout(prompts, **{"group_size": 2} | options, refill=Refill(**{"reward": last_letter} | refill))  # type: ignore[arg-type]


def test_what_is_no_refill_is_refused() -> None:
    with pytest.raises(GraphError, match="has refill=True; pass the options of the refill"):
        rg.Generator("m", pool=rg.Pool("p")).rollout(rg.prompts(data("dd"), count=1), group_size=2, refill=True)  # type: ignore[arg-type]


def test_prompts_of_a_node_of_the_users_own_have_no_order_to_draw_from() -> None:
    with pytest.raises(GraphError, match="its prompts come from another node"):
        rg.Generator("m", pool=rg.Pool("p")).rollout(own_node(), group_size=2, refill=Refill(reward=last_letter))


def test_prompts_that_a_rollout_draws_are_not_read_by_others_too() -> None:
    prompts, generator = rg.prompts(data("dd"), count=1), rg.Generator("m", pool=rg.Pool("p"))
    drawn = generator.rollout(prompts, group_size=2, refill=Refill(reward=last_letter))
    plain = generator.rollout(prompts, sampling=rg.Sampling(temperature=0), name="greedy")
    baseline = rg.reward(last_letter, plain, writes="baseline_rewards", name="baseline")
    both = rg.advantages(drawn, baseline, estimator=rg.estimators.ReMax())
    with pytest.raises(GraphError, match="node 'greedy' reads from 'prompts', but 'rollout' draws these prompts by itself"):
        rg.Graph("g", both)


def test_two_rollouts_do_not_draw_from_one_source() -> None:
    prompts, generator = rg.prompts(data("dd"), count=1), rg.Generator("m", pool=rg.Pool("p"))
    first, second = (
        generator.rollout(prompts, group_size=2, refill=Refill(reward=last_letter, writes=w), name=w) for w in ("rewards", "other")
    )
    with pytest.raises(GraphError, match="draw from one source of prompts"):
        rg.Graph(
            "g", rg.advantages(first, estimator=GRPO()), rg.advantages(second, estimator=rg.estimators.GDPO(keys=("other",)), name="a2")
        )
