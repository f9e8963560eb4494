"""Adapters against real packages whose pins exclude rlgraph's, in environments of their own: `make test-environments` makes them."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.environment_turns import run_turns
from support.paths import PROGRAMS, ROOT

import rlgraph as rg

pytestmark = pytest.mark.apart


def python_of(name: str) -> Path:
    return ROOT / f".venv-{name}" / "bin" / "python"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [str(python_of("openenv")), "-W", "ignore", str(PROGRAMS / "openenv_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.kill()


def number_in(said: rg.agents.Message) -> dict[str, object]:
    if not said.content.lstrip("-").isdigit():
        raise ValueError("Say a number.")
    return {"number": int(said.content)}


def test_a_game_of_an_openenv_server_is_played(url: str) -> None:
    make = rg.environments.openenv(url, act=number_in, instruction="A game.")
    first, low, none, last = run_turns(make, {"seed": 7}, ["3", "three", "7"])
    assert first[0].content == "A game.\n\nFind my number."
    assert (low.messages[0].content, low.reward, low.done) == ("Higher.", 0.0, False)
    assert (none.messages[0].content, none.info) == ("Say a number.", {"invalid": 1.0})
    assert (last.messages[0].content, last.reward, last.done) == ("Found.", 1.0, True)


def test_an_action_that_the_server_refuses_is_answered_and_its_crash_is_an_error(url: str) -> None:
    refused = run_turns(rg.environments.openenv(url, act="number", show="text"), {}, ["three"])[1]
    assert refused.info == {"invalid": 1.0}
    with pytest.raises(RuntimeError, match="the game has crashed"):
        run_turns(rg.environments.openenv(url, act=number_in), {}, ["-1"])


def test_tasks_of_verifiers_are_prompts_and_score_their_answers() -> None:
    given = {"python": python_of("verifiers")}
    rows = rg.environments.verifiers_rows(f"{PROGRAMS / 'verifiers_tasks.py'}:Sums", **given)
    assert [row["task"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[2]["prompt"] == [{"role": "system", "content": "Say a number."}, {"role": "user", "content": "2 + 1 ="}]
    make = rg.environments.verifiers(f"{PROGRAMS / 'verifiers_tasks.py'}:Sums", **given)
    assert rg.Agent(make).reads(["tasks"]) == {"task": "tasks"}
    first, right = run_turns(make, {"task": 2}, ["3"])
    assert first[-1].content == "2 + 1 ="
    assert (right.reward, right.done, right.info) == (2.0, True, {"characters": 1.0})
    assert run_turns(make, {"task": 2}, ["four"])[1].reward == 0.0
