"""Run a model's Python code in a sandbox, once or between the turns of a conversation: limited time, memory, output and files."""

import asyncio
import contextlib
import math
import os
import signal
import stat
import struct
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from rlgraph import settings
from rlgraph.errors import GraphError, show_value
from rlgraph.nodes.environments.calls import run_in_thread
from rlgraph.nodes.walls.session import ANSWER, READ, READY, REQUEST, RUN, TOO_LONG, TOO_MUCH, WRITE
from rlgraph.settings import Count, Seconds

LAYERS = ("namespaces", "landlock", "seccomp")  # docs/developers/security.md describes each of them
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from walls.{} import main; del sys.path[0]; main()"


@settings.refuse_unknown
@dataclass(frozen=True)
class Limits:
    """Limits of one run: seconds, bytes of memory, bytes of output, and bytes of all its files together.

    Raises GraphError for a limit that is not above 0.

    * `seconds`: the longest that a run may take.
    * `memory_bytes`: the most memory of its process.
    * `output_bytes`: the most bytes that it may print; the rest is cut off.
    * `file_bytes`: the most that its files may have together.
    """

    seconds: Seconds = 10.0
    memory_bytes: Count = 1 << 30
    output_bytes: Count = 8192
    file_bytes: Count = 16 << 20

    def __post_init__(self) -> None:
        settings.check(self)


class ToolError(Exception):
    """A call of a tool failed. The model reads the message.

    >>> str(ToolError("there is no such page"))
    'there is no such page'
    """


async def run(code: str, limits: Limits, accept_missing: Collection[str] = ()) -> str:
    """Run the code and return its output. `accept_missing` names the layers that this machine may lack.

    Raises ToolError if the code takes too long, is killed, or prints too much.
    """
    with open_home(accept_missing) as folder:
        child = await asyncio.create_subprocess_exec(
            *command_of_run(limits, accept_missing),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env=environment(folder),
            start_new_session=True,
        )
        try:
            output = await asyncio.wait_for(_talk(child, code, limits.output_bytes), limits.seconds)
        except TimeoutError:
            raise ToolError(f"the code ran for more than {limits.seconds:g} s and was stopped") from None
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            assert child.stdout is not None
            while await child.stdout.read(65536):  # drain the pipe: wait() waits for its end, and a full buffer would never reach it
                pass
            await child.wait()
    return _check_output(output, child.returncode, limits)


def check(limits: Limits, accept_missing: Collection[str] = (), what: str = "the tool 'python'", maker: str = "rg.tools.python") -> None:
    """Try an empty run for `what`, which `maker` makes.

    Raises GraphError on a system other than Linux, and if the kernel lacks a layer that is not in `accept_missing`.
    """
    if sys.platform != "linux":
        raise GraphError(f"{what} needs Linux 5.13 or newer, which isolates its code from files and network; leave it out")
    try:
        run_in_thread(run("", limits, accept_missing))
    except (ToolError, OSError) as error:  # a system without room for a process raises OSError
        raise GraphError(f"{what} cannot be run here: {error}; leave it out{_advice(str(error), maker)}") from None


# Settings of a kernel that forbid users to make namespaces: the file, the value, and the command that allows them.
REFUSING = (
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
)


def _advice(error: str, maker: str) -> str:
    """Suggest a fix for a sandbox that cannot be made."""
    missing = next((layer for layer in LAYERS if f"lacks the layer '{layer}'" in error), None)
    if missing is None:
        return ", or raise its limits"
    commands = [command for path, value, command in REFUSING if missing == "namespaces" and _holds(path, value)]
    allow = f", allow namespaces as root ({'; '.join(commands)})" if commands else ""
    return f"{allow}, or accept that with {maker}(accept_missing=('{missing}',))"


def _holds(path: str, value: str) -> bool:
    """Whether a setting of the kernel has a value; a kernel may lack the setting."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip() == value
    return False


def check_layers(names: Collection[str]) -> None:
    """Raise GraphError for the names of unknown layers."""
    if isinstance(names, str) or not set(names) <= set(LAYERS):
        raise GraphError(f"accept_missing={show_value(names)}: name layers that this machine may lack, of {LAYERS}, e.g. ('namespaces',)")


def open_home(accept_missing: Collection[str]) -> contextlib.AbstractContextManager[str]:
    """Open the folder in which the process starts. Namespaces keep its files in memory; without them it needs a folder on disk."""
    if "namespaces" in accept_missing:
        return tempfile.TemporaryDirectory(prefix="tool-of-rlgraph-", ignore_cleanup_errors=True)
    return contextlib.nullcontext(tempfile.gettempdir())


def command_of_run(limits: Limits, accept_missing: Collection[str]) -> Sequence[str]:
    """The command of one run."""
    return _command("child", [math.ceil(limits.seconds) + 1, limits.memory_bytes, limits.file_bytes], accept_missing)


def command_of_session(limits: Limits, accept_missing: Collection[str], more: Collection[str]) -> Sequence[str]:
    """The command of a sandbox that stays; code may import what is in the folders `more`, too."""
    numbers = [limits.seconds, limits.memory_bytes, limits.file_bytes, limits.output_bytes]
    return _command("session", numbers, accept_missing, more)


def _command(module: str, numbers: Sequence[float], accept_missing: Collection[str], more: Collection[str] = ()) -> Sequence[str]:
    packages, readable = _paths()
    python = (sys.executable, "-I", "-S", "-c", START.format(module), str(Path(__file__).parent))
    return (*python, *map(str, numbers), ",".join(accept_missing), os.pathsep.join([*more, *packages]), *readable, *more)


def environment(folder: str) -> dict[str, str]:
    """The environment of a process in the sandbox."""
    return {"HOME": folder, "PATH": "", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@cache
def _paths() -> tuple[Sequence[str], Sequence[str]]:
    """Find the folders of installed packages, and all paths that the code may read: packages, standard library, shared libraries."""
    prefixes = tuple({sys.prefix, sys.base_prefix})
    packages = [p for p in sys.path if p.startswith(prefixes) and Path(p).name in ("site-packages", "dist-packages")]
    wanted = {*LIBRARIES, f"{sys.base_prefix}/lib", str(Path(os.__file__).parent), *packages}
    kept: list[str] = []
    for path in sorted(filter(os.path.exists, wanted)):
        if not any(os.path.realpath(path).startswith(os.path.realpath(other) + "/") for other in kept):
            kept.append(path)
    return packages, kept


async def _talk(child: asyncio.subprocess.Process, code: str, most: int) -> bytes:
    """Send the code and read its output, up to one byte more than `most`: that byte shows that it printed too much."""
    assert child.stdin is not None
    assert child.stdout is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        child.stdin.write(code.encode(errors="replace"))
        await child.stdin.drain()
    child.stdin.close()
    parts, size = [], 0
    while size <= most and (part := await child.stdout.read(min(65536, most + 1 - size))):
        parts.append(part)
        size += len(part)
    if size <= most:
        await child.wait()
    return b"".join(parts)


def signal_name(number: int) -> str:
    """Name a signal; real-time signals have no names."""
    known = {signum.value: signum.name for signum in signal.Signals}
    return known.get(number, f"signal {number}")


def _check_output(output: bytes, code: int | None, limits: Limits) -> str:
    text = output[: limits.output_bytes].decode(errors="replace")
    if len(output) > limits.output_bytes:
        raise ToolError(f"{text}\n… the code printed more than {limits.output_bytes} bytes and was stopped")
    if code is not None and code < 0:
        raise ToolError(f"{text}\nthe code's process was killed by {signal_name(-code)}".lstrip())
    if code:
        raise ToolError(f"the code could not be run: {text.strip()}")
    return text


# Sandboxes that stay between the turns of a conversation: one small protocol, and its implementation on this machine.

ALL_READ = stat.S_IROTH | stat.S_IXOTH
SLACK_S = 10.0  # seconds for the sandbox to answer, besides the seconds of a run


@dataclass(frozen=True)
class Executed:
    """The output of code, and the reason if it failed.

    >>> Executed("4\\n").failed
    ''

    * `output`: the text that the code printed, and its error if it raised one.
    * `failed`: the reason why it failed; empty if it did not.
    """

    output: str
    failed: str = ""

    def __post_init__(self) -> None:
        settings.check(self)


class Sandbox(Protocol):
    """A place where a model's code runs, whose files stay until it is closed. `rg.agents.LocalSandbox` is one; write a class for another.

    >>> class Echo:
    ...     async def exec(self, code):
    ...         return Executed(code)
    ...     async def read(self, path):
    ...         raise ToolError(f"there is no {path}")
    ...     async def write(self, path, data): ...
    ...     async def close(self): ...
    >>> asyncio.run(Echo().exec("1 + 1")).output
    '1 + 1'

    Failing code is not an error of the sandbox: `exec` returns the output and the reason. `read` and `write` raise
    `rg.agents.ToolError` for a file that cannot be read or written, and all raise it if the sandbox itself is gone.
    """

    async def exec(self, code: str) -> Executed:
        """Run code, and return what it prints."""

    async def read(self, path: str) -> bytes:
        """Read a file."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders on the way to it."""

    async def close(self) -> None:
        """End the sandbox and remove its files."""


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

    Each run is a fresh process: files stay, variables do not. A killed run loses only its own work. Files are in memory. The sandbox starts
    at the first call. Raises GraphError for an unknown layer in `accept_missing`, and for packages that are not world-readable folders.

    * `limits`: the limits of a run, such as seconds and memory; `limits.file_bytes` bounds all files together.
    * `accept_missing`: the layers that this machine may lack.
    * `packages`: folders from which code may import, next to the installed packages.
    """

    limits: Limits = field(default_factory=Limits)
    accept_missing: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)
        check_layers(self.accept_missing)
        for path in self.packages:
            if not os.path.isdir(path):
                raise GraphError(f"LocalSandbox(packages=…): {show_value(path)} is not a folder of this machine")
            if os.stat(path).st_mode & ALL_READ != ALL_READ:  # code runs as nobody if this process is root
                raise GraphError(
                    f"LocalSandbox(packages=…): {show_value(path)} is not a folder that everyone may read; run chmod a+rx on it"
                )
        self._process: asyncio.subprocess.Process | None = None
        self._folder = contextlib.ExitStack()
        self._turn = asyncio.Lock()
        self._closed = False

    async def exec(self, code: str) -> Executed:
        """Run Python code as a notebook's cell, and return what it prints."""
        status, output = await self._request(RUN, code.encode(errors="replace"))
        text = output.decode(errors="replace")
        if status == TOO_LONG:
            return Executed(text, f"the code ran for more than {self.limits.seconds:g} s and was stopped")
        if status == TOO_MUCH:
            return Executed(text, f"the code printed more than {self.limits.output_bytes} bytes and was stopped")
        if status < 0:
            return Executed(text, f"the code's process was killed by {signal_name(-status)}")
        return Executed(text, f"the code could not be run: {text.strip()}" if status else "")

    async def read(self, path: str) -> bytes:
        """Read a file. Raises ToolError if that fails."""
        return await self._file(READ, path, b"")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, and the folders on the way to it. Raises ToolError if that fails."""
        await self._file(WRITE, path, data)

    async def close(self) -> None:
        """End the sandbox and remove its files."""
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
        status, output = await self._request(operation, path.encode() + b"\0" + data)
        if status:
            raise ToolError(output.decode(errors="replace").strip() or f"'{path}' is too large, or took too long")
        return output

    async def _request(self, operation: bytes, body: bytes) -> tuple[int, bytes]:
        """Send an operation and await its answer. An error on the way ends the sandbox."""
        async with self._turn:
            process = await self._start_process()
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
            except asyncio.CancelledError:  # an unread answer would be taken for that of the next call
                await self.close()
                raise

    async def _start_process(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise ToolError("the sandbox is closed")
        if self._process is None:
            folder = self._folder.enter_context(open_home(self.accept_missing))
            self._process = await asyncio.create_subprocess_exec(
                *command_of_session(self.limits, self.accept_missing, [os.path.abspath(path) for path in self.packages]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                cwd=folder,
                env=environment(folder),
                start_new_session=True,
            )
            assert self._process.stdout is not None
            said = await self._process.stdout.readline()
            if said != READY:
                await self.close()
                reason = said.decode(errors="replace").strip()
                raise ToolError(f"the sandbox could not be created: {reason}; leave it out{_advice(reason, 'rg.agents.LocalSandbox')}")
        return self._process
