"""Rewards of every kind: for a batch, for one response, async; and what goes wrong names the response and its prompt."""

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rewards import scorers
from rlgraph.nodes.rewards.calls import CallFailed, Calls, FunctionPool
from rlgraph.nodes.rewards.reward import Reward

COLUMNS: Columns = {
    "responses": ["a", "bb", "ccc", "dddd"],
    "answers": ["a", "b", "ccc", "d"],
    "group_ids": torch.tensor([7, 7, 8, 8]),
    "prompt_texts": ["seven", "seven", "eight", "eight"],
    "levels": torch.tensor([0, 1, 2, 3]),
}


def right(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r == a) for r, a in zip(responses, answers, strict=True)]


def right_one(response: str, answer: str) -> float:
    return float(response == answer)


async def right_later(response: str, answer: str) -> float:
    await asyncio.sleep(0)
    return float(response == answer)


async def right_all_later(responses: list[str], answers: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return right(responses, answers)


def of_verl(solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(solution_str == ground_truth and extra_info is None)


def of_trl(completions: list[str], answers: list[str]) -> list[float]:
    return right(completions, answers)


def worth(response: str, answer: str, points: float = 1.0) -> float:
    return points * (response == answer)


def operation(function: Callable[..., Any], **settings: Any) -> Reward:
    """A reward node whose columns are text already, as those of `COLUMNS`."""
    prompts = rg.prompts([{"prompt": "?", "answer": "!", "level": 1}], count=2)

    @rg.node(reads="prompt_texts", writes="responses group_ids")
    def rollout(batch: Columns) -> Columns:
        raise AssertionError("never run")

    found = rg.reward(function, prompts, rollout(prompts), **settings).node.operation
    assert isinstance(found, Reward)
    return found


def rewards(function: Callable[..., Any], **settings: Any) -> list[float]:
    columns, _ = operation(function, **settings).start(Context())(0, COLUMNS)  # type: ignore[misc]
    return columns["rewards"].tolist()  # type: ignore[union-attr,no-any-return]


@pytest.mark.parametrize("function", [right, right_one, right_later, right_all_later])
def test_a_function_of_the_batch_of_one_response_or_an_async_one_gives_the_same_rewards(function: Callable[..., Any]) -> None:
    assert rewards(function) == [1.0, 0.0, 1.0, 0.0]


def test_a_number_of_one_response_comes_as_a_number() -> None:
    assert rewards(lambda level, response: float(isinstance(level, int)) + level) == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_calls_for_single_responses_run_together_and_never_more_than_the_concurrency(kind: str) -> None:
    meeting, running, most = threading.Barrier(2, timeout=60), [0], [0]

    def together(response: str) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        meeting.wait()  # returns only if two calls are here at the same time
        running[0] -= 1
        return 1.0

    arrived: list[asyncio.Event] = []

    async def together_async(response: str) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        mine = asyncio.Event()
        arrived.append(mine)
        if len(arrived) % 2 == 0:
            for event in arrived[-2:]:
                event.set()
        await mine.wait()
        running[0] -= 1
        return 1.0

    assert rewards(together if kind == "threads" else together_async, concurrency=2, deadline_s=60) == [1.0] * 4
    assert most[0] == 2


def fails_for_ccc(response: str) -> float:
    if response == "ccc":
        raise ZeroDivisionError("no such thing")
    return 1.0


async def fails_for_ccc_later(response: str) -> float:
    return fails_for_ccc(response)


def fails_for_a_batch_with_ccc(responses: list[str]) -> list[float]:
    return [fails_for_ccc(r) for r in responses]


WHICH = r"for response 2 \(prompt 8 of the data order: 'eight'\)"


@pytest.mark.parametrize("function", [fails_for_ccc, fails_for_ccc_later, fails_for_a_batch_with_ccc])
def test_a_reward_that_raises_names_the_response_and_its_prompt(function: Callable[..., Any]) -> None:
    with pytest.raises(
        RlgraphError, match=f"reward function {function.__name__} raised ZeroDivisionError: no such thing, {WHICH}"
    ) as raised:
        rewards(function)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


never = threading.Event()


@pytest.fixture(autouse=True)
def _hanging_calls_end_with_their_test() -> Iterator[None]:
    never.clear()
    yield
    never.set()


def hangs_for_ccc(response: str) -> float:
    if response == "ccc":
        never.wait(60)
    return 1.0


async def hangs_for_ccc_later(response: str) -> float:
    if response == "ccc":
        await asyncio.to_thread(never.wait, 60)
    return 1.0


def hangs_for_a_batch_with_ccc(responses: list[str]) -> list[float]:
    return [hangs_for_ccc(r) for r in responses]


@pytest.mark.parametrize("function", [hangs_for_ccc, hangs_for_ccc_later, hangs_for_a_batch_with_ccc])
def test_a_reward_that_hangs_names_the_response_and_its_prompt(function: Callable[..., Any]) -> None:
    with pytest.raises(RlgraphError, match=f"has not returned within 1 s, {WHICH}"):
        rewards(function, deadline_s=1.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "good", None])
def test_a_reward_that_is_no_finite_number_names_the_response_and_its_prompt(value: object) -> None:
    with pytest.raises(RlgraphError, match=f"returned {str(value) if isinstance(value, float) else repr(value)} {WHICH}"):
        rewards(lambda response: value if response == "ccc" else 1.0)


def test_a_batch_that_fails_as_a_whole_says_so() -> None:
    def too_many(responses: list[str]) -> list[float]:
        if len(responses) > 1:
            raise ValueError("one at a time")
        return [1.0]

    with pytest.raises(RlgraphError, match="for the batch of 4 responses, though for none of them alone"):
        rewards(too_many)


def test_calls_stop_once_one_has_failed() -> None:
    seen: list[int] = []

    def call(place: int) -> None:
        seen.append(place)
        raise ValueError("no")

    with pytest.raises(CallFailed):
        FunctionPool(call, [{"place": i} for i in range(1000)], 1, 10.0).run()
    assert seen == [0]


def test_an_answer_is_what_the_last_mark_holds_else_the_whole_response() -> None:
    assert rg.scorers.answer_in("<answer> 3 </answer> no, <answer>4</answer>") == "4"
    assert rg.scorers.answer_in(r"so \boxed{1/2}.") == "1/2"
    assert rg.scorers.answer_in(" 12 \n") == "12"


def test_an_instruction_of_reasoning_gym_may_hold_braces() -> None:
    pytest.importorskip("reasoning_gym")
    plain, boxed = (
        rg.scorers.reasoning_gym("chain_sum", size=3, instruction=text)[1]["prompt"]
        for text in ("{question}", "{question} Write \\boxed{}.")
    )
    assert boxed == plain + " Write \\boxed{}."


@pytest.mark.parametrize("make", [lambda: rg.scorers.reasoning_gym("chain_sum", size=2), rg.scorers.math_verify])
def test_a_missing_package_is_named_with_the_command_that_installs_it(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("reasoning_gym", "math_verify"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    monkeypatch.setattr(scorers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"is not installed: pip install 'rlgraph-dataflow\[rewards\]'"):
        make()


def test_reasoning_gym_gives_prompts_and_scores_their_answers() -> None:
    gym = pytest.importorskip("reasoning_gym")
    task = rg.scorers.reasoning_gym("chain_sum", size=5, seed=3, max_terms=2)
    entries = gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2)
    assert [task[i]["prompt"] for i in range(5)] == [entries[i]["question"] for i in range(5)]
    assert task.score(f"It is <answer>{entries[4]['answer']}</answer>", 4) == 1.0
    assert task.score("no idea", 4) < 1.0
    prompts = rg.prompts(task, count=2)
    assert set(prompts.columns) == {"prompt_texts", "prompt_ids", "items", "data_sources"}
    with pytest.raises(DataError, match=r"task 'no such' with .* cannot be created"):
        rg.scorers.reasoning_gym("no such", size=1)


def test_math_verify_finds_equal_answers_and_ends_those_that_take_too_long() -> None:
    pytest.importorskip("math_verify")
    equal = rg.scorers.math_verify()
    assert equal("so it is $\\frac{1}{2}$", "0.5") == 1.0
    assert equal("so it is $\\frac{1}{3}$", "0.5") == 0.0
    assert equal("so it is $\\frac{1}{2}$", "0.5").pred == equal("it is 0.5, no doubt", "1/2").pred
    assert equal("so it is $0.25$", "7").pred == equal("so it is $\\frac{1}{4}$", "7").pred == "1/4"
    assert (equal("I do not know", "7"), equal("I do not know", "7").pred) == (0.0, "")
    assert rg.scorers.math_verify(limit_s=0.5)("$9^{9^{9^{9^{9}}}}$", "$9^{9^{9^{9^{8}}}}$") == 0.0


def test_math_verify_reads_numbers_and_neither_deaths_nor_silence_of_its_process_are_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    equal = rg.scorers.math_verify(limit_s=30, concurrency=1)
    assert [equal(f"It is ${said}$.", right) for said, right in (("3", 3), ("0.5", 0.5), ("0.00000001", 1e-8))] == [1.0] * 3
    children = scorers._children[30]
    children.idle.queue[-1].kill()
    assert equal("It is $3$.", "3") == 1.0
    with pytest.raises(DataError, match=r"the field answer is \['3'\]; it is text, or a finite number"):
        equal("It is $3$.", ["3"])  # type: ignore[arg-type]
    monkeypatch.setattr(scorers, "_start_child", lambda: scorers.subprocess.Popen(["true"], stdin=-1, stdout=-1, text=True))
    children.close()
    with pytest.raises(DataError, match=r"the right answer '3' cannot be compared with itself within 30 s"):
        equal("It is $3$.", "3")


def test_math_verify_compares_as_many_at_a_time_as_there_are_cores_unless_scorer_or_node_say_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr(scorers.os, "sched_getaffinity", lambda pid: set(range(5)))
    none, own, retry = Calls(None, 1.0, None), Calls(3, 1.0, None), Calls(None, 1.0, rg.options.Retry(times=2))
    assert none.of("node 'reward'", rg.scorers.math_verify()) == (5, 1.0, None)
    assert none.of("node 'reward'", rg.scorers.math_verify(concurrency=7)) == (7, 1.0, None)
    assert own.of("node 'reward'", rg.scorers.math_verify(concurrency=7)) == (3, 1.0, None)
    assert retry.of("node 'reward'", rg.scorers.math_verify()) == (5, 1.0, rg.options.Retry(times=2))


@pytest.mark.parametrize("wrong", [{"limit_s": 0}, {"limit_s": float("nan")}, {"concurrency": 0}, {"concurrency": 1.5}])
def test_settings_of_math_verify_that_cannot_be_are_named(wrong: dict[str, Any]) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(GraphError, match=next(iter(wrong))):
        rg.scorers.math_verify(**wrong)


def test_a_scorer_may_tell_the_answer_as_a_mapping_as_verls_do_or_as_a_score() -> None:
    def told(response: str) -> dict[str, Any]:
        return {"score": len(response), "acc": True, "pred": response, "format": 1}

    assert rewards(told) == rewards(lambda response: rg.scorers.Score(len(response), response)) == [1.0, 2.0, 3.0, 4.0]
    graded = operation(told).scoring.grade(Context(), COLUMNS).scores
    assert [(score.pred, score.acc) for score in graded] == [(text, 1.0) for text in COLUMNS["responses"]]
    copied = pickle.loads(pickle.dumps(graded[2]))
    assert (copied, copied.pred, copied.acc) == (3.0, "ccc", 1.0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"reward": 1.0}, r"{WHICH}: a mapping has its number under 'score'"),
        ({"score": "good"}, r"{WHICH}: Score\('good', acc=None\): a score and its acc are numbers"),
        ({"score": float("nan")}, "returned nan {WHICH}"),
        ({"score": 1.0, "acc": float("inf")}, "returned inf {WHICH}"),
    ],
)
def test_a_mapping_that_is_no_score_names_the_response_and_its_prompt(value: object, words: str) -> None:
    with pytest.raises(RlgraphError, match=words.replace("{WHICH}", WHICH)):
        rewards(lambda response: value if response == "ccc" else 1.0)


@pytest.mark.parametrize(("function", "points"), [(of_verl, 1.0), (of_trl, 1.0), (worth, 1.0), (functools.partial(worth, points=0.5), 0.5)])
def test_functions_of_verl_and_trl_defaults_and_partials_score_as_they_are(function: Callable[..., Any], points: float) -> None:
    assert rewards(function) == [points * score for score in rewards(right)]
    assert sum(rewards(right)) > 0
