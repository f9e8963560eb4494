"""Conversations with tools and environments, on an engine that writes what a script says."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.scripted_conversations import Rolled, wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS
from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import ToolError

CALL = '<tool_call>\n{"name": "double", "arguments": {"number": %d}}\n</tool_call>'
POOL = rg.Pool("sandbox", cpus=2)
NEXT = "<|im_end|>\n<|im_start|>assistant\n"


async def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


def ask_once(text: str) -> str:
    return "it is 14" if "<tool_response>" in text else CALL % 7


def tools(*given: Any, **options: Any) -> rg.Tools:
    return rg.Tools([double, *given], pool=POOL, **options)


def test_a_call_is_answered_as_the_template_says_and_the_response_goes_on(folder: Path) -> None:
    rolled = Rolled(folder, ask_once, [{"prompt": "2 x 7?"}], tools=tools())
    assert rolled.turns() == [
        (True, CALL % 7 + "<|im_end|>"),
        (False, f"\n<|im_start|>user\n<tool_response>\n14\n</tool_response>{NEXT}"),
        (True, "it is 14<|im_end|>"),
    ]
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("stop")]
    assert '"name": "double", "description": "Double a number."' in rolled.tokenizer.decode(rolled.engine.asked[0].prompt)
    found = {name: rolled.metrics[f"tools/{name}"] for name in ("turns_mean", "calls", "failures", "malformed_calls", "limit_turns")}
    assert found == {"turns_mean": 2, "calls": 1, "failures": 0, "malformed_calls": 0, "limit_turns": 0}


def test_a_turn_that_a_stop_string_ended_is_closed_by_the_template_and_answered(folder: Path) -> None:
    sampling = rg.Sampling(max_tokens=600, stop=("</tool_call>",))
    rolled = Rolled(folder, ask_once, [{"prompt": "2 x 7?"}], tools=tools(), sampling=sampling, close="")
    assert [request.sampling.stop for request in rolled.engine.asked] == [("</tool_call>",)] * 2
    assert rolled.turns() == [
        (True, CALL % 7),
        (False, f"<|im_end|>\n<|im_start|>user\n<tool_response>\n14\n</tool_response>{NEXT}"),
        (True, "it is 14"),
    ]
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("stop")]


def test_a_worker_whose_host_cannot_run_code_says_so_before_its_first_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the model would read that its code could not be run, in each conversation, and learn from that."""

    async def refuses(*_: Any) -> str:
        raise ToolError("the code could not be run: this machine lacks the layer 'seccomp' (refused)")

    monkeypatch.setattr("rlgraph.nodes.sandbox.run", refuses)
    with pytest.raises(GraphError, match=r"the tool 'python' cannot be run here: .*lacks the layer 'seccomp'"):
        Rolled(folder, ask_once, [{"prompt": "2 x 7?"}], tools=tools(rg.tools.python))


def test_what_the_model_reads_is_what_the_template_renders_of_the_whole_conversation_and_is_not_trained_on(folder: Path) -> None:
    rolled = Rolled(folder, ask_once, [{"prompt": "2 x 7?"}], tools=tools())
    call = {"type": "function", "function": {"name": "double", "arguments": {"number": 7}}}
    messages = [
        {"role": "user", "content": "2 x 7?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "14"},
    ]
    text = rolled.tokenizer.apply_chat_template(messages, tools=tools().schemas, add_generation_prompt=True, tokenize=False)
    assert rolled.tokenizer.decode(rolled.engine.asked[1].prompt) == text
    assert list(rolled.engine.asked[1].prompt) == rolled.tokenizer(text, add_special_tokens=False)["input_ids"]
    first, second = rolled.engine.asked
    row = rolled.columns["responses"][0].tolist()
    told = len(second.prompt) - len(first.prompt)
    assert list(second.prompt) == [*first.prompt, *row[:told]], "no token is encoded again"
    assert second.sampling.max_tokens == first.sampling.max_tokens - told
    assert first.seed != second.seed
    mask, log_probs = rolled.columns["response_mask"][0], rolled.columns["rollout_log_probs"][0]
    assert (log_probs[mask] == -0.5).all()
    assert (log_probs[~mask] == 0).all()
    assert 0 < mask.sum() < len(mask)


def test_the_engine_knows_the_turns_of_a_conversation_and_when_it_has_ended(folder: Path) -> None:
    engine = Rolled(folder, ask_once, [{"prompt": "2 x 7?"}, {"prompt": "3 x 7?"}], tools=tools()).engine
    turns = Counter(request.conversation for request in engine.asked)
    assert list(turns.values()) == [2, 2]
    assert sorted(engine.ended) == sorted(turns)


def test_two_calls_of_a_turn_are_answered_in_one_message_as_the_template_joins_them(folder: Path) -> None:
    script = lambda text: "done" if "<tool_response>" in text else CALL % 1 + "\n" + CALL % 2  # noqa: E731
    [read] = Rolled(folder, script, [{"prompt": "go"}], tools=tools()).read()
    both = "<tool_response>\n2\n</tool_response>\n<tool_response>\n4\n</tool_response>"
    assert read == f"\n<|im_start|>user\n{both}{NEXT}"


def test_turns_end_at_their_limit(folder: Path) -> None:
    rolled = Rolled(folder, lambda text: CALL % 1, [{"prompt": "go"}], max_tokens=900, tools=tools(), max_turns=3)
    assert rolled.metrics["tools/turns/max"] == len(rolled.engine.asked) == 3
    assert rolled.metrics["tools/limit_turns"] == 1
    assert rolled.metrics["tools/calls"] == 2, "the calls of the last turn are not made"
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("turns")]


def test_an_answer_without_a_call_in_the_last_turn_is_cut_off_by_nothing(folder: Path) -> None:
    rolled = Rolled(folder, ask_once, [{"prompt": "2 x 7?"}], tools=tools(), max_turns=2)
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("stop")]


@pytest.mark.parametrize("max_tokens", [40, 90, 125])
def test_a_response_ends_where_its_tokens_are_used_up(folder: Path, max_tokens: int) -> None:
    rolled = Rolled(folder, lambda text: CALL % 1, [{"prompt": "go"}], max_tokens=max_tokens, tools=tools())
    assert rolled.columns["responses"].shape[1] == max_tokens
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("length")]
    assert rolled.metrics["tools/limit_tokens"] == 1


def test_a_tool_that_hangs_is_answered_for_and_the_conversation_goes_on(folder: Path) -> None:
    async def hang(number: int) -> int:
        while True:  # not even its cancellation ends it
            try:
                await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                continue

    script = lambda text: "gave up" if "error" in text else (CALL % 1).replace("double", "hang")  # noqa: E731
    rolled = Rolled(folder, script, [{"prompt": "go"}], tools=tools(hang, deadline_s=0.05))
    assert "error: no answer within 0.05 s" in rolled.read()[0]
    assert rolled.written()[1] == "gave up<|im_end|>"
    assert rolled.metrics["tools/failures"] == 1


def test_a_turn_that_ends_at_another_token_is_closed_as_the_template_does(folder: Path) -> None:
    rolled = Rolled(folder, lambda text: ask_once(text) + "\n", [{"prompt": "2 x 7?"}], close="", tools=tools())
    assert rolled.read()[0].startswith("<|im_end|>\n<|im_start|>user"), "the model wrote a line end that the user stops at"


class Guess:
    """Asks for a number, and gives less for each turn that it takes."""

    open: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init__(self, answer: str) -> None:
        self.answer, self.turns = answer, 0
        Guess.open += 1

    async def reset(self) -> list[rg.agents.Message]:
        return [rg.agents.Message("user", "Guess my number between 1 and 9.")]

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        self.turns += 1
        right = said.content.strip() == self.answer
        reward = 1.0 / self.turns if right else -0.25
        return rg.agents.Turn([rg.agents.Message("user", "Right." if right else "No.")], reward=reward, done=right, info={"guesses": 1})

    async def close(self) -> None:
        Guess.closed += 1


def counting(text: str) -> str:
    return str(1 + text.count("No."))


def test_an_environment_begins_the_conversation_answers_its_turns_and_rewards_them(folder: Path) -> None:
    Guess.open = Guess.closed = 0
    rolled = Rolled(folder, counting, [{"prompt": "unread", "answer": "3"}], agent=Guess, group_size=2)
    assert rolled.written() == ["1<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    assert rolled.read() == [f"\n<|im_start|>user\nNo.{NEXT}"] * 2
    prompt = rolled.tokenizer.decode(rolled.engine.asked[0].prompt)
    assert "Guess my number" in prompt
    assert "unread" not in prompt
    assert rolled.columns["rewards"].tolist() == pytest.approx([1 / 3 - 0.5] * 2)
    given = rolled.columns["token_rewards"][0]
    assert given[given != 0].tolist() == pytest.approx([-0.25, -0.25, 1 / 3])
    assert rolled.columns["response_mask"][0][given != 0].all(), "a reward stands at a token that the policy wrote"
    assert rolled.metrics["agent/info/guesses"] == 3
    assert rolled.metrics["critic/rewards/mean"] == pytest.approx(1 / 3 - 0.5)
    assert Guess.open == 2
    wait_until(lambda: Guess.closed == 2)


def test_a_system_message_of_the_prompt_stays_in_front_unless_the_environment_gives_one(folder: Path) -> None:
    class Told(Guess):
        async def reset(self) -> list[rg.agents.Message]:
            return [rg.agents.Message("system", "Guess."), *await super().reset()]

    for environment, system in ((Guess, "Say a digit."), (Told, "Guess.")):
        rolled = Rolled(
            folder, counting, [{"prompt": "unread", "answer": "1"}], agent=environment, chat=rg.options.Chat(system="Say a digit.")
        )
        prompt = rolled.tokenizer.decode(rolled.engine.asked[0].prompt)
        assert prompt.startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nGuess my number"), prompt


def test_the_distribution_of_turns_is_of_numbers_that_occurred(folder: Path) -> None:
    rolled = Rolled(folder, counting, [{"prompt": "", "answer": str(turns)} for turns in (1, 1, 1, 2, 5)], agent=Guess)
    found = [rolled.metrics[f"agent/turns/{name}"] for name in ("p50", "p90", "p99", "max")]
    assert (found, rolled.metrics["agent/turns_mean"]) == ([1, 5, 5, 5], 2)


def test_credit_goes_to_the_turn_that_earned_it(folder: Path) -> None:
    rolled = Rolled(folder, counting, [{"prompt": "", "answer": "2"}], agent=Guess, group_size=2)
    returns = rg.estimators.ReinforcePlusPlus(gamma=1.0)(rolled.columns)["returns"][0]
    mask = rolled.columns["response_mask"][0]
    assert returns[mask].tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5]), "-0.25 + 0.5 from the first turn on, 0.5 from the second"
    rows = rg.RLOO()(rolled.columns)["advantages"]
    assert torch.equal(rows, torch.zeros_like(rows)), "equal rewards in a group"


def test_the_last_turn_is_answered_for_its_reward(folder: Path) -> None:
    rolled = Rolled(folder, counting, [{"prompt": "", "answer": "9"}], agent=Guess, max_turns=2)
    assert rolled.columns["rewards"].tolist() == [-0.5]
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index("turns")]
    assert rolled.metrics["agent/limit_turns"] == 1


class Judged(Guess):
    """Rewards the outcome alone; `truncated` says what a limit left."""

    cut: ClassVar[list[str]] = []

    async def truncated(self, said: rg.agents.Message) -> rg.agents.Turn:
        Judged.cut.append(said.content)
        return rg.agents.Turn(reward=0.75)


@pytest.mark.parametrize(
    ("limits", "finish", "cut"),
    [
        ({"max_turns": 2}, "turns", "2"),
        ({"max_tokens": 12}, "length", "1 2 3 4 5 6 7"),  # in a turn of the model
        ({"max_tokens": 5}, "length", "1"),  # in what the model reads
        ({"max_turns": 2, "agent": rg.Agent(Judged, turn_tokens=3)}, "turns", "1 2 3"),
    ],
)
def test_an_environment_scores_a_conversation_that_a_limit_cuts_off(folder: Path, limits: dict[str, Any], finish: str, cut: str) -> None:
    def script(text: str) -> str:
        return "1 2 3 4 5 6 7 8 9 1 2 3" if "1 2" in cut else counting(text)

    Judged.cut.clear()
    rolled = Rolled(folder, script, [{"prompt": "", "answer": "9"}], **{"agent": Judged, **limits})
    assert rolled.columns["finish_reasons"].tolist() == [FINISH_REASONS.index(finish)]
    assert len(Judged.cut) == 1
    assert Judged.cut[0].startswith(cut[:3]), Judged.cut
    given = rolled.columns["token_rewards"][0]
    assert rolled.columns["rewards"].item() == pytest.approx(0.75 - 0.25 * rolled.metrics.get("agent/info/guesses", 0.0))
    assert rolled.columns["response_mask"][0][given != 0].all(), "a reward stands at a token that the policy wrote"
    assert rolled.metrics["agent/cut_turns"] == (2 if "agent" in limits else 0)


def test_a_launch_says_that_an_environment_does_not_score_what_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    for environment in (Guess, Judged):
        rg.Agent(environment).warn_without_outcome("rollout")
    assert [text.partition(" has ")[0] for text in caplog.messages] == ["node 'rollout': Guess"]


class Late(Guess):
    """Answers after a random time."""

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        await asyncio.sleep(random.random() * 0.02)
        return await super().step(said)


@pytest.mark.parametrize("options", [{}, {"concurrency": 3}, {"chunks": 2}])
def test_rows_and_their_bits_do_not_depend_on_who_is_answered_first(folder: Path, options: dict[str, Any]) -> None:
    prompts = [{"prompt": "", "answer": str(1 + i % 5)} for i in range(8)]
    first = Rolled(folder, counting, prompts, agent=Guess, group_size=2)
    for _ in range(3):
        again = Rolled(folder, counting, prompts, agent=Late, group_size=2, **options)
        for name, column in first.columns.items():
            assert torch.equal(again.columns[name], column), name


def test_concurrency_bounds_the_open_conversations(folder: Path) -> None:
    class Counted(Late):
        now = most = 0

        def __init__(self, answer: str) -> None:
            super().__init__(answer)
            Counted.now += 1
            Counted.most = max(Counted.most, Counted.now)

        async def close(self) -> None:
            await asyncio.sleep(0)
            Counted.now -= 1

    rolled = Rolled(folder, counting, [{"prompt": "", "answer": "2"}] * 12, agent=Counted, concurrency=3)
    assert Counted.most == 3
    assert len(rolled.columns["rewards"]) == 12


def test_hundreds_of_environments_wait_at_once(folder: Path) -> None:
    gate = Gate(320)

    class Waits(Guess):
        async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
            await gate.wait()
            return rg.agents.Turn(done=True, reward=1.0)

    rolled = Rolled(folder, lambda text: "1", [{"prompt": "", "answer": "1"}] * 40, agent=Waits, group_size=8)
    assert rolled.columns["rewards"].sum() == 320


class Gate:
    """Opens once so many wait at it."""

    def __init__(self, count: int) -> None:
        self.left, self.open = count, asyncio.Event()

    async def wait(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.open.set()
        await self.open.wait()
