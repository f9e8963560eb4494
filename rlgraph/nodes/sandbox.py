"""Run a model's Python code in a process of its own: limited time, memory and output, no network, and no files but its own."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rlgraph import settings
from rlgraph.errors import GraphError, shown
from rlgraph.settings import Count, Seconds

LAYERS = ("namespaces", "landlock", "seccomp")  # docs/security.md says what each of them holds
LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache")
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from walls.{} import main; del sys.path[0]; main()"


@dataclass(frozen=True)
class Limits:
    """Limits of one run: seconds, bytes of memory, bytes of output, and bytes of all its files together.

    Raises GraphError for a limit that is not above 0.
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
    with home(accept_missing) as folder:
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
    return _judged(output, child.returncode, limits)


def check(limits: Limits, accept_missing: Collection[str] = (), what: str = "the tool 'python'", maker: str = "rg.tools.python") -> None:
    """Try an empty run for `what`, which `maker` makes.

    Raises GraphError on a system other than Linux, and where the kernel lacks a layer that is not accepted.
    """
    if sys.platform != "linux":
        raise GraphError(f"{what} needs Linux 5.13 or newer, which keeps its code from files and network; leave it out")
    try:
        asyncio.run(run("", limits, accept_missing))
    except ToolError as error:
        missing = next((layer for layer in LAYERS if f"lacks the layer '{layer}'" in str(error)), None)
        advice = f", or accept that with {maker}(accept_missing=('{missing}',))" if missing else ", or raise its limits"
        raise GraphError(f"{what} cannot be run here: {error}; leave it out{advice}") from None


def check_layers(names: Collection[str]) -> None:
    """Raise GraphError for names that are no layers."""
    if isinstance(names, str) or not set(names) <= set(LAYERS):
        raise GraphError(f"accept_missing={shown(names)}: it names layers that this machine may lack, of {LAYERS}, as ('namespaces',)")


def home(accept_missing: Collection[str]) -> contextlib.AbstractContextManager[str]:
    """Open the folder in which the process starts. Namespaces keep its files in memory; without them it needs a folder on disk."""
    if "namespaces" in accept_missing:
        return tempfile.TemporaryDirectory(prefix="tool-of-rlgraph-", ignore_cleanup_errors=True)
    return contextlib.nullcontext(tempfile.gettempdir())


def command_of_run(limits: Limits, accept_missing: Collection[str]) -> Sequence[str]:
    """The command of one run."""
    return _command("child", [math.ceil(limits.seconds) + 1, limits.memory_bytes, limits.file_bytes], accept_missing)


def command_of_session(limits: Limits, accept_missing: Collection[str], more: Collection[str]) -> Sequence[str]:
    """The command of a sandbox that stays; code may import what is in the folders `more` too."""
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
    """Send the code and read its output, up to one byte more than `most`: that byte tells that it printed too much."""
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
    """Name a signal; those of real time have no names of their own."""
    known = {signum.value: signum.name for signum in signal.Signals}
    return known.get(number, f"signal {number}")


def _judged(output: bytes, code: int | None, limits: Limits) -> str:
    text = output[: limits.output_bytes].decode(errors="replace")
    if len(output) > limits.output_bytes:
        raise ToolError(f"{text}\n… the code printed more than {limits.output_bytes} bytes and was stopped")
    if code is not None and code < 0:
        raise ToolError(f"{text}\nthe code's process was killed by {signal_name(-code)}".lstrip())
    if code:
        raise ToolError(f"the code could not be run: {text.strip()}")
    return text
