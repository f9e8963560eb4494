"""Agent programs that own their loop: they call the model through an endpoint that speaks OpenAI's protocol."""

import asyncio
import importlib.util
import inspect
import json
import math
import os
import shlex
import shutil
import string
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlgraph import settings
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.agent import SPECIAL, check_format, convert_argument
from rlgraph.nodes.environments.messages import ToolCall
from rlgraph.nodes.environments.supervisor import DEADLINE
from rlgraph.nodes.prompts import plural
from rlgraph.settings import Count, Natural, Seconds
from rlgraph.values.pool import Pool

# A command line as an agent program: a separate process, whose printed text is read and which leaves nothing behind.

SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
MOST_BYTES = 65536  # characters of the output; its end is kept
NO_PROXY = "127.0.0.1,localhost"
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")  # none of these holds a secret


class CommandFailed(Exception):
    """A command ended with a status other than 0."""


def environment_of(named: Sequence[str]) -> dict[str, str]:
    """Collect the variables of a command: a few of this process's variables, and the named ones, "NAME" or "NAME=value".

    >>> environment_of(["MODE=fast"])["MODE"]
    'fast'

    Calls of this host bypass proxies. Raises CommandFailed if this process lacks a named one.
    """
    values = dict(given.split("=", 1) for given in named if "=" in given)
    passed = [given for given in named if "=" not in given]
    if missing := [name for name in passed if name not in os.environ]:
        raise CommandFailed(f"the environment of the worker has no variables {missing}")
    found = {name: os.environ[name] for name in (*PASSED, *passed) if name in os.environ} | values
    return found | {name: ",".join(filter(None, [found.get(name), NO_PROXY])) for name in ("no_proxy", "NO_PROXY")}


async def run_command(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Run a command in this environment, and return the end of its output. Cancelling it ends all processes that it has started.

    Raises TimeoutError at its deadline, and CommandFailed for a status other than 0.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", SUPERVISOR, str(seconds), *command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    try:
        printed, complaints = await asyncio.gather(_end_of(child.stdout), _end_of(child.stderr))
        status = await child.wait()
    finally:
        child.stdin.close()  # from here on the supervisor ends remaining processes
    if status == DEADLINE:
        raise TimeoutError
    if status:
        raise CommandFailed(f"'{command[0]}' ended with status {status}: {complaints.strip()[-300:]}")
    return printed


async def _end_of(stream: asyncio.StreamReader) -> str:
    kept = b""
    while part := await stream.read(65536):
        kept = (kept + part)[-MOST_BYTES:]
    return kept.decode(errors="replace")


CLIENT = "client"  # the parameter of a function for the address
OUTPUT_CHARACTERS = 65536
OWN_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RLGRAPH_SEED")


@settings.refuse_unknown
@dataclass(frozen=True)
class AgentClient:
    """The address of the model for one session: `AsyncOpenAI(base_url=client.base_url, api_key=client.key)`.

    >>> AgentClient("http://127.0.0.1:8000/v1", "secret", seed=7).base_url
    'http://127.0.0.1:8000/v1'

    * `base_url`: the address of the model, for an OpenAI client.
    * `key`: the key of the session.
    * `seed`: a seed per session, for random draws of the program.
    """

    base_url: str
    key: str
    seed: Natural = 0

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True)
class Ended:
    """The result of a program: its reward and its output."""

    reward: float = 0.0
    output: str = ""


@settings.refuse_unknown
@dataclass(frozen=True, eq=False)
class Program:
    """An agent program that calls the model itself, for `generator.rollout(prompts, agent=rg.Program(solve))`.

    >>> import rlgraph as rg
    >>> async def solve(client: rg.agents.AgentClient, prompt: str, answer: str) -> float:
    ...     from openai import AsyncOpenAI
    ...     llm = AsyncOpenAI(base_url=client.base_url, api_key=client.key)
    ...     said = await llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": prompt}])
    ...     return float(answer in said.choices[0].message.content)
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], count=1)
    >>> rollout = rg.Generator("tiny", pool=rg.Pool("rollout")).rollout(prompts, agent=rg.Program(solve, sequences=2), group_size=4)
    >>> rollout.columns[-3:], rollout.node.rows
    (('rewards', 'token_rewards', 'outputs'), 8)

    A function gets an `rg.agents.AgentClient` as `client`; its other parameters name fields of the prompt. A command gets fields in
    braces, `["python", "agent.py", "{prompt}"]`, and `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its environment. It runs in a separate
    process, and the processes that it starts end with it.

    * `run`: an async function, or a command as text or a list.
    * `sequences`: the rows per session. If the program edits its history, a session has several branches, and the branches with the most
      tokens of the model are kept. Rows that a session does not fill have no tokens. All rows of a session have its reward.
    * `rewarded`: the reward is the function's return value, or the last line that the command prints. False: a reward node computes it
      from the column `outputs`, the function's return value or the command's output.
    * `conversation_s`: the most seconds per session.
    * `calls`: the format in which the model writes calls of the tools of a request, as for `rg.Agent`.
    * `keep_thinking`: earlier turns stay as the model has written them. False: a new branch begins if the template changes them.
    * `pool`: the host cores for programs. None: the cores of the generator's process.
    * `env`: variables of the worker's environment for a command, besides PATH, HOME and a few others: names, e.g. "HF_TOKEN", or
      names with their values, e.g. "MODE=fast".

    Raises GraphError for a function that is not async or has no parameter `client`, for a command whose braces name no field, and for
    an `env` of a function, which sees all that the worker does.
    """

    run: Callable[..., Awaitable[object]] | str | Sequence[str]
    sequences: Count = 1
    rewarded: bool = True
    conversation_s: Seconds = 600.0
    calls: str | Callable[..., Sequence[ToolCall]] = "hermes"
    keep_thinking: bool = False
    pool: Pool | None = None
    env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        check_format("Program", self.calls)
        if self.pool is not None and self.pool.cpus is None:
            raise GraphError(f"Program(pool=Pool('{self.pool.name}')): programs run on host cores: Pool('{self.pool.name}', cpus=n)")
        if callable(self.run):
            _check_function(self.run)
            if self.env:
                raise GraphError(f"Program(env={show_value(self.env)}): a function sees the environment of its worker; leave env out")
        else:
            _check_env(self.env)
            _ = self.fields  # raises for braces without the name of a field
            if not self.command:
                raise GraphError(f"Program(run={show_value(self.run)}): a command names a program: ['python', 'agent.py']")

    @property
    def command(self) -> Sequence[str]:
        """The arguments of a command; none for a function."""
        if callable(self.run):
            return ()
        return tuple(shlex.split(self.run)) if isinstance(self.run, str) else tuple(self.run)

    @property
    def fields(self) -> Sequence[str]:
        """The fields of a prompt that it reads."""
        if callable(self.run):
            return [name for name in inspect.signature(self.run).parameters if name != CLIENT]
        return list(dict.fromkeys(field for argument in self.command for field in _fields(argument)))

    def reads(self, carried: Sequence[str]) -> Mapping[str, str]:
        """Name the column of each field, among the columns of the prompts."""
        optional = set()
        if callable(self.run):
            optional = {p.name for p in inspect.signature(self.run).parameters.values() if p.default is not p.empty}
        columns = {name: SPECIAL.get(name, name if name in carried else plural(name)) for name in self.fields}
        return {name: column for name, column in columns.items() if column in carried or name not in optional}

    def check(self) -> None:
        """Raise GraphError if the endpoint or the command cannot be run."""
        if importlib.util.find_spec("aiohttp") is None:
            raise GraphError("agent programs call an endpoint that needs aiohttp: pip install 'rlgraph-dataflow[agents]'")
        if self.command and "{" not in self.command[0] and shutil.which(self.command[0]) is None:
            raise GraphError(f"Program(run={show_value(self.run)}): there is no program '{self.command[0]}' on this machine's PATH")
        missing = [name for name in self.env if "=" not in name and name not in os.environ]
        if missing:
            raise GraphError(
                f"Program(env={show_value(self.env)}): the environment has no variables {missing}; set them, or pass NAME=value"
            )

    async def session(self, client: AgentClient, columns: Mapping[str, str], item: Mapping[str, Any]) -> Ended:
        """Run it for the `item` of a prompt, a value for each column. Raises its errors, and an error for a reward that is not a number."""
        fields = {name: convert_argument(name, item[column]) for name, column in columns.items()}
        if callable(self.run):
            result = await self.run(**{CLIENT: client, **fields})
            return Ended(_reward(result) if self.rewarded else 0.0, _text(result))
        places = dict(zip(OWN_VARIABLES, (client.base_url, client.key, str(client.seed)), strict=True))
        environment = environment_of(self.env) | places
        printed = await run_command([part.format(**fields) for part in self.command], environment, self.conversation_s)
        lines = printed.strip().splitlines()
        return Ended(_reward(lines[-1].strip() if lines else None) if self.rewarded else 0.0, printed[-OUTPUT_CHARACTERS:])


def _check_function(run: Callable[..., Any]) -> None:
    where = f"Program(run={show_value(run)})"
    if not inspect.iscoroutinefunction(run):
        raise GraphError(f"{where}: a program is an async function, e.g. `async def solve(client, prompt)`, or a command line")
    parameters = inspect.signature(run).parameters
    kinds = {p.kind for p in parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY}:
        raise GraphError(f"{where}: its parameters name fields of a prompt, e.g. (client, prompt)")
    if CLIENT not in parameters:
        raise GraphError(f"{where}: it has no parameter 'client', through which it calls the model: `async def solve(client, prompt)`")


def _check_env(env: Sequence[str]) -> None:
    for variable in env:
        name = variable.partition("=")[0]
        if not name.isidentifier() or "\0" in variable:
            raise GraphError(f"Program(env={show_value(env)}): {show_value(variable)} is neither the name of a variable nor NAME=value")
        if name in OWN_VARIABLES:
            raise GraphError(f"Program(env={show_value(env)}): rlgraph sets {name} separately for each session; leave it out")


def _fields(argument: str) -> list[str]:
    """List the fields in the braces of an argument. Raises GraphError for braces without a field."""
    try:
        parts = list(string.Formatter().parse(argument))
    except ValueError as error:
        raise GraphError(
            f"Program: the argument {show_value(argument)} has braces without a field ({error}); write {{{{ for a literal brace"
        ) from None
    named = [(name, form, conversion) for _, name, form, conversion in parts if name is not None]
    for name, form, conversion in named:
        if not name.isidentifier() or form or conversion:
            raise GraphError(f"Program: the argument {show_value(argument)} has braces without a field of the prompt, e.g. {{prompt}}")
    return [name for name, _, _ in named]


def _reward(result: object) -> float:
    try:
        reward = float(result)  # type: ignore[arg-type] # Python raises for anything but a number
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward) or (isinstance(result, str) and not result):
        raise ValueError(
            f"the program returned {show_value(result)}; a program returns its reward, a finite number. Otherwise set rewarded=False"
        )
    return reward


def _text(result: object) -> str:
    """Write the result of a function: text unchanged, else JSON if possible."""
    if result is None or isinstance(result, str):
        return (result or "")[-OUTPUT_CHARACTERS:]
    try:
        return json.dumps(result, ensure_ascii=False)[-OUTPUT_CHARACTERS:]
    except (TypeError, ValueError, RecursionError):
        return str(result)[-OUTPUT_CHARACTERS:]
