"""Adapters against the real packages: Gymnasium, Reasoning Gym, a server of MCP, and environments in another process."""

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest
from PIL import Image
from support.environment_turns import run_turns, take_turns
from support.forked_workers import alive
from support.paths import PROGRAMS
from support.scripted_conversations import Rolled, wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.data.images import data_url
from rlgraph.environments.mcp import close_servers
from rlgraph.nodes.environments.tools import ToolCalls

MOVES = ["left", "down", "right", "up"]


def lake(**settings: object) -> object:
    pytest.importorskip("gymnasium")
    return rg.environments.gymnasium(
        "FrozenLake-v1", instruction="Reach G.", actions=MOVES, desc=["SF", "FG"], is_slippery=False, render_mode="ansi", **settings
    )


def test_a_game_of_gymnasium_is_played_in_words() -> None:
    first, turn, last = run_turns(lake(), {"seed": 3}, ["I think left is bad. Go right!", "DOWN"])
    assert first[0].content.startswith("Reach G.\n\n")
    assert "FG" in first[0].content
    assert "(Right)" in turn.messages[0].content  # FrozenLake draws the last move
    assert (turn.reward, turn.done) == (0.0, False)
    assert (last.reward, last.done) == (1.0, True)


def test_a_turn_without_an_action_is_answered_and_does_not_move() -> None:
    _, turn, last = run_turns(lake(), {}, ["leftwards", "left"])
    assert turn.messages[0].content == "Say one of: left, down, right, up."
    assert turn.info == {"invalid": 1.0}
    assert not last.done


def test_actions_without_words_are_numbers_of_the_space() -> None:
    pytest.importorskip("gymnasium")
    game = rg.environments.gymnasium("CartPole-v1", instruction="Balance: 0 or 1.")
    first, turn, wrong = run_turns(game, {"seed": 1}, ["I say 1", "I say 7"])
    again = run_turns(game, {"seed": 1}, [])
    assert first[0].content == again[0][0].content  # the prompt's seed is the game's
    assert turn.reward == 1.0
    assert "is not an action" in wrong.messages[0].content


def test_a_task_of_reasoning_gym_may_be_tried_again() -> None:
    pytest.importorskip("reasoning_gym")
    task = rg.scorers.reasoning_gym("chain_sum", size=3, seed=1, max_terms=2)
    right = str(eval(task[0]["prompt"].split("=")[0].split(":")[-1]))
    make = rg.environments.reasoning_gym(task, tries=3)
    assert [turn.reward for turn in run_turns(make, {"item": 0}, ["none", right])[1:]] == [0.0, 0.5] or "none" in right
    wrong = run_turns(make, {"item": 0}, ["none"] * 5)[1:]
    assert [turn.done for turn in wrong] == [False, False, True]


def server(*options: str, own: bool = False) -> list[rg.tools.Tool]:
    pytest.importorskip("mcp")
    return rg.environments.mcp(sys.executable, str(PROGRAMS / "mcp_server.py"), *options, own=own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


def test_tools_of_a_server_of_mcp_are_described_and_called() -> None:
    tools = {tool.name: tool for tool in server()}
    assert sorted(tools) == ["add", "die", "fail", "note", "process", "show"]
    described = tools["add"].schema["function"]
    assert described["description"] == "Add two whole numbers."
    assert described["parameters"]["properties"]["a"]["type"] == "integer"
    made = ToolCalls(rg.Tools(list(tools.values())))

    async def conversation() -> tuple[rg.agents.Turn, list[int], rg.agents.Turn]:
        calls = tuple(
            rg.agents.ToolCall(*call) for call in (("add", {"a": 2, "b": 3}), ("fail", {"why": "no reason"}), ("add", {"a": "x"}))
        )
        first = await made.step(rg.agents.Message("assistant", "", tool_calls=calls))
        pids = [int(await tools["process"].function()) for _ in range(2)]
        dead = await made.step(
            rg.agents.Message("assistant", "", tool_calls=(rg.agents.ToolCall("die"), rg.agents.ToolCall("add", {"a": 1, "b": 1})))
        )
        pids.append(int(await tools["process"].function()))
        await close_servers()
        return first, pids, dead

    first, pids, dead = asyncio.run(conversation())
    texts = [message.content for message in first.messages]
    assert texts[0] == "5"
    assert texts[1] == "error: Error executing tool fail"  # the SDK keeps to itself what was raised
    assert "b" in texts[2]  # what is missing
    assert first.info == {"calls": 3, "failures": 2}
    assert pids[0] == pids[1] != pids[2]  # one process for all calls, and another one after it has died
    assert dead.messages[0].content.startswith("error: die: ")
    assert dead.messages[1].content == "2"
    assert not any(alive(pid) for pid in pids)


def test_images_of_a_server_of_mcp_are_read_and_other_parts_are_named() -> None:
    made, url = ToolCalls(rg.Tools(server())), data_url("here", Image.new("RGB", (4, 2)), Path())

    async def show() -> rg.agents.Message:
        call = rg.agents.ToolCall("show", {"data": url.partition(",")[2]})
        turn = await made.step(rg.agents.Message("assistant", "", tool_calls=(call,)))
        await close_servers()
        return turn.messages[0]

    answer = asyncio.run(show())
    assert answer.content == "A plot:\n<image>\n(audio left out: only text and images are read)\nthe notes"
    assert answer.images == (url,)


def test_a_conversation_with_a_server_of_mcp_of_its_own_keeps_its_state_to_itself() -> None:
    tools = rg.Tools(server(own=True))

    async def said(made: ToolCalls, *calls: tuple[str, dict[str, object]]) -> list[str]:
        asked = tuple(rg.agents.ToolCall(*call) for call in calls)
        return [message.content for message in (await made.step(rg.agents.Message("assistant", "", tool_calls=asked))).messages]

    async def conversations() -> tuple[list[str], list[str], list[str], list[int]]:
        one, two = ToolCalls(tools), ToolCalls(tools)
        first, other = await asyncio.gather(
            said(one, ("note", {"text": "a"}), ("process", {}), ("note", {"text": "b"})),
            said(two, ("note", {"text": "c"}), ("process", {})),
        )
        died = await said(one, ("die", {}), ("note", {"text": "d"}), ("process", {}))
        pids = [int(first[1]), int(other[1]), int(died[2])]
        await one.close()
        assert not alive(pids[2])
        assert alive(pids[1]), "the other conversation goes on"
        await two.close()
        return first, other, died, pids

    first, other, died, pids = asyncio.run(conversations())
    assert (first[0], first[2], other[0]) == ("a", "a b", "c")
    assert died[0].startswith("error: die: ")
    assert died[1] == "d", "a server that has died is followed by one without its state"
    assert len(set(pids)) == 3
    assert not any(alive(pid) for pid in pids)


def test_a_rollout_ends_the_servers_of_its_conversations(folder: Path) -> None:
    def script(text: str) -> str:
        turn = text.count("<|im_start|>assistant") - 1
        call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
        return (call % ("note", '{"text": "x"}'), call % ("note", '{"text": "y"}'), call % ("process", "{}"), "Done.")[turn]

    rolled = Rolled(folder, script, [{"prompt": "a"}, {"prompt": "b"}], tools=rg.Tools(server(own=True)), max_turns=4)
    read = [rolled.read(row) for row in (0, 1)]
    assert all("\nx\n" in answers[0] and "\nx y\n" in answers[1] for answers in read)
    found = [re.search(r"\n(\d+)\n", answers[2]) for answers in read]
    pids = [int(one[1]) for one in found if one]
    assert len(set(pids)) == 2
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_server_that_is_none_is_refused_where_it_is_named() -> None:
    with pytest.raises(rg.errors.GraphError, match=r"mcp\('false'\).*does not start"):
        rg.environments.mcp("false")
    with pytest.raises(rg.errors.GraphError, match=r"no tools .'subtract'.; it has"):
        rg.environments.mcp(sys.executable, str(PROGRAMS / "mcp_server.py"), only=["subtract"])


COUNT = f"{PROGRAMS / 'child_games.py'}:Count"


def test_an_environment_in_another_process_is_played_like_any() -> None:
    make = rg.environments.process(COUNT, ["goal"], word="Count to")
    assert rg.Agent(make).reads(["goals"]) == {"goal": "goals"}
    first, turn, last = run_turns(make, {"goal": 2}, ["one", "two"])
    assert first[0].content.startswith("Count to 2 in process ")
    assert str(os.getpid()) not in first[0].content
    assert (turn.messages[0].content, turn.reward, turn.done) == ("more", 0.0, False)
    assert (last.reward, last.done, last.info) == (1.0, True, {"turns": 1})


def test_conversations_share_processes_and_one_that_dies_takes_only_its_own() -> None:
    make = rg.environments.process(COUNT, ["goal"], processes=2, word="Count to")

    async def all_of_them() -> tuple[list[object], object]:
        talks = [take_turns(make, {"goal": 9}, said) for said in (["wait", "die"], ["wait", "wait", "one"], ["wait", "raise"])]
        found = await asyncio.gather(*talks, return_exceptions=True)
        return list(found), await take_turns(make, {"goal": 1}, ["one"])

    (died, went_on, raised), after = asyncio.run(all_of_them())
    assert "has died (exit status 3)" in str(died)
    assert len(went_on) == 4  # type: ignore[arg-type]
    assert "KeyError" in str(raised) or "has died" in str(raised)
    assert after[1].done  # type: ignore[index]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rg.environments.process("games"), "name a class"),
        (lambda: rg.environments.process(COUNT, python="no/python"), "no such program"),
        (lambda: rg.environments.openenv("127.0.0.1:8000"), "pass the server's address"),
        (lambda: rg.environments.nemo_gym("ws://x"), "pass the resource server's address"),
        (lambda: rg.environments.mcp(), "pass the command"),
        (lambda: rg.environments.mcp("echo", own=True, processes=2), "has no effect"),
        (lambda: rg.environments.gymnasium("x", instruction="y", actions=["a"], act=str), "pass one of the two"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(make: object, said: str) -> None:
    with pytest.raises(rg.errors.GraphError, match=said):
        make()  # type: ignore[operator]
