"""Calls of rewards that fail are repeated after a pause, and get the default once all have failed."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, RlgraphError
from rlgraph.nodes.base import Context
from rlgraph.nodes.rewards.calls import Busy, FunctionPool
from rlgraph.nodes.rewards.reward import Reward

COLUMNS: Columns = {
    "responses": ["a", "bb", "ccc", "dddd"],
    "group_ids": torch.tensor([7, 7, 8, 8]),
    "prompt_texts": ["seven", "seven", "eight", "eight"],
}
Scored = tuple[list[float], dict[str, float]]


def scored(function: Callable[..., Any], retries: rg.options.Retry | None, **settings: Any) -> Scored:
    @rg.node(reads="prompt_texts", writes="responses group_ids")
    def rollout(batch: Columns) -> Columns:
        raise AssertionError("never run")

    prompts = rg.prompts([{"prompt": "?"}], count=2)
    operation = rg.reward(function, prompts, rollout(prompts), retries=retries, **settings).node.operation
    assert isinstance(operation, Reward)
    columns, metrics = operation.start(Context())(0, COLUMNS)  # type: ignore[misc]
    return columns["rewards"].tolist(), dict(metrics)  # type: ignore[union-attr, arg-type]


def soon(**settings: Any) -> rg.options.Retry:
    return rg.options.Retry(backoff_s=0.0, **settings)


class Flaky:
    """Fails for "ccc" in its first calls, in a way of its own."""

    def __init__(self, times: int, how: Callable[[], Any]) -> None:
        self.left, self.how, self.calls, self.lock = times, how, Counter[str](), threading.Lock()

    def fails(self, response: str) -> bool:
        with self.lock:
            self.calls[response] += 1
            return response == "ccc" and self.calls[response] <= self.left

    def plain(self, response: str) -> Any:
        return self.how() if self.fails(response) else float(len(response))

    async def later(self, response: str) -> Any:
        await asyncio.sleep(0)
        return self.plain(response)

    def batch(self, responses: list[str]) -> Any:
        return [self.plain(response) for response in responses]


def raises() -> float:
    raise ConnectionError("the line is dead")


FAILURES: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "no number": lambda: None,
    "text": lambda: "1.0",
    "nan": lambda: float("nan"),
    "a mapping": lambda: {"scores": 1},
}


@pytest.mark.parametrize("kind", ["plain", "later", "batch"])
@pytest.mark.parametrize("how", FAILURES)
def test_a_call_that_fails_is_repeated_until_it_does_not(kind: str, how: str) -> None:
    flaky = Flaky(2, FAILURES[how])
    rewards, metrics = scored(getattr(flaky, kind), soon(times=2))
    assert rewards == [1.0, 2.0, 3.0, 4.0]
    assert flaky.calls == {"a": 1, "bb": 1, "ccc": 3, "dddd": 1} if kind != "batch" else dict.fromkeys(COLUMNS["responses"], 3)
    assert (metrics["critic/rewards/retries"], metrics["critic/rewards/defaults"]) == (0.5, 0.0)


@pytest.mark.parametrize("kind", ["plain", "later"])
@pytest.mark.parametrize("how", FAILURES)
def test_once_all_calls_have_failed_the_response_gets_the_default(kind: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    flaky = Flaky(99, FAILURES[how])
    rewards, metrics = scored(getattr(flaky, kind), soon(times=1, default=-0.5))
    assert rewards == [1.0, 2.0, -0.5, 4.0]
    assert flaky.calls["ccc"] == 2
    assert (metrics["critic/rewards/retries"], metrics["critic/rewards/defaults"]) == (0.25, 0.25)
    assert "1 of 4 responses got the default -0.5; the last failure: r" in caplog.text


def test_a_batch_call_that_fails_gives_all_its_responses_the_default() -> None:
    rewards, metrics = scored(Flaky(99, raises).batch, soon(times=1, default=0.25))
    assert rewards == [0.25] * 4
    assert metrics["critic/rewards/defaults"] == 1.0


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_without_a_default_the_last_error_ends_the_run_and_names_the_response(kind: str) -> None:
    with pytest.raises(
        RlgraphError, match=r"raised ConnectionError: the line is dead \(3 calls failed\), for response 2 .*'eight'"
    ) as error:
        scored(getattr(Flaky(99, raises), kind), soon(times=2))
    assert isinstance(error.value.__cause__, ConnectionError)
    with pytest.raises(RlgraphError, match=r"returned None for response 2 .*; it returns one number per response"):
        scored(getattr(Flaky(99, lambda: None), kind), soon(times=2))


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_an_error_that_no_call_can_mend_ends_the_run_at_once(kind: str) -> None:
    def wrong_key() -> float:
        raise DataError("the key is wrong")

    flaky = Flaky(99, wrong_key)
    with pytest.raises(RlgraphError, match="raised DataError: the key is wrong, for response 2"):
        scored(getattr(flaky, kind), soon(times=5, default=0.0))
    assert flaky.calls["ccc"] == 1


@pytest.mark.parametrize("settings", [None, rg.options.Retry(times=0)])
def test_without_retries_all_is_as_it_was(settings: rg.options.Retry | None) -> None:
    flaky = Flaky(1, raises)
    with pytest.raises(RlgraphError, match="raised ConnectionError: the line is dead, for response 2"):
        scored(flaky.plain, settings)
    assert flaky.calls["ccc"] == 1
    metrics = scored(Flaky(0, raises).plain, None)[1]
    assert not [name for name in metrics if "retries" in name or "defaults" in name]


gate = threading.Event()


@pytest.fixture(autouse=True)
def _hanging_calls_end_with_their_test() -> Iterator[None]:
    gate.clear()
    yield
    gate.set()


@pytest.mark.parametrize("kind", ["plain", "later"])
def test_calls_that_hang_hold_no_place_of_those_that_do_not(kind: str) -> None:
    calls: Counter[str] = Counter()

    def plain(response: str) -> float:
        calls[response] += 1
        if response == "ccc":
            gate.wait(60)
        return float(len(response))

    async def later(response: str) -> float:
        calls[response] += 1
        if response == "ccc":
            await asyncio.Event().wait()
        return float(len(response))

    function = plain if kind == "plain" else later
    rewards, metrics = scored(function, soon(times=1, default=0.0), deadline_s=1.0, concurrency=1)
    assert rewards == [1.0, 2.0, 0.0, 4.0]
    assert calls == {"a": 1, "bb": 1, "ccc": 2, "dddd": 1}
    assert metrics["critic/rewards/defaults"] == 0.25


def test_a_call_that_returns_after_its_deadline_is_not_taken_for_another() -> None:
    first, again = threading.Event(), threading.Event()

    def function(place: int) -> str:
        if not first.is_set():
            first.set()
            again.wait(60)
            return "late"
        again.set()
        return "in time"

    pool = FunctionPool(function, [{"place": 0}], 1, 0.2, soon(times=1))
    assert pool.run() == ["in time"]
    assert pool.retries == 1


def test_pauses_double_up_to_the_most_with_jitter_that_the_seed_decides() -> None:
    retry = rg.options.Retry(backoff_s=1.0, most_s=8.0, jitter=0.5, seed=3)
    pauses = [[retry.delay(place, attempt) for attempt in range(6)] for place in range(50)]
    for of_call in pauses:
        for pause, base in zip(of_call, (1, 2, 4, 8, 8, 8), strict=True):
            assert base <= pause < 1.5 * base
    assert len({of_call[0] for of_call in pauses}) == 50
    assert pauses == [[retry.delay(place, attempt) for attempt in range(6)] for place in range(50)]
    assert pauses[0] != [rg.options.Retry(backoff_s=1.0, most_s=8.0, seed=4).delay(0, attempt) for attempt in range(6)]
    assert retry.delay(0, 0, at_least_s=30.0) >= 30.0


def test_a_service_that_asks_for_time_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    delay = rg.options.Retry.delay
    monkeypatch.setattr(
        rg.options.Retry, "delay", lambda self, place, attempt, at_least_s=0.0: asked.append(at_least_s) or delay(self, place, attempt)
    )

    def busy() -> float:
        raise Busy("429", after_s=12.0)

    assert scored(Flaky(2, busy).plain, soon(times=2))[0] == [1.0, 2.0, 3.0, 4.0]
    assert asked == [12.0, 12.0]


class AsyncCall:
    async def __call__(self, response: str) -> float:
        await asyncio.sleep(0)
        return float(len(response))


def test_an_object_with_an_async_call_is_an_async_function() -> None:
    assert scored(AsyncCall(), None)[0] == [1.0, 2.0, 3.0, 4.0]


def test_wrong_settings_are_named() -> None:
    with pytest.raises(GraphError, match=r"Retry\(times=-1\)"):
        rg.options.Retry(times=-1)
    with pytest.raises(GraphError, match=r"node 'reward' has retries=3; retries is a Retry"):
        scored(lambda response: 1.0, 3)  # type: ignore[arg-type]
