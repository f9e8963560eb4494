"""Prompts that are too long stop the launch, are left out or lose their beginning, as their data set says, and are counted."""

import logging
from pathlib import Path
from typing import Any

import pytest
from support.templates import model_with, tokenizer_of

import rlgraph as rg
from rlgraph.engines.api import Response
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import Context

SIZES = [3, 9, 4, 12, 5, 8]  # characters, of which each is a token
DATA = [{"prompt": chr(ord("a") + n) * size, "answer": str(n)} for n, size in enumerate(SIZES)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5")


def launched(folder: Path, data: Any, *, context: int = 12, refill: bool = False, **options: Any) -> tuple[Output, Output]:
    """Declare a rollout with room for 8 tokens of a prompt, and check it as a launch does."""
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=context, sampling=rg.Sampling(max_tokens=4))
    prompts = rg.prompts(data, **{"count": 2, **options})
    refilled = rg.options.Refill(reward=right) if refill else None
    rollout = generator.rollout(prompts, group_size=2 if refill else 1, refill=refilled)
    for node in [rollout.node] if refill else [prompts.node, rollout.node]:
        node.operation.check(node)
    return prompts, rollout


def right(response: str, answer: str) -> float:
    return float(response == answer)


def drawn(prompts: Output, steps: int) -> list[str]:
    return [text for step in range(steps) for text in prompts.node.operation.batch(step)["prompt_texts"]]


def test_a_prompt_too_long_stops_the_launch_unless_the_data_set_says_otherwise(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"the prompt of item 1 of .* has 9 tokens, .* room for 1 to 8: a context of 12 less 4 .*overlong='drop'"
    ):
        launched(folder, DATA)
    with pytest.raises(DataError, match=r"item 2 .* has 4 tokens, .* room for 1 to 3: max_prompt_tokens"):
        launched(folder, rg.data.rows([DATA[0], DATA[0], DATA[2]], max_prompt_tokens=3))


def test_dropped_prompts_are_never_drawn_and_each_other_one_once_an_epoch(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prompts, _ = launched(folder, rg.data.rows(DATA, overlong="drop"))
    assert sorted(drawn(prompts, 2)) == ["aaa", "cccc", "eeeee", "ffffffff"]
    assert sorted(drawn(prompts, 4)) == sorted(["aaa", "cccc", "eeeee", "ffffffff"] * 2)
    assert prompts.node.operation.metrics == {"data/overlong_prompts": 2.0}
    assert {**(prompts.node.operation.cursor(1) or {}), "digest": ""} == {"items": 4, "digest": "", "seed": 0, "next": 2}
    columns, metrics = prompts.node.operation.start(Context())(0, {})
    assert len(columns["answers"]) == 2
    assert metrics == {"data/overlong_prompts": 2.0}
    assert [m for m in caplog.messages if "2 of 6 prompts of node 'rollout' have more than 8 tokens and are left out" in m]


def test_a_limit_of_the_data_set_is_below_the_room(folder: Path) -> None:
    prompts, _ = launched(folder, rg.data.rows(DATA, overlong="drop", max_prompt_tokens=4))
    assert sorted(drawn(prompts, 1)) == ["aaa", "cccc"]
    prompts, _ = launched(folder, rg.data.rows(DATA, overlong="drop", max_prompt_tokens=100))
    assert len({*drawn(prompts, 2)}) == 4


def test_a_second_launch_counts_again(folder: Path) -> None:
    prompts, rollout = launched(folder, rg.data.rows(DATA, overlong="drop"))
    for node in (prompts.node, rollout.node):
        node.operation.check(node)
    assert prompts.node.operation.metrics == {"data/overlong_prompts": 2.0}
    assert len({*drawn(prompts, 2)}) == 4


def test_two_rollouts_of_one_source_draw_what_both_have_room_for(folder: Path) -> None:
    prompts, _ = launched(folder, rg.data.rows(DATA, overlong="drop"))
    narrow = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=8, sampling=rg.Sampling(max_tokens=4)).rollout(
        prompts, name="b"
    )
    narrow.node.operation.check(narrow.node)
    assert sorted(drawn(prompts, 1)) == ["aaa", "cccc"]
    assert prompts.node.operation.metrics == {"data/overlong_prompts": 4.0}


def test_prompts_lose_their_beginning_wherever_they_are_sent(folder: Path) -> None:
    data = rg.data.rows([{"prompt": "0123456789", "answer": "1"}], overlong="truncate_left", max_prompt_tokens=6)
    prompts, rollout = launched(folder, data, count=1)
    tokenizer, asked = tokenizer_of(folder), []

    class Engine:
        def submit(self, request: Any) -> None:
            asked.append(list(request.prompt))

        def generate(self, given: Any, sampling: Any, seeds: Any) -> list[Response]:
            asked.extend(given)
            return [Response([1], [0.0], [0]) for _ in given]

        def context_length(self) -> int:
            return 12

    [[task]] = rollout.node.operation.tasks(Context(engine=Engine()), prompts.node.operation.batch(0))
    _, refilled = launched(folder, data, count=1, refill=True)
    sampler = refilled.node.operation.start(Context(engine=Engine()))
    sampler.newest = 0
    sampler._draw(0)
    weights = rg.feedback("weights", depth=1)
    evaluation = rg.evaluate(rollout.node.model, data, weights, reward=right, every=1)
    evaluation.node.inputs[0].node.operation.fire(Context(engine=Engine()), 0)
    assert {tokenizer.decode(tokens) for tokens in [task.request.prompt, *asked]} == {"456789"}
    assert len(asked) == 3
    assert prompts.node.operation.metrics == {"data/overlong_prompts": 1.0}


def test_an_evaluation_leaves_out_what_it_has_no_room_for(folder: Path) -> None:
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), max_context=12, sampling=rg.Sampling(max_tokens=4))
    node = rg.evaluate(generator, rg.data.rows(DATA, overlong="drop"), rg.feedback("weights", depth=1), reward=right, every=1).node
    answer = node.inputs[0].node
    answer.operation.check(answer)
    asked: list[Any] = []

    class Engine:
        def generate(self, given: Any, sampling: Any, seeds: Any) -> list[Response]:
            asked.extend(given)
            return [Response([1], [0.0], [0]) for _ in given]

    columns = answer.operation.fire(Context(engine=Engine()), 0)
    assert [tokenizer_of(folder).decode(tokens) for tokens in asked] == ["aaa", "cccc", "eeeee", "ffffffff"]
    _, metrics = node.operation.fire(Context(), columns)
    assert node.operation.items["answers"] == ["0", "2", "4", "5"]
    assert metrics["val/data/overlong_prompts"] == 2.0


def test_a_data_set_without_a_prompt_that_fits_is_an_error(folder: Path) -> None:
    with pytest.raises(DataError, match="all 6 prompts of the data set have more than 2 tokens"):
        launched(folder, rg.data.rows(DATA, overlong="drop", max_prompt_tokens=2))


def test_conversations_are_counted_as_they_are_rendered(folder: Path) -> None:
    data = [{"prompt": [{"role": "user", "content": "a" * n}], "answer": ""} for n in (1, 40)]
    tokens = len(tokenizer_of(folder).apply_chat_template(data[0]["prompt"], add_generation_prompt=True, return_dict=False))
    prompts, _ = launched(folder, rg.data.rows(data, overlong="drop", max_prompt_tokens=tokens), context=1000)
    assert {*drawn(prompts, 2)} == {"a"}
