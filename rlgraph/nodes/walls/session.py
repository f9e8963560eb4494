"""The process that holds a sandbox between two runs: files stay, and each run is a separate process that enters the other layers.

Arguments as in `child`. It reads frames from its input and answers on its output: an operation and its length, then as many bytes; a
status, the length of what was printed, and that. It runs no code of a model itself, and ends with the process that started it.
"""

import _signal as signal  # as in `child`
import os
import resource
import select
import struct
import sys
import time

from . import child, spaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READY = b"ready\n"
REQUEST, ANSWER = ">cI", ">iI"
RUN, READ, WRITE = b"x", b"r", b"w"
TOO_LONG, TOO_MUCH = -1001, -1002  # statuses beside those of processes
MOST_FILE = 64 << 20  # bytes of a file that is read


def main() -> None:
    """Enter the namespaces, then serve."""
    seconds, memory, folder_bytes, output_bytes = (float(argument) for argument in sys.argv[1:5])
    accepted, packages, readable = sys.argv[5].split(","), sys.argv[6].split(os.pathsep), sys.argv[7:]
    sys.argv[:] = ["tool"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    child.die_with_parent()
    enclosed = child.layer("namespaces", accepted, lambda: spaces.enclose(readable, int(folder_bytes)))
    if enclosed:
        os.environ["HOME"] = spaces.FOLDER
        child.die_with_parent()  # again: a change of user clears it
        first = child.fork()
        if first:
            os.close(0)
            os.close(1)
            os.waitpid(first, 0)
            os._exit(0)
        child.die_with_parent()
    os.write(1, READY)

    def enter() -> None:
        child.die_with_parent()
        child.enter_inner_layers((int(seconds) + 1, int(memory), int(folder_bytes)), enclosed, accepted, packages, readable)

    while (head := _exactly(struct.calcsize(REQUEST))) is not None:
        operation, length = struct.unpack(REQUEST, head)
        body = _exactly(length)
        if body is None:
            break
        most = MOST_FILE if operation == READ else int(output_bytes)
        status, output = _run(operation, body, seconds, most, enter)
        _send(struct.pack(ANSWER, status, len(output)) + output)
    os._exit(0)


def _run(operation: bytes, body: bytes, seconds: float, most: int, enter: "Callable[[], None]") -> tuple[int, bytes]:
    """Do one operation in a separate process; kill it at its deadline, or if it prints too much."""
    out, into = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:  # the next operation may have room
        os.close(out)
        os.close(into)
        return child.EXIT_NO_SANDBOX, f"no process can be started ({error})".encode()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(into, 1)
        os.dup2(into, 2)
        os.closerange(3, 1 << 20)
        enter()
        _do(operation, body)
        raise SystemExit(0)  # the interpreter ends as after a program: it waits for threads
    os.close(into)
    output, status, end = b"", 0, time.monotonic() + seconds
    while len(output) <= most:
        left = end - time.monotonic()
        if left <= 0 or not select.select([out], [], [], left)[0]:
            status = TOO_LONG
            break
        part = os.read(out, 65536)
        if not part:
            break
        output += part
    if len(output) > most:
        status = TOO_MUCH
    os.close(out)
    ended = _wait_or_kill(pid, end if not status else 0.0)
    if ended is None:
        status = status or TOO_LONG
    return status or ended or 0, output[:most]


def _wait_or_kill(pid: int, end: float) -> "int | None":
    """Wait for a process, which has closed its output, until `end`; then kill it, and return None."""
    handle = os.pidfd_open(pid)
    try:
        if not select.select([handle], [], [], max(end - time.monotonic(), 0))[0]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    finally:
        os.close(handle)


def _do(operation: bytes, body: bytes) -> None:
    if operation == RUN:
        child.run(body.decode(errors="replace"))
        return
    name, _, data = body.partition(b"\0")
    try:
        if operation == READ:
            with open(name, "rb") as file:
                sys.stdout.buffer.write(file.read())
            sys.stdout.flush()
            return
        folder = os.path.dirname(name)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(data)
    except OSError as error:
        os.write(1, str(error).encode())
        os._exit(1)


def _exactly(length: int) -> "bytes | None":
    """Read this many bytes of the input; None at its end."""
    parts = b""
    while len(parts) < length:
        part = os.read(0, length - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _send(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]
