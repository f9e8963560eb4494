"""What each worker does at this moment, in a few bytes of a file that both sides map: writing costs no message.

The driver reads it only when nothing was heard for a while, to say who keeps whom waiting.
"""

import mmap
import os
import re
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rlgraph.planning.events import load_event, publish_event

BETWEEN = "idle between two steps"
WORK: tuple[tuple[str, Callable[..., str]], ...] = (
    (r"running node '(.*)'", str),
    (r"publishing version \d+ of '(.*)' \(", publish_event),
    (r"loading version \d+ of '(.*)' before node '(.*)'", load_event),
    (r"giving its engine the devices \('(.*)'\)", str),
    (r"taking the devices from its engine \('(.*)'\)", str),
)
LAYOUT = struct.Struct("<dqq240s")  # when, step, process, what
COUNTS = struct.Struct("<ii32s")


@dataclass(frozen=True)
class Doing:
    """What a worker began last: at which step, what, how many seconds ago, and how far it is: `done` of `total` `unit`, as responses."""

    step: int
    what: str
    for_s: float
    done: int = 0
    total: int = 0
    unit: str = ""
    stopped: bool = False  # whether its process gets no time at all: `kill -STOP`, Ctrl-Z or a debugger

    @property
    def idle(self) -> bool:
        return self.what == BETWEEN

    @property
    def waiting(self) -> bool:
        return self.what.startswith("waiting")

    @property
    def works(self) -> str | None:
        """The name of the event at work, as in spans: a node, weights that move, an engine that wakes or sleeps; None for a wait."""
        for pattern, name in WORK:
            if found := re.match(pattern, self.what):
                return name(*found.groups())
        return None

    def __str__(self) -> str:
        counts = f" ({self.done} of {self.total} {self.unit})" if self.total else ""
        told = f"{self.what}{counts}{f', step {self.step}' if self.step >= 0 else ''}, for {self.for_s:.1f} s"
        return f"{told} (its process is stopped)" if self.stopped else told


class StatusWriter:
    """A worker's side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LAYOUT.size + COUNTS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LAYOUT.size + COUNTS.size)

    def enter(self, step: int, what: str) -> None:
        """Say what begins now."""
        COUNTS.pack_into(self._map, LAYOUT.size, 0, 0, b"")
        LAYOUT.pack_into(self._map, 0, time.monotonic(), step, os.getpid(), what.encode()[:240])

    def count(self, done: int, total: int, unit: str) -> None:
        """Say how far that is."""
        COUNTS.pack_into(self._map, LAYOUT.size, done, total, unit.encode()[:32])


def status_path(folder: str, worker: str) -> Path:
    """Return the file in which a worker says what it does."""
    return Path(folder) / f"{quote(worker, safe='[]')}.status"


def read_status(folder: str, worker: str) -> Doing | None:
    """Return what the worker of this host began last, or None if it has begun nothing yet."""
    try:
        data = status_path(folder, worker).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < LAYOUT.size + COUNTS.size:
        return None
    at_s, step, pid, what = LAYOUT.unpack_from(data)
    done, total, unit = COUNTS.unpack_from(data, LAYOUT.size)
    return Doing(step, _text(what), time.monotonic() - at_s, done, total, _text(unit), stopped(pid)) if at_s else None


def stopped(pid: int) -> bool:
    """Whether a process of this host is stopped, by a signal or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def under_way(states: Mapping[str, Doing]) -> str:
    """What workers are at and how far: `rollout 34 of 128 responses, update 2 of 6 micro-batches`. Ranks of one node are counted
    together. Nodes that count nothing are named where none counts."""
    counts: dict[tuple[str, str], list[int]] = {}
    names: dict[str, None] = {}
    for doing in states.values():
        if doing.works is None:
            continue
        names[doing.works] = None
        if doing.total:
            found = counts.setdefault((doing.works, doing.unit), [0, 0])
            found[0], found[1] = found[0] + doing.done, found[1] + doing.total
    return ", ".join([f"{node} {done} of {total} {unit}" for (node, unit), (done, total) in counts.items()] or names)
