"""Tools: which can be declared, what a call gives, and what the calculator takes."""

import asyncio
import json
from dataclasses import replace
from functools import partial

import pytest

import rlgraph as rg
from rlgraph.errors import GraphError
from rlgraph.nodes.environments.calls import Call, EnvironmentCalls
from rlgraph.nodes.environments.messages import calls_of, hermes
from rlgraph.nodes.environments.tools import ToolCalls, calculate
from rlgraph.nodes.sandbox import ToolError

POOL = rg.Pool("sandbox", cpus=2)


async def search(query: str) -> str:
    return f"found {query}"


async def broken(query: str) -> str:
    raise OSError("no disk")


async def leaves(query: str) -> str:
    raise SystemExit(query)


def reply(text: str, **settings: object) -> tuple[rg.agents.Turn, list[str]]:
    given = rg.Tools([rg.tools.python, rg.tools.calculator, search, broken, leaves], pool=POOL, **settings)  # type: ignore[arg-type]
    turn = asyncio.run(ToolCalls(given).step(rg.agents.Message("assistant", text, tool_calls=calls_of(text, hermes, {}))))
    return turn, [message.content for message in turn.messages]


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_turn_without_a_call_ends_the_conversation() -> None:
    assert reply("the answer is 4")[0] == rg.agents.Turn(done=True)


def test_each_call_of_a_turn_is_answered_in_order() -> None:
    turn, texts = reply(f"let me see {call('search', query='x')} and {call('calculator', expression='2 ** 10 + 1')}")
    assert texts == ["found x", "1025"]
    assert [(m.role, m.name, m.tool_call_id) for m in turn.messages] == [
        ("tool", "search", "call00000"),
        ("tool", "calculator", "call00001"),
    ]
    assert turn.info == {"calls": 2, "failures": 0}


def test_calls_beyond_the_most_of_a_turn_are_answered_too() -> None:
    turn, texts = reply(call("search", query="x") * 10)
    assert texts == ["found x"] * 8 + ["error: a turn calls at most 8 tools"] * 2
    assert turn.info["calls"] == 8


@pytest.mark.sandbox
def test_python_runs_in_its_sandbox() -> None:
    assert reply(call("python", code="print(sum(range(5)))"))[1] == ["10"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>nonsense</tool_call>", "a call is <tool_call>"),
        ('<tool_call>{"name": "python", "arguments": "1"}</tool_call>', "a call is <tool_call>"),
        ('<tool_call>{"name": "python", "arg', "the call is not closed; a call is"),
        (call("nothing"), "there is no tool 'nothing'; the tools are ['broken', 'calculator', 'leaves', 'python', 'search']"),
        (call("broken", query="x"), "error: OSError: no disk"),
        (call("search", wrong="x"), "TypeError"),
        ('<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', "nan is not a number of JSON"),
        (call("calculator", expression="__import__('os')"), "cannot calculate"),
    ],
)
def test_a_call_that_fails_is_answered_with_what_was_wrong(text: str, says: str) -> None:
    turn, [answer] = reply(text)
    assert says in answer
    assert turn.info == {"calls": 1, "failures": 1}


def test_a_tool_that_exits_has_failed_and_its_calls_go_on() -> None:
    calls, ended = EnvironmentCalls(), []
    tools = ToolCalls(rg.Tools([leaves, search], pool=POOL))
    for text in (call("leaves", query="bye"), call("search", query="x")):
        said = rg.agents.Message("assistant", text, tool_calls=calls_of(text, hermes, {}))
        calls.begin(Call(None, "step"), partial(tools.step, said), 10.0)
        while len(calls):
            ended += calls.take_finished_calls(1.0)
    assert [one.value.messages[0].content for one in ended] == ["error: SystemExit: bye", "found x"]


def test_lone_surrogates_of_calls_and_messages_are_replaced() -> None:
    text = json.dumps({"name": "search", "arguments": {"query": "no \ud800", "more": ["\ud800"]}})
    [said] = calls_of(f"<tool_call>{text}</tool_call>", hermes, {})
    assert said.arguments == {"query": "no \ufffd", "more": ["\ufffd"]}
    assert rg.agents.Message("tool", "a\ud83d", name="\ud800") == rg.agents.Message("tool", "a\ufffd", name="\ufffd")


@pytest.mark.sandbox
def test_a_long_answer_is_cut() -> None:
    _, [answer] = reply(call("python", code="print('y' * 3000)"), output_characters=50)
    assert "2951 more characters" in answer or "2950 more characters" in answer


def test_the_calculator_takes_arithmetic_and_nothing_else() -> None:
    assert calculate("-(3 + 4) * 2 // 3") == -5
    for wrong in ("9 ** 9 ** 9", "a + 1", "(1).real", "1 if 2 else 3", "'x' * 9", "1 / 0", "", "(" * 500):
        with pytest.raises(ToolError):
            calculate(wrong)


def test_what_cannot_be_declared_is_refused() -> None:
    def plain(query: str) -> str:
        return query

    for wrong, says in (
        (lambda: rg.Tools([], pool=POOL), "has no tool"),
        (lambda: rg.Tools([plain], pool=POOL), "async"),  # type: ignore[list-item]
        (lambda: rg.Tools([search, search], pool=POOL), "one name"),
        (lambda: rg.Tools([search], pool=rg.Pool("gpus")), "a pool of GPUs"),
        (lambda: rg.Tools([search], pool=POOL, calls="hermès"), "'pythonic', 'qwen3_coder'"),
        (lambda: rg.Tools([search], pool=POOL, deadline_s=0), "deadline_s=0"),
    ):
        with pytest.raises(GraphError, match=says):
            wrong()


class NoStep:
    async def reset(self) -> None: ...

    async def close(self) -> None: ...


class Anything(NoStep):
    def __init__(self, **columns: object) -> None: ...

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        return rg.agents.Turn(done=True)


class Needs(Anything):
    def __init__(self, solution: str) -> None: ...


def test_an_agent_that_cannot_be_declared_is_refused() -> None:
    generator, prompts = rg.Generator("model", pool=rg.Pool("rollout")), rg.prompts([{"prompt": "a"}], count=1)
    for wrong, says in (
        (lambda: rg.Agent(NoStep), r"`async def reset\(self\)`, `step\(self, said\)`"),  # type: ignore[arg-type]
        (lambda: rg.Agent(Anything), "its parameters must name fields"),
        (lambda: rg.Agent(Needs, calls="llama"), "calls is one of"),
        (lambda: rg.Agent(Needs, pool=rg.Pool("gpus")), "run on host cores"),
        (lambda: generator.rollout(prompts, agent=Needs), "reads column 'solutions'"),
        (lambda: generator.rollout(prompts, agent=Needs, tools=rg.Tools([search], pool=POOL)), "choose one"),
        (lambda: generator.rollout(prompts, concurrency=4), "concurrency=4 but no tools and no agent"),
        (lambda: generator.rollout(prompts, agent=7), "agent=7"),  # type: ignore[arg-type]
    ):
        with pytest.raises(GraphError, match=says):
            wrong()


def test_as_many_calls_of_python_run_at_once_as_the_pool_has_cores_and_other_tools_wait_for_nobody() -> None:
    running, most = {"python": 0, "look": 0}, {"python": 0, "look": 0}

    async def counted(name: str) -> None:
        running[name] += 1
        most[name] = max(most[name], running[name])
        await asyncio.sleep(0.02)
        running[name] -= 1

    async def run(code: str, **limits: object) -> None:
        await counted("python")

    async def look() -> None:
        await counted("look")

    given = rg.Tools([replace(rg.tools.python, function=run), look], pool=rg.Pool("two cores", cpus=2))
    calls = [rg.agents.ToolCall("python", {"code": "1"}), rg.agents.ToolCall("look", {})] * 6

    async def all_at_once() -> list[rg.agents.Turn]:
        return await asyncio.gather(*(ToolCalls(given).step(rg.agents.Message("assistant", "", tool_calls=(call,))) for call in calls))

    turns = asyncio.run(all_at_once())
    assert [turn.info["failures"] for turn in turns] == [0] * 12
    assert most == {"python": 2, "look": 6}
