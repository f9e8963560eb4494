"""Leases: an environment's external resources are freed when its process is gone, even after SIGKILL.

A lease is a file in a folder that names its owner. A shell waits at the other end of a pipe that the owner never writes to. When the owner
ends, in whatever way, the shell runs this file, which frees the remaining resources. The next rollout on the host does so as well, in case
the shell was killed too. This file imports only the standard library, since it is run as a program.
"""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

PREFIX = "rlgraph-leases-"
RELEASE_S = 60.0  # of a command that frees something
# The program's process records its own line of /proc, and becomes the program: the lease exists before the program runs.
HELD = ("/bin/sh", "-c", 'read -r line < /proc/$$/stat && echo "$line" > "$0" && exec "$@"')
_LOCK = threading.Lock()
_MINE: dict[int, "_Folder"] = {}  # by process: a fork has no leases of its parent


class Lease:
    """A resource of this process. Call `end` after it has been freed in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def end(self) -> None:
        """Forget the lease; nothing is freed."""
        self.path.unlink(missing_ok=True)


class _Folder:
    """The leases of this process, and the shell that frees them once the process is gone."""

    def __init__(self) -> None:
        pid = os.getpid()
        self.path = Path(tempfile.gettempdir()) / f"{PREFIX}{os.getuid()}-{pid}-{began(pid)}-{namespaces()}"
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.count = 0
        command = ["/bin/sh", "-c", 'read -r _; exec "$@"', "sh", sys.executable, "-I", "-S", __file__, str(self.path)]
        quiet = subprocess.DEVNULL
        waits, self.pipe = os.pipe()  # this end of the pipe closes when this process is gone
        sweeper = subprocess.Popen(command, stdin=waits, stdout=quiet, stderr=quiet, cwd="/", start_new_session=True)
        os.close(waits)
        sweeper.returncode = 0  # not waited for: it outlives this process

    def next(self, kind: str) -> Path:
        self.count += 1
        return self.path / f"{self.count}.{kind}"


def lease(command: Sequence[str]) -> Lease:
    """Have a command run if this process ends without `end()`, to free a container, a remote sandbox or a session.

    >>> from rlgraph.nodes.environments.leases import lease
    >>> held = lease(["docker", "rm", "--force", "sandbox-17"])
    >>> held.end()  # it was removed in the usual way

    Create the lease before the resource, so that the process cannot die in between. The command runs once, in `/`, for up to 60 s.
    """
    path = _folder().next("command")
    path.write_text(json.dumps([str(word) for word in command]))
    return Lease(path)


def leased_command(command: Sequence[str]) -> tuple[list[str], Lease]:
    """Wrap the command of a child process, so that it and its process group end with this process. The lease ends with the child."""
    path = _folder().next("process")
    return [*HELD, str(path), *command], Lease(path)


def hold(pid: int) -> Lease:
    """Have a running process, and its process group, end with this process. End the lease when it has ended."""
    path = _folder().next("process")
    path.write_text(Path(f"/proc/{pid}/stat").read_text())
    return Lease(path)


def sweep() -> list[str]:
    """Free the resources of this user's processes that are gone. Returns the names of their folders."""
    found = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getuid()}-*")):
        pid, birth, *within = [*folder.name.removeprefix(f"{PREFIX}{os.getuid()}-").split("-"), ""]
        if within == [namespaces(), ""] and pid.isdigit() and birth.isdigit() and began(int(pid)) != int(birth) and free(folder):
            found.append(folder.name)
    return found


def free(folder: Path) -> bool:
    """Free the resources of a folder's leases, and remove the folder. False if it belongs to another user, or another process frees it."""
    mine = folder.with_name(f"{folder.name}-swept")
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700:
            return False
        folder.rename(mine)
        for path in sorted(mine.iterdir()):
            with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
                _free_one(path)
            path.unlink(missing_ok=True)
        mine.rmdir()
        return True
    return False


def began(pid: int) -> int:
    """Read when a process began, in ticks since the machine's start; -1 if it has ended."""
    try:
        return _birth_of(Path(f"/proc/{pid}/stat").read_text())[1]
    except (OSError, IndexError, ValueError):
        return -1


def namespaces() -> str:
    """Name the namespaces of this process's ids and times: in others, e.g. of a container that shares /tmp, they mean something else."""
    found = [Path(f"/proc/self/ns/{kind}") for kind in ("pid", "time")]
    return "+".join(str(path.stat().st_ino) for path in found if path.exists())


def _birth_of(line: str) -> tuple[int, int]:
    """The id of a process and when it began, from its line in /proc; -1 for a zombie."""
    name, _, rest = line.rpartition(")")
    fields = rest.split()
    return int(name.partition(" ")[0]), -1 if fields[0] == "Z" else int(fields[19])


def _free_one(path: Path) -> None:
    if path.suffix == ".command":
        command = json.loads(path.read_text())
        quiet = subprocess.DEVNULL
        subprocess.run(command, timeout=RELEASE_S, check=False, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet)
        return
    pid, birth = _birth_of(path.read_text())
    if began(pid) not in (birth, -1):
        return  # another process has its id
    try:
        os.killpg(pid, signal.SIGKILL)  # also if its leader has ended: no other process gets the id of a group
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)


def _folder() -> _Folder:
    with _LOCK:
        pid = os.getpid()
        if pid not in _MINE:
            _MINE.clear()
            _MINE[pid] = _Folder()
        return _MINE[pid]


if __name__ == "__main__":
    free(Path(sys.argv[1]))
