"""Programs that raise, hang, flood, exit or leave processes behind end their own session, are counted by name, and cost the job nothing."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from support.scripted_conversations import Rolled, wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import FINISH_REASONS
from rlgraph.errors import GraphError
from rlgraph.nodes.environments.calls import BLOCKED_S, Call, EnvironmentCalls

ABORT = FINISH_REASONS.index("abort")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("models") / "qwen2_5", "qwen2_5")


async def ask(client: rg.agents.AgentClient) -> Any:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.key) as model:
        return await model.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])


async def raises(client: rg.agents.AgentClient) -> float:
    raise ValueError("no disk")


async def exits(client: rg.agents.AgentClient) -> float:
    sys.exit(3)


async def hangs(client: rg.agents.AgentClient) -> float:
    await asyncio.Event().wait()
    return 1.0


async def holds_on(client: rg.agents.AgentClient) -> float:
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue


async def floods(client: rg.agents.AgentClient) -> float:
    from aiohttp import ClientSession

    body = {"messages": [{"role": "user", "content": "x " * 4000}]}
    async with ClientSession(headers={"Authorization": f"Bearer {client.key}"}) as session:
        while True:
            async with session.post(f"{client.base_url}/chat/completions", json=body) as answer:
                await answer.read()
                if answer.status == 401:
                    await asyncio.Event().wait()


async def gives_text(client: rg.agents.AgentClient) -> Any:
    return "well done"


async def gives_nan(client: rg.agents.AgentClient) -> float:
    return float("nan")


FAILURES: dict[str, tuple[Callable[..., Any], str]] = {
    "raises": (raises, "errors"),
    "exits": (exits, "errors"),
    "hangs": (hangs, "limit_seconds"),
    "ignores its cancellation": (holds_on, "limit_seconds"),
    "floods": (floods, "errors"),
    "gives text for its reward": (gives_text, "errors"),
    "gives NaN": (gives_nan, "errors"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_program_that_fails_ends_its_own_session_and_is_counted(folder: Path, name: str) -> None:
    wrong, counted = FAILURES[name]

    short = counted == "limit_seconds"

    async def program(client: rg.agents.AgentClient, prompt: str) -> Any:
        if not short:  # else how much of it is done at the deadline depends on the machine
            await ask(client)
        return await wrong(client) if prompt == "wrong" else 1.0

    seconds = 1.5 if short else 300.0
    data = [{"prompt": "right"}, {"prompt": "wrong"}, {"prompt": "right"}]
    rolled = Rolled(folder, lambda text: "hm", data, agent=rg.Program(program, conversation_s=seconds))
    assert rolled.metrics[f"agent/{counted}"] == 1
    assert sum(rolled.metrics[f"agent/{kind}"] for kind in ("errors", "timeouts", "blocked", "limit_seconds")) == 1
    rewards = rolled.columns["rewards"].tolist()
    assert sorted(rewards) == [0.0, 1.0, 1.0]
    assert rolled.columns["finish_reasons"].tolist() == [0 if reward else ABORT for reward in rewards]
    assert short or rolled.columns["response_mask"].any(-1).all(), "what it had sampled is there"


def test_a_program_that_makes_no_call_is_a_row_without_tokens(folder: Path) -> None:
    async def silent(client: rg.agents.AgentClient) -> float:
        return 2.0

    rolled = Rolled(folder, lambda text: "hm", [{"prompt": ""}], agent=silent)
    assert rolled.metrics["agent/without_calls"] == 1
    assert not rolled.columns["response_mask"].any()
    assert rolled.columns["rewards"].tolist() == [2.0]


def test_the_key_of_a_session_that_has_ended_is_refused(folder: Path) -> None:
    keys: list[rg.agents.AgentClient] = []

    async def program(client: rg.agents.AgentClient) -> float:
        keys.append(client)
        if len(keys) == 1:
            await ask(client)
            return 1.0
        with pytest.raises(openai.AuthenticationError):
            await ask(keys[0])
        return 1.0

    rolled = Rolled(folder, lambda text: "hm", [{"prompt": ""}] * 2, agent=program, concurrency=1)
    assert rolled.columns["rewards"].tolist() == [1.0, 1.0]
    assert keys[0].key != keys[1].key


def test_a_run_that_fails_ends_its_programs(folder: Path) -> None:
    ended: list[str] = []

    async def program(client: rg.agents.AgentClient) -> float:
        try:
            await ask(client)
            await asyncio.Event().wait()
        finally:
            ended.append("ended")
        return 1.0

    def script(text: str) -> str:
        raise RuntimeError("the engine has died")

    with pytest.raises(RuntimeError, match="has died"):
        Rolled(folder, script, [{"prompt": ""}] * 2, agent=program)
    wait_until(lambda: len(ended) == 2)


AGENT = """
import json, os, sys, urllib.request
def ask(text):
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
said = ask(sys.argv[1])
"""
ENDS = {
    "right": "print('thinking'); print(float(said == 'yes'))",
    "exits": "sys.stderr.write('no licence'); sys.exit(7)",
    "is killed": "os.kill(os.getpid(), 9)",
    "prints no number": "print('done')",
    "prints nothing": "",
    "leaves a process": (
        "import subprocess\nsleeps = [sys.executable, '-c', 'import time; time.sleep(300)', sys.argv[2]]\n"
        "subprocess.Popen(sleeps, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\nprint(0.5)"
    ),
}


def commands_with(text: str) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    if text.encode() in file.read():
                        found.append(int(name))
            except OSError:
                continue
    return found


def test_a_command_prints_its_reward_and_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    for name, end in ENDS.items():
        (tmp_path / f"{name}.py").write_text(AGENT + end)
    command = [sys.executable, f"{tmp_path}/{{kind}}.py", "{prompt}", str(tmp_path)]
    data = [{"prompt": f"{n}?", "kind": name} for n, name in enumerate(ENDS)]
    rolled = Rolled(folder, lambda text: "yes", data, agent=rg.Program(command))
    rewards = rolled.columns["rewards"].tolist()
    assert sorted(rewards) == [*[0.0] * 4, 0.5, 1.0]
    assert rolled.columns["outputs"] == [{1.0: "thinking\n1.0\n", 0.5: "0.5\n"}.get(reward, "") for reward in rewards]
    assert rolled.columns["finish_reasons"].tolist() == [0 if reward else ABORT for reward in rewards]
    assert rolled.metrics["agent/errors"] == 4
    assert rolled.columns["response_mask"].any(-1).all()
    wait_until(lambda: not commands_with(str(tmp_path)))


def test_a_command_sees_of_the_environment_a_short_list_and_what_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("A_SECRET", "A_NAMED_ONE", "AWS_SECRET_ACCESS_KEY", "HTTP_PROXY", "NO_PROXY"):
        monkeypatch.setenv(name, f"value of {name}")
    code = "import json, os\nprint(json.dumps(dict(os.environ)))"
    program = rg.Program([sys.executable, "-I", "-c", code], env=("A_NAMED_ONE", "MODE=a=b", "NO_PROXY"), rewarded=False)
    seen = json.loads(Rolled(folder, lambda text: "yes", [{"prompt": ""}], agent=program).columns["outputs"][0])
    assert "value of A_SECRET" not in seen.values()
    own = {"OPENAI_BASE_URL", "OPENAI_API_KEY", "RLGRAPH_SEED"}
    allowed = {"PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "no_proxy"}
    assert own | {"PATH", "A_NAMED_ONE", "MODE", "NO_PROXY"} <= set(seen) <= own | allowed | {"A_NAMED_ONE", "MODE", "NO_PROXY"}
    assert (seen["A_NAMED_ONE"], seen["MODE"]) == ("value of A_NAMED_ONE", "a=b")
    assert seen["NO_PROXY"] == "value of NO_PROXY,127.0.0.1,localhost", "calls of the endpoint bypass a proxy"
    monkeypatch.delenv("A_NAMED_ONE")
    with pytest.raises(GraphError, match=r"the environment has no variables \['A_NAMED_ONE'\]"):
        program.check()
    failed = Rolled(folder, lambda text: "yes", [{"prompt": ""}], agent=program)
    assert failed.metrics["agent/errors"] == 1


def test_a_command_that_hangs_is_ended_at_its_deadline(folder: Path, tmp_path: Path) -> None:
    code = "import os, time\nos.fork(); os.setsid()\nwhile True: time.sleep(300)"
    hangs = rg.Program([sys.executable, "-c", code, str(tmp_path)], conversation_s=1.5)
    rolled = Rolled(folder, lambda text: "yes", [{"prompt": ""}], agent=hangs)
    assert rolled.metrics["agent/limit_seconds"] == 1
    assert rolled.columns["finish_reasons"].tolist() == [ABORT]
    wait_until(lambda: not commands_with(str(tmp_path)))


def test_a_command_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    from subprocess import DEVNULL, Popen

    code = (
        "import asyncio, sys\nfrom rlgraph.nodes.environments.program import run_command\n"
        "asyncio.run(run_command([sys.executable, '-c', 'import time; time.sleep(300)', sys.argv[1]], {}, 300))"
    )
    mark = str(tmp_path / "of-a-worker")
    worker = Popen([sys.executable, "-c", code, mark], stderr=DEVNULL)
    try:
        wait_until(lambda: len(commands_with(mark)) >= 3, 60)  # the worker, the supervisor, the command
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: not commands_with(mark))


def not_async(client: rg.agents.AgentClient) -> float:
    return 0.0


async def without_client(prompt: str) -> float:
    return 0.0


async def with_rest(client: rg.agents.AgentClient, **fields: str) -> float:
    return 0.0


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no async function": (not_async, {}, "a program is an async function"),
    "no client": (without_client, {}, "it has no parameter 'client'"),
    "any fields": (with_rest, {}, "its parameters name fields of a prompt"),
    "no command": ("", {}, "a command names a program"),
    "braces without a field": (["echo", "{}"], {}, "braces without a field of the prompt"),
    "braces of an index": (["echo", "{prompt[0]}"], {}, "braces without a field of the prompt"),
    "an open brace": (["echo", "{"], {}, "braces without a field"),
    "GPUs": (ask, {"pool": rg.Pool("g", gpus=1)}, "programs run on host cores"),
    "no format": (ask, {"calls": "prose"}, "calls is one of"),
    "variables of a function": (ask, {"env": ("A",)}, "a function sees the environment of its worker"),
    "a variable without a name": (["echo"], {"env": ("=1",)}, "neither the name of a variable nor NAME=value"),
    "a variable of rlgraph's": (["echo"], {"env": ("OPENAI_API_KEY=1",)}, "rlgraph sets OPENAI_API_KEY"),
    "no rows": (ask, {"sequences": 0}, "sequences is a whole number of at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_program_is_refused_where_it_is_declared(name: str) -> None:
    run, options, message = WRONG[name]
    with pytest.raises(GraphError, match=message.replace("(", r"\(")):
        rg.Program(run, **options)


def test_a_program_that_is_not_there_is_refused_at_the_launch(folder: Path) -> None:
    prompts = rg.prompts([{"prompt": "a"}], count=1)
    generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=rg.Sampling(max_tokens=8), engine="transformers")
    node = generator.rollout(prompts, agent="no-such-program {prompt}").node
    with pytest.raises(GraphError, match="there is no program 'no-such-program'"):
        node.operation.check(node)
    with pytest.raises(GraphError, match="node 'rollout' reads column 'colours'"):
        generator.rollout(prompts, agent=["echo", "{colour}"])
    with pytest.raises(GraphError, match="a group of one is never constant"):
        generator.rollout(
            prompts, agent=rg.Program(ask, sequences=2), refill=rg.options.Refill(reward=lambda reward: reward, writes="kept")
        )


def test_calls_that_begin_together_do_not_look_like_one_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine many clients take longer to be made than a call may block; each that begins shows that the loop goes on."""
    clock = [0.0]
    monkeypatch.setattr("rlgraph.nodes.environments.calls.time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert BLOCKED_S > 20

    async def slow() -> None:
        clock[0] += 20
        time.sleep(0.02)

    calls, ended = EnvironmentCalls(), []
    for _ in range(10):
        calls.begin(Call(None, "session"), slow, 1e9)
    wait_until(lambda: ended.extend(calls.take_finished_calls(0.0)) or len(calls) == 0)  # type: ignore[func-returns-value]
    assert [call.failed for call in ended] == [None] * 10
