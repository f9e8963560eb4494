"""Runs a command, and ends all processes that it has started: when it ends, at its deadline, or when the requesting process is gone.

Arguments: seconds, the command. Its input is a pipe that closes when the other end is gone. It exits with the command's status, or 124 at
the deadline. It runs as a separate file and uses only Python's standard library.
"""

import ctypes
import os
import select
import signal
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
DEADLINE, NOT_FOUND, KILLED = 124, 127, 128
ENDING_S = 10.0


def main() -> None:
    seconds, command = float(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned processes become children of this process
    child = os.fork()
    if not child:
        _execute(libc, command)
    handle = os.pidfd_open(child)
    ready, _, _ = select.select([0, handle], [], [], seconds)
    status = DEADLINE
    if handle in ready:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status = code if code >= 0 else KILLED - code
    _end_all()
    os._exit(status)


def _execute(libc: ctypes.CDLL, command: list[str]) -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.stderr.flush()
    os._exit(NOT_FOUND)


def _end_all() -> None:
    """Kill the children of this process until it has none; children of killed processes become its own."""
    end = time.monotonic() + ENDING_S
    while time.monotonic() < end:
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.002)


def _children() -> list[int]:
    mine, found = str(os.getpid()), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = file.read().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if parent == mine:
                found.append(int(name))
    return found


if __name__ == "__main__":
    main()
