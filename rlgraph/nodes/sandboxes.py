"""Sandboxes that stay between the turns of a conversation: one small protocol, and the one of this machine."""

import asyncio
import contextlib
import os
import signal
import stat
import struct
from dataclasses import dataclass, field
from typing import Protocol

from rlgraph import settings
from rlgraph.errors import GraphError, shown
from rlgraph.nodes import sandbox
from rlgraph.nodes.sandbox import Limits, ToolError
from rlgraph.nodes.walls.session import ANSWER, READ, READY, REQUEST, RUN, TOO_LONG, TOO_MUCH, WRITE

ALL_READ = stat.S_IROTH | stat.S_IXOTH
SLACK_S = 10.0  # beside the seconds of a run, for the sandbox to answer


@dataclass(frozen=True)
class Executed:
    """The output of code, and why it `failed` (empty if it did not).

    >>> Executed("4\\n").failed
    ''
    """

    output: str
    failed: str = ""

    def __post_init__(self) -> None:
        settings.check(self)


class Sandbox(Protocol):
    """A place where a model's code runs, whose files stay until it is closed. `rg.LocalSandbox` is one; write a class for another.

    >>> class Echo:
    ...     async def exec(self, code):
    ...         return Executed(code)
    ...     async def read(self, path):
    ...         raise ToolError(f"there is no {path}")
    ...     async def write(self, path, data): ...
    ...     async def close(self): ...
    >>> asyncio.run(Echo().exec("1 + 1")).output
    '1 + 1'

    Failing code is no error of the sandbox: `exec` returns the output and the reason. `read` and `write` raise
    `rg.ToolError` for a file that cannot be read or written, and all raise it where the sandbox itself is gone.
    """

    async def exec(self, code: str) -> Executed:
        """Run code, and return what it prints."""

    async def read(self, path: str) -> bytes:
        """Read a file."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders on the way to it."""

    async def close(self) -> None:
        """End it; its files are gone."""


@settings.refuse_unknown
@dataclass(eq=False)
class LocalSandbox:
    """Runs Python code within the layers of `rg.tools.python`, in a folder that stays until it is closed.

    >>> async def example():
    ...     sandbox = LocalSandbox()
    ...     await sandbox.write("numbers.txt", b"1 2 3")
    ...     try:
    ...         return (await sandbox.exec("sum(map(int, open('numbers.txt').read().split()))")).output
    ...     finally:
    ...         await sandbox.close()
    >>> asyncio.run(example())  # doctest: +SKIP
    '6\\n'

    Each run is a fresh process: files stay, variables do not. A killed run loses only its own work. Files are in memory,
    `limits.file_bytes` together. `packages` are folders from which code may import, beside what is installed. It starts at the first
    call. Raises GraphError for a name in `accept_missing` that is no layer, and for packages that are not folders which everyone may read.
    """

    limits: Limits = field(default_factory=Limits)
    accept_missing: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        sandbox.check_layers(self.accept_missing)
        for path in self.packages:
            if not os.path.isdir(path):
                raise GraphError(f"LocalSandbox(packages=…): {shown(path)} is no folder of this machine")
            if os.stat(path).st_mode & ALL_READ != ALL_READ:  # code runs as nobody where this process is root
                raise GraphError(f"LocalSandbox(packages=…): {shown(path)} is no folder that everyone may read; run chmod a+rx on it")
        self._process: asyncio.subprocess.Process | None = None
        self._folder = contextlib.ExitStack()
        self._turn = asyncio.Lock()
        self._closed = False

    async def exec(self, code: str) -> Executed:
        """Run Python code as a notebook's cell, and return what it prints."""
        status, output = await self._asked(RUN, code.encode(errors="replace"))
        text = output.decode(errors="replace")
        if status == TOO_LONG:
            return Executed(text, f"the code ran for more than {self.limits.seconds:g} s and was stopped")
        if status == TOO_MUCH:
            return Executed(text, f"the code printed more than {self.limits.output_bytes} bytes and was stopped")
        if status < 0:
            return Executed(text, f"the code's process was killed by {sandbox.signal_name(-status)}")
        return Executed(text, f"the code could not be run: {text.strip()}" if status else "")

    async def read(self, path: str) -> bytes:
        """Read a file. Raises ToolError if that fails."""
        return await self._file(READ, path, b"")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders on the way to it. Raises ToolError if that fails."""
        await self._file(WRITE, path, data)

    async def close(self) -> None:
        """End the sandbox; its files are gone."""
        self._closed = True
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()
        self._folder.close()

    async def _file(self, operation: bytes, path: str, data: bytes) -> bytes:
        if not path or "\0" in path:
            raise ToolError(f"the path {path!r} names no file")
        status, output = await self._asked(operation, path.encode() + b"\0" + data)
        if status:
            raise ToolError(output.decode(errors="replace").strip() or f"'{path}' is too large, or took too long")
        return output

    async def _asked(self, operation: bytes, body: bytes) -> tuple[int, bytes]:
        """Send an operation and await its answer. What goes wrong on the way ends the sandbox."""
        async with self._turn:
            process = await self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(struct.pack(REQUEST, operation, len(body)) + body)
                async with asyncio.timeout(self.limits.seconds + SLACK_S):
                    await process.stdin.drain()
                    status, length = struct.unpack(ANSWER, await process.stdout.readexactly(struct.calcsize(ANSWER)))
                    return status, await process.stdout.readexactly(length)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                await self.close()
                raise ToolError("the sandbox is gone, with its files") from None
            except asyncio.CancelledError:  # what is under way would answer the next call
                await self.close()
                raise

    async def _started(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise ToolError("the sandbox is closed")
        if self._process is None:
            folder = self._folder.enter_context(sandbox.home(self.accept_missing))
            self._process = await asyncio.create_subprocess_exec(
                *sandbox.command_of_session(self.limits, self.accept_missing, [os.path.abspath(path) for path in self.packages]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=folder,
                env=sandbox.environment(folder),
                start_new_session=True,
            )
            assert self._process.stdout is not None
            said = await self._process.stdout.readline()
            if said != READY:
                await self.close()
                raise ToolError(f"the sandbox could not be made: {said.decode(errors='replace').strip()}")
        return self._process
