"""Environments that raise, hang, flood or leak end their own conversation, are counted by name, and are always closed."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support.scripted_conversations import Rolled, wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS
from rlgraph.nodes.environments import calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


class Sound:
    """Says yes once; closes are counted."""

    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, answer: str) -> None:
        self.answer, self.turns = answer, 0
        Sound.made += 1

    async def reset(self) -> Any:
        return [rg.agents.Message("user", "Well?")]

    async def step(self, said: rg.agents.Message) -> Any:
        self.turns += 1
        return await self.wrong() if self.answer == "wrong" and self.turns == 2 else self.right()

    def right(self) -> rg.agents.Turn:
        return rg.agents.Turn([rg.agents.Message("user", "Yes.")], reward=1.0, done=self.turns == 2)

    async def wrong(self) -> Any:
        return self.right()

    async def close(self) -> None:
        Sound.closed += 1


async def raises(self: Sound) -> Any:
    raise ValueError("no disk")


async def exits(self: Sound) -> Any:
    sys.exit(3)


async def exits_in_a_task(self: Sound) -> Any:
    return (await asyncio.gather(exits(self), asyncio.sleep(0)))[0]


class Panic(BaseException):
    """As what a tokenizer written in Rust raises: no `Exception`."""


async def panics(self: Sound) -> Any:
    raise Panic("no memory")


async def is_cancelled(self: Sound) -> Any:
    waiting = asyncio.ensure_future(asyncio.Event().wait())
    waiting.cancel()
    await waiting


async def hangs(self: Sound) -> Any:
    await asyncio.Event().wait()


async def holds_on(self: Sound) -> Any:
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def says_text(self: Sound) -> Any:
    return "Yes."


async def says_nothing(self: Sound) -> Any:
    return rg.agents.Turn()


async def says_much(self: Sound) -> Any:
    return rg.agents.Turn([rg.agents.Message("user", "Yes.")] * 100)


async def gives_nan(self: Sound) -> Any:
    return rg.agents.Turn([rg.agents.Message("user", "Yes.")], reward=float("nan"))


async def of_no_role(self: Sound) -> Any:
    return rg.agents.Turn([rg.agents.Message("", "Yes.")])


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises, "errors"),
    "exits": (exits, "errors"),
    "exits in a task": (exits_in_a_task, "errors"),
    "panics": (panics, "errors"),
    "awaits what it has cancelled": (is_cancelled, "errors"),
    "hangs": (hangs, "timeouts"),
    "ignores its cancellation": (holds_on, "timeouts"),
    "returns text": (says_text, "errors"),
    "says nothing and goes on": (says_nothing, "errors"),
    "floods with messages": (says_much, "errors"),
    "gives NaN": (gives_nan, "errors"),
    "has no role": (of_no_role, "errors"),
}


def rolled(folder: Path, environment: type, **options: Any) -> Rolled:
    Sound.made = Sound.closed = 0
    prompts = [{"prompt": str(i), "answer": "wrong" if i == 1 else "right"} for i in range(3)]
    return Rolled(folder, lambda text: "hm", prompts, agent=rg.Agent(environment, **{"deadline_s": 30.0, **options}))


@pytest.mark.parametrize("name", WRONG)
def test_an_environment_that_fails_ends_its_own_conversation_and_is_counted(folder: Path, name: str) -> None:
    wrong, counted = WRONG[name]
    made = rolled(folder, type("Wrong", (Sound,), {"wrong": wrong}), **({"deadline_s": 1.0} if counted == "timeouts" else {}))
    assert made.metrics[f"agent/{counted}"] == 1
    assert sum(made.metrics[f"agent/{kind}"] for kind in ("errors", "timeouts", "blocked", "template_errors")) == 1
    rewards, reasons = made.columns["rewards"].tolist(), made.columns["finish_reasons"].tolist()
    assert sorted(rewards) == [1, 2, 2], "the first turn keeps its reward"
    assert [FINISH_REASONS[reason] for reason in reasons] == ["abort" if reward == 1 else "stop" for reward in rewards]
    wait_until(lambda: Sound.closed == Sound.made == 3)


class NeverMade(Sound):
    def __init__(self, answer: str) -> None:
        super().__init__(answer)
        if answer == "wrong":
            Sound.made -= 1
            raise OSError("no display")


class NeverBegins(Sound):
    async def reset(self) -> Any:
        return (await super().reset()) if self.answer == "right" else ["Well?"]


class BeginsAsAssistant(Sound):
    async def reset(self) -> Any:
        return (await super().reset()) if self.answer == "right" else [rg.agents.Message("assistant", "I")]


@pytest.mark.parametrize("environment", [NeverMade, NeverBegins, BeginsAsAssistant])
def test_a_conversation_that_never_begins_is_a_row_without_tokens(folder: Path, environment: type) -> None:
    made = rolled(folder, environment)
    assert made.metrics["agent/errors"] == 1
    assert sorted(made.columns["response_mask"].any(-1).tolist()) == [False, True, True]
    assert made.columns["prompt_mask"].any(-1).all(), "a prompt has a token"
    wait_until(lambda: Sound.closed == Sound.made)


def test_a_batch_of_which_no_conversation_begins_is_still_a_batch(folder: Path) -> None:
    class Never(Sound):
        async def reset(self) -> Any:
            raise OSError("no network")

    made = rolled(folder, Never)
    assert made.metrics["agent/errors"] == 3
    assert made.columns["responses"].shape == (3, 1)
    assert not made.columns["response_mask"].any()
    assert rg.RLOO()(made.columns)["advantages"].tolist() == [[0.0]] * 3


def test_a_call_that_blocks_the_event_loop_costs_the_calls_in_it_and_not_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "BLOCKED_S", 0.3)
    monkeypatch.setattr(calls, "BEAT_S", 0.05)
    free = threading.Event()

    class Blocks(Sound):
        async def wrong(self) -> Any:
            free.wait()  # of a thread, in an async function

    try:
        made = rolled(folder, Blocks, deadline_s=30)
    finally:
        free.set()
    assert made.metrics["agent/blocked"] >= 1
    assert made.columns["finish_reasons"].tolist().count(FINISH_REASONS.index("abort")) == made.metrics["agent/blocked"]
    monkeypatch.undo()  # a busy machine may hold up a sound loop as long
    again = rolled(folder, Sound)
    assert again.metrics["agent/blocked"] == 0


def test_a_long_answer_is_cut_and_counted(folder: Path) -> None:
    class Floods(Sound):
        def right(self) -> rg.agents.Turn:
            return rg.agents.Turn([rg.agents.Message("user", "y" * 10_000_000)], done=self.turns == 2)

    made = rolled(folder, Floods, output_characters=20)
    assert made.metrics["agent/cut_messages"] == 3
    assert "y" * 20 + "… (9999980 more characters)" in made.read(0)[0]


def test_a_conversation_ends_at_its_seconds(folder: Path) -> None:
    class Slow(Sound):
        async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
            await asyncio.sleep(0.05)
            return rg.agents.Turn([rg.agents.Message("user", "Go on.")])

    made = Rolled(
        folder, lambda text: "hm", [{"prompt": "", "answer": ""}], max_tokens=2500, max_turns=60, agent=rg.Agent(Slow, conversation_s=0.3)
    )
    assert made.metrics["agent/limit_seconds"] == 1
    assert made.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("abort")]


def test_a_prompt_that_does_not_fit_ends_its_conversation(folder: Path) -> None:
    class Long(Sound):
        async def reset(self) -> Any:
            return [rg.agents.Message("user", "x" * (3000 if self.answer == "wrong" else 30))]

    made = rolled(folder, Long)
    assert made.metrics["agent/overlong_prompts"] == 1
    assert made.columns["prompts"].shape[1] <= 3000 - 600


def test_a_close_that_fails_is_counted_and_a_run_that_fails_closes_all(folder: Path) -> None:
    class Unclosed(Sound):
        async def close(self) -> None:
            await super().close()
            raise OSError("gone")

    class Stops(Sound):
        async def step(self, said: rg.agents.Message) -> Any:
            await asyncio.sleep(5)

    def script(text: str) -> str:
        if Sound.made == 3:
            raise RuntimeError("the engine has died")
        return "hm"

    rolled(folder, Unclosed)
    wait_until(lambda: Sound.closed == 3)
    Sound.made = Sound.closed = 0
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="has died"):
        Rolled(folder, script, [{"prompt": "", "answer": ""}] * 3, agent=Stops)
    assert Sound.closed == Sound.made == 3
    assert time.monotonic() - begun < 30


def test_one_environment_is_shared_by_a_group_where_that_is_asked_for(folder: Path) -> None:
    members: list[int] = []

    class Board:
        made: ClassVar[int] = 0
        closed: ClassVar[int] = 0

        def __init__(self, answer: str) -> None:
            Board.made += 1

        async def reset(self, member: int) -> Any:
            return [rg.agents.Message("user", f"You are player {member}.")]

        async def step(self, said: rg.agents.Message, member: int) -> rg.agents.Turn:
            members.append(member)
            return rg.agents.Turn(done=True, reward=float(member))

        async def close(self) -> None:
            assert len(members) >= 3, "the last member has ended"
            Board.closed += 1

    prompts = [{"prompt": "", "answer": ""}] * 2
    made = Rolled(folder, lambda text: "hm", prompts, agent=rg.Agent(Board, shared=True), group_size=3)
    assert made.columns["rewards"].tolist() == [0, 1, 2] * 2
    assert Board.made == 2
    wait_until(lambda: Board.closed == 2)


class Paid(Sound):
    """Costs 0.4 a turn, and never ends."""

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        return rg.agents.Turn([rg.agents.Message("user", "More.")], cost=0.4)


def test_a_conversation_ends_where_its_cost_has_reached_the_limit(folder: Path) -> None:
    rolled = Rolled(folder, lambda text: "Yes.", [{"prompt": "", "answer": "x"}] * 2, agent=rg.Agent(Paid, most_cost=1.0))
    assert [len(rolled.written(row)) for row in (0, 1)] == [3, 3]
    assert rolled.metrics["agent/limit_cost"] == 2
    assert rolled.metrics["agent/cost"] == pytest.approx(2.4)
    assert {FINISH_REASONS[int(reason)] for reason in rolled.columns["finish_reasons"]} == {"turns"}


@pytest.mark.parametrize("warm", [0, 2])
def test_warm_environments_are_reset_before_their_conversation_has_a_place(folder: Path, warm: int) -> None:
    open_now: list[int] = []
    seen: list[int] = []

    class Slow(Sound):
        async def reset(self) -> Any:
            open_now.append(1)
            return await super().reset()

        async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
            await asyncio.sleep(0.05)
            seen.append(len(open_now))
            return rg.agents.Turn(done=True, reward=1.0)

        async def close(self) -> None:
            open_now.pop()
            await super().close()

    before = Sound.closed, Sound.made
    agent = rg.Agent(Slow, warm=warm)
    rolled = Rolled(folder, lambda text: "Yes.", [{"prompt": "", "answer": str(n)} for n in range(7)], agent=agent, concurrency=2)
    assert max(seen) == 2 + warm
    assert rolled.engine.held <= 2
    assert rolled.metrics["critic/rewards/mean"] == 1
    wait_until(lambda: (Sound.closed - before[0], Sound.made - before[1]) == (7, 7))


def test_warm_environments_are_closed_where_the_rollout_fails(folder: Path) -> None:
    before = Sound.closed, Sound.made

    def fails(text: str) -> str:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        Rolled(folder, fails, [{"prompt": "", "answer": "x"}] * 6, agent=rg.Agent(Sound, warm=3), concurrency=1)
    assert Sound.made - before[1] >= 1
    wait_until(lambda: Sound.closed - before[0] == Sound.made - before[1])


def test_warm_without_concurrency_has_no_effect_and_is_refused(folder: Path) -> None:
    with pytest.raises(rg.errors.GraphError, match="warm=2"):
        Rolled(folder, lambda text: "Yes.", [{"prompt": "", "answer": "x"}], agent=rg.Agent(Sound, warm=2))
