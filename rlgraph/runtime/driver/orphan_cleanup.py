"""Clean up after a killed driver, using the note in its job folder: its processes at once, its folders at the next start.

Other jobs are not touched.
"""

import contextlib
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rlgraph.nodes.environments.leases import began, namespaces

PREFIX = "rlgraph-job-"  # only of job folders: a model's code never writes into a folder with such a name
NOTE = "owner.json"
MOST_BYTES = 1 << 20  # of a note
SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")  # of a Compiled Graph, in /dev/shm, with the process id of the raylet
STARTING = b"ray/_private/workers/default_worker.py"  # in the command of Ray's workers until they set their title
SESSION = r"session_[0-9_-]+_{pid}"  # Ray's name for the folder of a Ray that process `pid` started, within a folder `ray`


class _Note(msgspec.Struct, frozen=True):
    owner: tuple[int, int]
    workers: tuple[tuple[int, int], ...]
    also: tuple[str, ...]
    namespaces: str = ""  # in which these ids and times are valid


def make_job_folder() -> str:
    """Make a folder for a job that no other user can enter, and return its path."""
    return tempfile.mkdtemp(prefix=PREFIX)


def claim(folder: Path, processes: Iterable[int], also: Iterable[str]) -> None:
    """Write the note into a job's folder: its owner, which is this process, the workers, and sessions of its Ray, `also`."""
    note = _Note(_birth(os.getpid()), tuple(_birth(pid) for pid in processes), tuple(also), namespaces())
    temporary = folder / f"{NOTE}.new"
    with open(temporary, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(msgspec.json.encode(note))
    temporary.rename(folder / NOTE)


def sweep_command() -> list[str]:
    """Build the command that cleans up once this process has ended. Ray's logs stay until the next start."""
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import sweep; sweep(folders=False)"
    return [sys.executable, "-c", code]


def sweep(*, folders: bool = True) -> list[str]:
    """End the workers, free the semaphores and remove the folders of drivers that have ended; return the removed folders.

    A note counts only in a folder that this library made: it belongs to this user, only this user can enter it, and it is not a link. A
    note from other namespaces, e.g. of a container that shares /tmp, is ignored: its processes are invisible here. Only this folder and
    the session of a Ray that the dead driver started are removed, whatever the note says.
    """
    swept = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(PREFIX + "*")):
        with contextlib.suppress(OSError), _open_own_folder(folder) as handle:
            note = _note(handle)
            if note is None or note.namespaces not in ("", namespaces()) or _lives(note.owner):
                continue
            for worker in note.workers:
                if _lives(worker):
                    os.kill(worker[0], signal.SIGKILL)
            sessions = [path for path in map(Path, note.also) if _is_session(path, note.owner[0])]
            for session in sessions:
                _end_starting_workers(session)
            for path in (*sessions, folder) if folders else ():
                swept += _remove_folder(path)
    free_semaphores()
    return swept


def _end_starting_workers(session: Path) -> None:
    """End the workers of a dead Ray that had not yet connected to it: they would wait for it for a minute."""
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = command.read_bytes()
            if command.stat().st_uid == os.getuid() and STARTING in words and bytes(session) in words:
                os.kill(int(command.parent.name), signal.SIGKILL)


def free_semaphores() -> None:
    """Remove the semaphores that a Compiled Graph leaves when its worker is killed, unless their raylet is alive."""
    for path in Path("/dev/shm").glob("sem.*"):
        made_by = SEMAPHORE.fullmatch(path.name)
        if made_by and began(int(made_by[1])) < 0:
            with contextlib.suppress(OSError):  # another user's
                path.unlink(missing_ok=True)


def _remove_folder(folder: Path) -> list[str]:
    """Remove a folder by its descriptor, so that a link that replaces it meanwhile is not followed."""
    with contextlib.suppress(OSError), _open_own_folder(folder, private=False) as handle:
        for name in os.listdir(handle):
            try:
                os.unlink(name, dir_fd=handle)  # before `rmtree`, which would open a worker's pipe and wait for a writer forever
            except OSError:
                shutil.rmtree(name, ignore_errors=True, dir_fd=handle)
        folder.rmdir()
        return [str(folder)]
    return []


def _is_session(path: Path, owner: int) -> bool:
    return path.parent.name == "ray" and path.is_absolute() and re.fullmatch(SESSION.format(pid=owner), path.name) is not None


@contextmanager
def _open_own_folder(folder: Path, *, private: bool = True) -> Iterator[int]:
    """Open a folder of this user. Raises OSError for a link, a folder of another user, and, if `private`, one that others may enter."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if found.st_uid != os.getuid() or (private and stat.S_IMODE(found.st_mode) != 0o700):
            raise PermissionError(f"{folder} was not made by this library")
        yield handle
    finally:
        os.close(handle)


def _note(folder: int) -> _Note | None:
    """Read the note in an open folder; None unless it is a plain file that only this user may write."""
    try:
        handle = os.open(NOTE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        own = found.st_uid == os.getuid() and found.st_nlink == 1 and not found.st_mode & 0o022
        if not own or not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            return None
        try:
            return msgspec.json.decode(file.read(MOST_BYTES), type=_Note)
        except msgspec.DecodeError:
            return None


def _birth(pid: int) -> tuple[int, int]:
    """Pair a process id with the time at which the process began, because the system reuses ids."""
    return pid, began(pid)


def _lives(birth: tuple[int, int]) -> bool:
    pid, began_at = birth
    return began_at >= 0 and began(pid) == began_at
