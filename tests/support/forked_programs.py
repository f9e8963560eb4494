"""Programs of Python that begin in milliseconds: forked from the server that has imported torch, transformers and rlgraph once.

A program has its own arguments, folder, environment, session and `__main__`, as after `python FILE`. A test that looks at what a
program imports, or limits it before it begins, starts it with `subprocess`.
"""

import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

from ray._raylet import AuthenticationTokenLoader, Config
from support.forked_workers import server

from rlgraph.runtime.driver.ray_cluster import MODE


@dataclass(frozen=True)
class Ended:
    """What a program left: its exit status, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run(*command: str, cwd: Path, timeout_s: float = 250.0, **environment: str) -> Ended:
    """Run `"FILE", …` or `"-m", "MODULE", …` in a folder to its end, with more variables."""
    with Program(*command, cwd=cwd, **environment) as program:
        return program.end(timeout_s)


class Program:
    """A program at work. `os.killpg(program.pid, …)` reaches it and what it forks; leaving the block kills it."""

    def __init__(self, *command: str, cwd: Path, **environment: str) -> None:
        read, write = os.pipe()
        self.stdout, self._errors = os.fdopen(read), tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the block is left)
        ends = Connection(write, readable=False), Connection(os.dup(self._errors.fileno()), readable=False)
        own = {name: value for name, value in os.environ.items() if name != MODE}  # a test's own Ray sets it, which the server has not read
        self._process = server.Process(target=be, args=(command, cwd, own | environment, ends))
        self._process.start()
        for end in ends:
            end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def end(self, timeout_s: float = 250.0) -> Ended:
        """Read all that it still writes, and wait until it is gone."""
        said = self.stdout.read()
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, f"{said}: it has not ended"
        self._errors.seek(0)
        return Ended(self._process.exitcode, said, self._errors.read())

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self._errors.close()


def be(command: Sequence[str], cwd: Path, environment: Mapping[str, str], ends: Sequence[Connection]) -> None:
    """Be the program, in a process that was forked for it."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for end, number in zip(ends, (1, 2), strict=True):
        os.dup2(end.fileno(), number)
        end.close()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it may fork workers from its own
    Config.initialize("")  # Ray read the server's environment, as where its token is, when the server imported it
    AuthenticationTokenLoader.instance().reset_cache()
    if command[0] == "-m":
        sys.argv, sys.path[:0] = [*command[1:]], [str(cwd)]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = [*command], [str(Path(command[0]).parent)]
        runpy.run_path(command[0], run_name="__main__")
