"""Tools: which can be declared, what a call gives, and what the calculator takes."""

import asyncio

import pytest

import rlgraph as rg
from rlgraph.errors import GraphError
from rlgraph.nodes.environments.tools import ToolCalls, calculated
from rlgraph.nodes.sandbox import ToolError

POOL = rg.Pool("sandbox", cpus=2)


async def search(query: str) -> str:
    return f"found {query}"


async def broken(query: str) -> str:
    raise OSError("no disk")


def reply(text: str, **settings: object) -> tuple[str | None, ToolCalls]:
    calls = ToolCalls(rg.Tools([rg.tools.python, rg.tools.calculator, search, broken], pool=POOL, **settings))  # type: ignore[arg-type]
    return asyncio.run(calls.reply(text)), calls


def call(name: str, **arguments: str) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_turn_without_a_call_ends_the_conversation() -> None:
    assert reply("the answer is 4")[0] is None


def test_each_call_of_a_turn_is_answered_in_order() -> None:
    text, calls = reply(f"let me see {call('search', query='x')} and {call('calculator', expression='2 ** 10 + 1')}")
    assert text == "\n<tool_response>\nfound x\n</tool_response>\n\n<tool_response>\n1025\n</tool_response>\n"
    assert (calls.calls, calls.failures) == (2, 0)


def test_python_runs_in_its_sandbox() -> None:
    text, _ = reply(call("python", code="print(sum(range(5)))"))
    assert text == "\n<tool_response>\n10\n</tool_response>\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>nonsense</tool_call>", "a call is <tool_call>"),
        ('<tool_call>{"name": "python", "arguments": "1"}</tool_call>', "are named"),
        (call("nothing"), "there is no tool 'nothing'; there are ['broken', 'calculator', 'python', 'search']"),
        (call("broken", query="x"), "error: OSError: no disk"),
        (call("search", wrong="x"), "TypeError"),
        (call("calculator", expression="__import__('os')"), "cannot calculate"),
    ],
)
def test_a_call_that_fails_is_answered_with_what_was_wrong(text: str, says: str) -> None:
    answer, calls = reply(text)
    assert answer is not None
    assert says in answer
    assert calls.failures == 1


def test_a_long_answer_is_cut() -> None:
    answer, _ = reply(call("python", code="print('y' * 3000)"), output_characters=50)
    assert answer is not None
    assert "2951 more characters" in answer or "2950 more characters" in answer


def test_the_calculator_takes_arithmetic_and_nothing_else() -> None:
    assert calculated("-(3 + 4) * 2 // 3") == -5
    for wrong in ("9 ** 9 ** 9", "a + 1", "(1).real", "1 if 2 else 3", "'x' * 9", "1 / 0", "", "(" * 500):
        with pytest.raises(ToolError):
            calculated(wrong)


def test_what_cannot_be_declared_is_refused() -> None:
    def plain(query: str) -> str:
        return query

    class NoReply:
        pass

    for wrong, says in (
        (lambda: rg.Tools([], pool=POOL), "has no tool"),
        (lambda: rg.Tools([plain], pool=POOL), "async"),  # type: ignore[list-item]
        (lambda: rg.Tools([search, search], pool=POOL), "one name"),
        (lambda: rg.Tools([search], pool=rg.Pool("gpus")), "which is of GPUs"),
        (lambda: rg.Tools(environment=NoReply, pool=POOL), "async def reply"),  # type: ignore[arg-type]
        (lambda: rg.Tools([search], pool=POOL, deadline_s=0), "deadline_s=0"),
    ):
        with pytest.raises(GraphError, match=says):
            wrong()


@pytest.mark.parametrize(("option", "value"), [("chunks", 2), ("continuous", True)])
def test_a_rollout_of_turns_is_refused_what_it_cannot_be_combined_with(option: str, value: object) -> None:
    generator = rg.Generator("model", pool=rg.Pool("rollout"))
    prompts = rg.prompts([{"prompt": "a"}] * 4, count=4)
    tools = rg.Tools([search], pool=POOL)
    with pytest.raises(GraphError, match=f"leave {option} out"):
        generator.rollout(prompts, rg.feedback("weights", depth=1), tools=tools, **{option: value})  # type: ignore[arg-type]
