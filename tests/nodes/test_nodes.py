"""The library's own nodes, fired by hand: prompts in order, rewards checked, rewards by token, advantages converted."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import rlgraph as rg
from rlgraph.columns import COLUMNS, Columns, concat_rows, repeat_rows
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes.base import Context, checked_columns
from rlgraph.nodes.prompts import Prompts, plural
from rlgraph.nodes.rewards.scoring import checked_rewards
from rlgraph.nodes.rollout.decode_loop import seed_of
from rlgraph.nodes.training.advantages import on_last_token


def source(items: int, count: int, seed: int = 0) -> Prompts:
    data = [{"prompt": f"p{i}", "answer": str(i), "level": i} for i in range(items)]
    operation = rg.prompts(data, count=count, seed=seed).node.operation
    assert isinstance(operation, Prompts)
    return operation


@given(items=st.integers(1, 20), count=st.integers(1, 7), seed=st.integers(0, 5))
def test_each_item_comes_exactly_once_an_epoch_whatever_the_batch(items: int, count: int, seed: int) -> None:
    prompts = source(items, count, seed)
    steps = -(-2 * items // count)
    texts = [text for step in range(steps) for text in prompts.batch(step)["prompt_texts"]]
    assert sorted(texts[:items]) == sorted(f"p{i}" for i in range(items))
    assert sorted(texts[items : 2 * items]) == sorted(f"p{i}" for i in range(items))


def test_a_step_is_a_function_of_its_number_so_that_any_of_them_can_be_drawn_again() -> None:
    first, again = source(10, 4, seed=3), source(10, 4, seed=3)
    late = again.batch(5)
    assert [first.batch(step)["prompt_texts"] for step in range(6)][5] == late["prompt_texts"]
    assert source(10, 4, seed=4).batch(0)["prompt_texts"] != first.batch(0)["prompt_texts"]


def test_a_data_set_smaller_than_a_step_is_walked_more_than_once() -> None:
    batch = source(2, 5).batch(0)
    assert len(batch["prompt_texts"]) == 5
    assert torch.equal(batch["prompt_ids"], torch.arange(5))  # type: ignore[arg-type]


def test_a_step_of_more_rows_than_there_are_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for count in (2, 60):
        node = rg.prompts([{"prompt": "a"}, {"prompt": "b"}], count=count).node
        node.operation.check(node)
    assert [record.message for record in caplog.records] == [
        "node 'prompts' draws 60 rows per step from a data set of 2, so each step repeats rows"
    ]


def test_fields_become_columns_in_the_plural_with_numbers_as_tensors() -> None:
    batch = source(3, 3).batch(0)
    assert set(batch) == {"prompt_texts", "prompt_ids", "answers", "levels"}
    assert isinstance(batch["levels"], torch.Tensor)
    assert plural("answers") == "answers"


def test_numbers_with_a_fraction_keep_their_bits_in_training_and_in_evaluation() -> None:
    numbers = [0.1, 1234567.89, 16777217.0, 1e300]
    items = [{"prompt": "a", "answer": number, "margin": number / 2} for number in numbers]
    batch = rg.prompts(items, count=4).node.operation.batch(0)  # type: ignore[attr-defined]
    assert sorted(batch["answers"].tolist()) == sorted(numbers)
    assert batch["margins"].dtype is torch.float32, "a column that rlgraph defines"
    generator, weights = rg.Generator("m", pool=rg.Pool("p")), rg.feedback("w", depth=0)
    evaluation = rg.evaluate(generator, items, weights, reward=lambda answer: answer, every=1)
    assert evaluation.node.operation.items["answers"] == numbers  # type: ignore[attr-defined]


def test_texts_that_a_node_changes_are_its_own_and_a_step_takes_the_time_that_passes() -> None:
    @rg.node(reads="answers", writes="first")
    def cleaned(batch: rg.Columns) -> rg.Columns:
        batch["answers"][:] = [""] * 4  # type: ignore[index]
        return {"first": torch.zeros(4)}

    @rg.node(reads="answers", writes="same")
    def same(batch: rg.Columns) -> tuple[rg.Columns, dict[str, float]]:
        return {"same": torch.zeros(4)}, {"same": float("" not in batch["answers"])}

    prompts = rg.prompts([{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}], count=4)
    with rg.compile(rg.Graph("g", cleaned(prompts), same(prompts)), rg.Cluster(cpus=1)).run_here() as job:
        time.sleep(0.1)
        start = time.monotonic()
        step = next(job.steps(1))
        took = time.monotonic() - start
    assert step.metrics["same"] == 1.0
    assert step.seconds == step.metrics["timing_s/step"] <= took


JSON = '[{"role": "user", "content": "1"}]'
UNFIT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "64 bits": (
        {"n": 1},
        {"n": 2**70},
        "item 1 of the data set has n=1180591620717411303424; whole numbers of a column have at most 64 bits",
    ),
    "half a character": ({}, {"prompt": "b\ud83d"}, "item 1 of the data set has prompt=.* at character 1, a lone surrogate"),
    "half a character of a field": ({"n": "a"}, {"n": "\ud83d"}, "item 1 of the data set has n=.* a lone surrogate"),
    "not a number": ({"n": 1.0}, {"n": float("nan")}, "item 1 of the data set has n=nan, which pandas writes for missing values"),
    "more bits than a fraction has": ({"n": 1.0}, {"n": 2**53 + 1}, "which a floating-point number cannot hold exactly"),
    "a conversation as JSON": ({}, {"prompt": JSON}, "item 1 of the data set has prompt=.*, a conversation written as JSON"),
}


def test_a_prompt_of_brackets_is_text() -> None:
    node = rg.prompts([{"prompt": "[" * 5000 + '"role"'}], count=1).node
    node.operation.check(node)


@pytest.mark.parametrize("name", UNFIT)
def test_a_value_that_no_column_holds_is_named_before_anything_starts(name: str) -> None:
    first, second, words = UNFIT[name]
    node = rg.prompts([{"prompt": "a"} | first, {"prompt": "b"} | second], count=1).node
    with pytest.raises(DataError, match=words):
        node.operation.check(node)


def test_what_is_no_data_set_is_named_with_what_to_give() -> None:
    with pytest.raises(DataError, match=r"the data set is PosixPath\('train.jsonl'\).*read the file first, e.g. with rg.data.jsonl"):
        rg.prompts(Path("train.jsonl"), count=1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"item 0 of the data set has prompt=\['hi'\]; a prompt is text, or a list of messages {'role'"):
        rg.prompts([{"prompt": ["hi"]}], count=1)


def by_length(responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def test_rewards_may_be_a_list_or_a_tensor() -> None:
    assert checked_rewards(by_length, [1, 2], 2) == [1.0, 2.0]
    assert checked_rewards(by_length, torch.tensor([1.0, 2.0]), 2) == [1.0, 2.0]


def test_a_reward_goes_to_the_last_token_that_the_policy_wrote() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    placed = on_last_token(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 1, 0], [2, 0, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_rewards_may_go_to_a_column_of_another_name_with_metrics_of_its_own() -> None:
    rollout, _ = rollout_and_rewards()
    baseline = rg.reward(lambda responses: [float(len(r)) for r in responses], rollout, writes="baseline_rewards", name="baseline")  # type: ignore[arg-type]
    assert baseline.columns == ("baseline_rewards",)
    scoring = dataclasses.replace(baseline.node.operation.scoring, decoded=())  # type: ignore[attr-defined]
    operation = dataclasses.replace(baseline.node.operation, scoring=scoring)  # type: ignore[type-var]
    columns, metrics = operation.fire(Context(), None, {"responses": ["a", "bcd"]})  # type: ignore[attr-defined]
    assert columns["baseline_rewards"].tolist() == [1.0, 3.0]
    assert metrics == {"critic/baseline_rewards/mean": 2.0, "critic/baseline_rewards/max": 3.0, "critic/baseline_rewards/min": 1.0}


def test_the_temperature_of_the_update_is_that_of_the_rollout_it_reads_not_of_the_generator() -> None:
    prompts = rg.prompts([{"prompt": "?"}], count=2)
    generator, policy = rg.Generator("m", pool=rg.Pool("p"), sampling=rg.Sampling(temperature=0.5)), rg.Policy("m", pool=rg.Pool("t"))
    assert policy.log_probs(generator.rollout(prompts)).node.operation.temperature == 0.5  # type: ignore[attr-defined]
    hot = generator.rollout(prompts, sampling=rg.Sampling(temperature=2.0))
    assert policy.log_probs(hot).node.operation.temperature == 2.0  # type: ignore[attr-defined]
    with pytest.raises(GraphError, match="rollouts of several temperatures are among the inputs of one node"):
        policy.log_probs(hot, generator.rollout(prompts, name="cool"))
    with pytest.raises(GraphError, match=r"has sampling=0; sampling is a Sampling or None; write sampling=rg\.Sampling"):
        generator.rollout(prompts, sampling=0)  # type: ignore[arg-type]


def fire(output: object, columns: Columns) -> Columns:
    stage = output.node.operation.start(Context())  # type: ignore[attr-defined]
    fired: Columns | tuple[Columns, object] = stage(0, columns)
    return fired[0] if isinstance(fired, tuple) else fired


def rollout_and_rewards() -> tuple[object, object]:
    prompts = rg.prompts([{"prompt": "?"}], count=2)
    rollout = rg.Generator("m", pool=rg.Pool("p")).rollout(prompts, group_size=2)
    return rollout, rg.reward(by_length, rollout)


def test_kl_shaped_rewards_subtract_the_kl_of_each_token() -> None:
    rollout, rewards = rollout_and_rewards()
    policy, reference = rg.Policy("m", pool=rg.Pool("t")), rg.Reference("m", pool=rg.Pool("r"))
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, policy.log_probs(rollout), reference.log_probs(rollout), coef=0.5)  # type: ignore[arg-type]
    columns = {
        "rewards": torch.tensor([1.0]),
        "response_mask": torch.tensor([[True, True, False]]),
        "old_log_probs": torch.tensor([[-1.0, -2.0, 9.0]]),
        "ref_log_probs": torch.tensor([[-2.0, -2.0, 0.0]]),
    }
    assert fire(shaped, columns)["token_rewards"].tolist() == [[-0.5, 1.0, 0.0]]  # type: ignore[union-attr]


def test_an_estimator_of_whole_responses_takes_token_rewards_by_their_sum() -> None:
    rollout, rewards = rollout_and_rewards()
    policy, reference = rg.Policy("m", pool=rg.Pool("t")), rg.Reference("m", pool=rg.Pool("r"))
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, policy.log_probs(rollout), reference.log_probs(rollout), coef=0.5)  # type: ignore[arg-type]
    output = rg.advantages(rollout, shaped, estimator=rg.RLOO())  # type: ignore[arg-type]
    assert "token_rewards" in output.node.reads
    mask = torch.ones(2, 2, dtype=torch.bool)
    columns = {"token_rewards": torch.tensor([[0.5, 0.5], [1.0, 2.0]]), "response_mask": mask, "group_ids": torch.tensor([7, 7])}
    assert fire(output, columns)["advantages"].tolist() == [[-2.0, -2.0], [2.0, 2.0]]  # type: ignore[union-attr]


def test_rows_of_several_writers_join_with_prompts_padded_on_the_left() -> None:
    parts = [
        {"prompts": torch.tensor([[1, 2]]), "responses": torch.tensor([[3]]), "answers": ["a"]},
        {"prompts": torch.tensor([[4]]), "responses": torch.tensor([[5, 6]]), "answers": ["b"]},
    ]
    joined = concat_rows(parts)
    assert joined["prompts"].tolist() == [[1, 2], [0, 4]]  # type: ignore[union-attr]
    assert joined["responses"].tolist() == [[3, 0], [5, 6]]  # type: ignore[union-attr]
    assert joined["answers"] == ["a", "b"]


def test_a_prompts_columns_are_repeated_for_each_of_its_responses() -> None:
    assert repeat_rows(["a", "b"], 2) == ["a", "a", "b", "b"]
    assert repeat_rows(torch.tensor([1, 2]), 2).tolist() == [1, 1, 2, 2]  # type: ignore[union-attr]


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(RlgraphError, match="different lengths"):
        checked_columns("mine", ("a", "b"), {"a": torch.zeros(2), "b": torch.zeros(3)})


@example([(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)])
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(0, 15)), min_size=2, max_size=40, unique=True))
def test_each_response_of_a_run_is_sampled_with_a_seed_of_its_own(places: list[tuple[int, int, int]]) -> None:
    assert len({seed_of(*place) for place in places}) == len(places)


def test_every_column_says_what_it_is() -> None:
    assert all(spec.meaning and spec.written_by and spec.dims for spec in COLUMNS.values())
