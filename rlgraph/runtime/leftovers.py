"""What a killed driver leaves behind: found at the next start by the note that it kept, and swept. Never another job's."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path

import msgspec

PREFIX = "rlgraph-"
NOTE = "owner.json"


class _Note(msgspec.Struct, frozen=True):
    owner: tuple[int, int]
    workers: tuple[tuple[int, int], ...]
    also: tuple[str, ...]


def claim(folder: Path, processes: Iterable[int], also: Iterable[str]) -> None:
    """Note whose a job's folder is: this process, the workers, and what else of its own would be left, `also`."""
    note = _Note(_birth(os.getpid()), tuple(_birth(pid) for pid in processes), tuple(also))
    temporary = folder / f"{NOTE}.new"
    temporary.write_bytes(msgspec.json.encode(note))
    temporary.rename(folder / NOTE)


def sweep() -> list[str]:
    """End the workers and remove the folders of drivers that are gone; return what was removed.

    A folder without a note, of another user, or of a process that lives is left alone.
    """
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        note = _note(folder)
        if note is None or _lives(note.owner):
            continue
        for worker in note.workers:
            if _lives(worker):
                os.kill(worker[0], signal.SIGKILL)
        for path in (*note.also, str(folder)):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path)
    return swept


def _note(folder: Path) -> _Note | None:
    try:
        if folder.stat().st_uid != os.getuid():
            return None
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=_Note)
    except (OSError, msgspec.DecodeError):
        return None


def _birth(pid: int) -> tuple[int, int]:
    """Return a process id with the time at which it began, in ticks since the machine's start: ids are used again."""
    return pid, _began(pid)


def _began(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[19])


def _lives(birth: tuple[int, int]) -> bool:
    pid, began = birth
    return began >= 0 and _began(pid) == began
