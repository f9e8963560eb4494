"""Run a model's Python code in a process of its own, with limits on time, memory and output, no network and no files but its own."""

import asyncio
import contextlib
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlgraph.errors import GraphError

CHILD = Path(__file__).with_name("sandbox_child.py")


@dataclass(frozen=True)
class Limits:
    """What one run may take: seconds, bytes of memory, bytes of output and of each file.

    Raises GraphError for a limit that is not above 0.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 8192
    file_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise GraphError(f"Limits({name}={value!r}): a limit is a number above 0")


class ToolError(Exception):
    """A call of a tool that gave no result; the message is what the model gets to read."""


async def run(code: str, limits: Limits) -> str:
    """Return what the code printed. Raises ToolError where it took too long, was killed, or printed too much."""
    with tempfile.TemporaryDirectory(prefix="tool-of-rlgraph-", ignore_cleanup_errors=True) as folder:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            str(CHILD),
            *(str(int(value)) for value in (limits.seconds + 1, limits.memory_bytes, limits.file_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"HOME": folder, "PATH": "", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            output = await asyncio.wait_for(_talk(child, code, limits.output_bytes), limits.seconds)
        except TimeoutError:
            raise ToolError(f"the code ran for more than {limits.seconds:g} s and was stopped") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            assert child.stdout is not None
            while await child.stdout.read(65536):  # to its end, which wait() waits for, and which is not read while the buffer is full
                pass
            await child.wait()
    return _judged(output, child.returncode, limits)


def check(limits: Limits) -> None:
    """Raise GraphError where code cannot be run so: another system than Linux, or a kernel that cannot wall it in."""
    if sys.platform != "linux":
        raise GraphError("the tool 'python' needs Linux 5.13 or newer, which keeps its code from files and network; leave the tool out")
    try:
        asyncio.run(run("", limits))
    except ToolError as error:
        raise GraphError(f"the tool 'python' cannot be run here: {error}; leave it out, or raise its limits") from None


async def _talk(child: asyncio.subprocess.Process, code: str, most: int) -> bytes:
    """Send the code, and return what comes back, at most one byte more than `most`."""
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


def _judged(output: bytes, code: int | None, limits: Limits) -> str:
    text = output[: limits.output_bytes].decode(errors="replace")
    if len(output) > limits.output_bytes:
        raise ToolError(f"{text}\n… the code printed more than {limits.output_bytes} bytes and was stopped")
    if code is not None and code < 0:
        raise ToolError(f"{text}\nthe code's process was killed by {signal.Signals(-code).name}".lstrip())
    if code:
        raise ToolError(f"the code could not be run: {text.strip()}")
    return text
