"""Environments in processes of another Python: packages whose pins exclude rlgraph's, and code that computes for long."""

import asyncio
import contextlib
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rlgraph import settings
from rlgraph.errors import NOT_JSON, GraphError, show_value
from rlgraph.nodes.environments.leases import Lease, leased_command
from rlgraph.nodes.environments.messages import Message, Turn
from rlgraph.settings import Count, Name

CHILD = Path(__file__).parent / "elsewhere" / "child.py"  # in a folder of its own: a program's folder is where it imports from
MOST_BYTES = 64 << 20  # of one answer
_RUNNING: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[ProcessEnvironments, list[_Child]]]" = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class ProcessEnvironments:
    """Makes environments in other processes: see `process`."""

    environment: Name
    fields: tuple[str, ...] = ()
    python: Name = sys.executable
    processes: Count = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings.check(self)
        if ":" not in self.environment:
            raise GraphError(f"process({show_value(self.environment)}): name a class, e.g. 'package.module:Class' or 'file.py:Class'")
        if not Path(self.python).exists():
            raise GraphError(f"process(python={show_value(self.python)}): there is no such program; pass the bin/python of an environment")

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature that `rg.Agent` reads: a parameter for each field."""
        return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in self.fields])

    def __call__(self, **given: Any) -> "ProcessEnvironment":
        return ProcessEnvironment(self, given)

    @property
    def env(self) -> dict[str, str]:
        """The variables of a process: this one's, but for those that say where Python finds packages."""
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    @property
    def command(self) -> list[str]:
        """The command of a process."""
        return [self.python, str(CHILD), self.environment, json.dumps(dict(self.options))]

    def list_rows(self, deadline_s: float = 300.0) -> Any:
        """Call `rows(**options)` beside the class in a process of its own, and return what it returned."""
        done = subprocess.run([*self.command, "rows"], capture_output=True, text=True, timeout=deadline_s, check=False, env=self.env)
        if done.returncode:
            raise GraphError(f"process({show_value(self.environment)}): {done.stderr.strip()[-600:]}")
        return json.loads(done.stdout.splitlines()[-1])


def process(
    environment: str, fields: Sequence[str] = (), *, python: str | Path = sys.executable, processes: int = 1, **options: Any
) -> ProcessEnvironments:
    """Run a class of environments in processes of another Python: `agent=rg.environments.process("games.py:Guess", ["answer"])`.

    >>> import rlgraph as rg
    >>> games = rg.environments.process("games.py:Guess", ["answer"], processes=2, most=9)
    >>> games.fields, dict(games.options)
    (('answer',), {'most': 9})

    * `environment`: "package.module:Class" or "folder/file.py:Class". It is an ordinary environment, but takes and gives plain values,
      since rlgraph is not imported there: messages are `{"role": …, "content": …}`, and `step` returns
      `{"messages": […], "reward": 0.0, "done": False}`. Its methods may be async; the others run in threads.
    * `fields`: the fields of a prompt that the class gets, besides `options`.
    * `python`: the program, such as "venv/bin/python".
    * `processes`: the processes that each worker starts and spreads conversations over. They end with the worker, also if SIGKILL ends
      it. When a process dies, its conversations end with an error, and the next conversation starts it again.

    Raises GraphError if the program does not exist.
    """
    return ProcessEnvironments(environment, tuple(fields), str(python), processes, options)


class ProcessEnvironment:
    """An environment whose class is in another process."""

    def __init__(self, of: ProcessEnvironments, given: Mapping[str, Any]) -> None:
        self.of, self.given = of, dict(given)
        self.child: _Child | None = None
        self.name = ""

    async def reset(self) -> list[Message] | None:
        self.child = await _child(self.of)
        self.name = self.child.new_name()
        found = await self.child.ask("reset", self.name, self.given)
        return None if found is None else [Message.of(message) for message in found]

    async def step(self, said: Message) -> Turn:
        assert self.child is not None
        found = await self.child.ask("step", self.name, said.as_dict())
        return Turn(**(found | {"messages": [Message.of(message) for message in found.get("messages", ())]}))

    async def close(self) -> None:
        if self.child is not None:
            self.child.forget(self.name)
            if self.child.lives():
                await self.child.ask("close", self.name, None)


class _Child:
    """A process, and the questions that it has not answered."""

    def __init__(self, process: asyncio.subprocess.Process, lease: Lease) -> None:
        self.process, self.lease = process, lease
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.open: set[str] = set()
        self.numbers = itertools.count()
        self.reader = asyncio.ensure_future(self._read())

    def lives(self) -> bool:
        return not self.reader.done()

    def new_name(self) -> str:
        name = str(next(self.numbers))
        self.open.add(name)
        return name

    def forget(self, name: str) -> None:
        self.open.discard(name)

    async def ask(self, call: str, name: str, value: Any) -> Any:
        """Ask, and await the answer. Raises RuntimeError for one that is an error."""
        if not self.lives():
            raise RuntimeError("the process of the environment has died")
        number = next(self.numbers)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([number, call, name, value]).encode() + b"\n")
        try:
            await self.process.stdin.drain()
            return await answer
        finally:
            self.waiting.pop(number, None)

    async def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(*NOT_JSON, TypeError, OSError):  # a line that is too long, or none of ours
            while line := await self.process.stdout.readline():
                number, error, value = json.loads(line)
                answer = self.waiting.get(number)
                if answer is not None and not answer.done():
                    answer.set_exception(RuntimeError(error)) if error else answer.set_result(value)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = await self.process.wait()
        self.lease.end()
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(RuntimeError(f"the process of the environment has died (exit status {code})"))


async def _child(of: ProcessEnvironments) -> _Child:
    """Choose the process with the fewest conversations; start one where there is room for more."""
    mine = _RUNNING.setdefault(asyncio.get_running_loop(), {})
    children = mine[of] = [one for one in mine.get(of, ()) if one.lives()]
    idle = min(children, key=lambda one: len(one.open), default=None)
    if idle is None or (idle.open and len(children) < of.processes):
        command, lease = leased_command(of.command)
        pipe = asyncio.subprocess.PIPE
        started = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=MOST_BYTES, env=of.env, start_new_session=True
        )
        idle = _Child(started, lease)
        children.append(idle)
    return idle


# Task sets of verifiers, whose tasks are single questions or conversations, scored in verifiers' own environment of packages.

VERIFIERS_CHILD = Path(__file__).parent / "elsewhere" / "verifiers_child.py"


def verifiers(
    taskset: str, *, python: str | Path = sys.executable, processes: int = 1, most: int = 1000, **config: Any
) -> ProcessEnvironments:
    """Score responses by a task set of verifiers 0.4: `agent=rg.environments.verifiers("my_tasks:MyTaskset", python="vf/bin/python")`.

    verifiers' pins exclude rlgraph's, so it lives in an environment of its own, whose `python` runs the tasks. `taskset` names a class as
    "module:Class" or "file.py:Class"; `config` are the fields of its configuration. `rg.environments.verifiers_rows(…)` of the same
    arguments has the prompts, of the first `most` tasks.

    The model answers once. The trace that the task scores has the prompt and that answer; rewards are summed by their weights, and
    metrics become `agent/info/NAME`. Tasks that need a runtime (a sandbox) or tools are refused. Tested with verifiers 0.4.0.
    """
    return process(f"{VERIFIERS_CHILD}:ScoredTask", ["task"], python=python, processes=processes, taskset=taskset, most=most, config=config)


def verifiers_rows(taskset: str, *, python: str | Path = sys.executable, most: int = 1000, **config: Any) -> list[dict[str, Any]]:
    """List the tasks of a task set as rows for `rg.prompts`: `prompt`, and `task`, its place."""
    found = verifiers(taskset, python=python, most=most, **config).list_rows()
    return [dict(row) for row in found]
