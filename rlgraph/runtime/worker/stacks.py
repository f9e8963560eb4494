"""The Python stacks of a worker that is stuck: it writes them itself when it gets a signal, even inside of C code.

The handler needs neither the interpreter's lock nor a thread that is free, so a blocking poll or an endless kernel is no obstacle.
"""

import contextlib
import faulthandler
import os
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from rlgraph.runtime.worker.activity import is_stopped
from rlgraph.runtime.worker.spec import file_name

SIGNAL = signal.SIGRTMIN + 9  # one that neither Ray, torch nor users' code takes
ANSWER_S = 5.0  # for the answers of all workers; on a machine that is overloaded a process may wait this long for a core
QUIET_S = 0.3  # after the last line: an answer has no mark of its end
MOST_BYTES = 1 << 16  # what a pipe holds
_handles: list[int] = []  # of this process, at most one


def _pipe(folder: str, worker: str) -> Path:
    return Path(folder) / f"{file_name(worker)}.stacks"


def offer_stacks(folder: str, worker: str) -> None:
    """Let this process write its stacks into a pipe in the job's folder whenever it gets the signal."""
    path = _pipe(folder, worker)
    os.mkfifo(path, 0o600)
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # never blocks, and needs no reader to be there
    faulthandler.register(SIGNAL, file=handle, all_threads=True)
    for earlier in _handles:  # of a job that this process served before
        os.close(earlier)
    _handles[:] = [handle]


def read_stacks(folder: str, pids: Mapping[str, int]) -> dict[str, str]:
    """Ask all workers of this host at once for the stacks of their threads; without an answer the reason stands in their place."""
    found: dict[str, bytes] = {}
    handles: dict[int, str] = {}
    silent = dict.fromkeys(pids, "(it has not begun)")
    try:
        for worker, pid in pids.items():
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(_pipe(folder, worker), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                handles[handle] = worker
                _drain(handle)  # an earlier call may have left bytes in the pipe
                silent[worker] = "(no answer: its process does not run, or the machine is overloaded)"
                if is_stopped(pid):  # it would never answer
                    silent[worker] = "(its process is stopped)"
                    os.close(handle)
                    del handles[handle]
                    continue
                try:
                    os.kill(pid, SIGNAL)
                except ProcessLookupError:
                    silent[worker] = "(its process has ended)"
                    os.close(handle)
                    del handles[handle]
        _collect(handles, found)
    finally:
        for handle in handles:
            os.close(handle)
    return {worker: found.get(worker, b"").decode(errors="replace").strip() or why for worker, why in silent.items()}


def _collect(handles: Mapping[int, str], found: dict[str, bytes]) -> None:
    """Read until all have answered and are quiet, at most for the time that an answer may take."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    end = time.monotonic() + ANSWER_S
    while (left_s := end - time.monotonic()) > 0:
        answered = len(found) == len(handles) and all(answer.endswith(b"\n") for answer in found.values())
        ready = poll.poll(1000 * (QUIET_S if answered else left_s))  # a line is written in pieces, by a thread that may have to wait
        if not ready:
            return
        for handle, _ in ready:
            found[handles[handle]] = found.get(handles[handle], b"") + _drain(handle)


def _drain(handle: int) -> bytes:
    try:
        return os.read(handle, MOST_BYTES)
    except BlockingIOError:
        return b""


def of_interest(stacks: str) -> str:
    """Keep the threads that run code of a node or of rlgraph; the others are Ray's, and only wait."""
    threads = stacks.split("\n\n")
    ours = [thread for thread in threads if "/rlgraph/" in thread]
    return "\n\n".join(ours or threads)
