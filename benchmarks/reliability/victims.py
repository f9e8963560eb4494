"""Choose the process of a Ray run to kill: found by a mark in its environment, drawn by its role."""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

MARK = "RLGRAPH_FAULTS_RUN"
VICTIMS = ("driver", "raylet", "worker")


def processes(folder: Path) -> list[tuple[str, int]]:
    """Find the live processes of a run, by the mark in their environment: what each is, and its id."""
    return [(_name(pid), pid) for pid in _marked(str(folder).encode())]


def _marked(mark: bytes) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}=".encode() + mark in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)
        except OSError:
            continue


def _name(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "gone"
    for part, name in (
        ("kills.py drive", "driver"),
        ("ray::WorkerProcess", "worker"),
        ("gcs_server", "gcs_server"),
        ("raylet/raylet", "raylet"),
    ):
        if part in command:
            return name
    return "another of Ray's"


def chosen(there: Sequence[tuple[str, int]], draw: random.Random, of: Sequence[str] = ()) -> tuple[str, int] | None:
    """Draw whom to kill: a worker, the driver or the raylet as often as one another, now and then another of Ray's processes.

    With `of`, only processes of these kinds; None where there is none.
    """
    kinds = sorted({name for name, _ in there if not of or name in of})
    if of and not kinds:
        return None
    wanted = kinds if of or draw.random() >= 0.9 else [kind for kind in kinds if kind in VICTIMS]
    kind = draw.choice(wanted or kinds)
    return draw.choice(sorted(victim for victim in there if victim[0] == kind))


def kill(victim: int) -> None:
    """End a process at once, if it is still there."""
    try:
        os.kill(victim, signal.SIGKILL)
    except ProcessLookupError:
        return
