"""What each worker does at this moment, in a few bytes of a file that both sides map: writing costs no message.

The driver reads it only when nothing was heard for a while, to say who keeps whom waiting.
"""

import mmap
import re
import struct
import time
from collections.abc import Callable
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
LAYOUT = struct.Struct("<dq240s")


@dataclass(frozen=True)
class Doing:
    """What a worker began last: at which step, what, and how many seconds ago."""

    step: int
    what: str
    for_s: float

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
        return f"{self.what}{f', step {self.step}' if self.step >= 0 else ''}, for {self.for_s:.1f} s"


class StatusWriter:
    """A worker's side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LAYOUT.size)

    def enter(self, step: int, what: str) -> None:
        """Say what begins now."""
        LAYOUT.pack_into(self._map, 0, time.monotonic(), step, what.encode()[:240])


def status_path(folder: str, worker: str) -> Path:
    """Return the file in which a worker says what it does."""
    return Path(folder) / f"{quote(worker, safe='[]')}.status"


def read_status(folder: str, worker: str) -> Doing | None:
    """Return what the worker of this host began last, or None if it has begun nothing yet."""
    path = status_path(folder, worker)
    data = path.read_bytes() if path.exists() else b""
    if len(data) < LAYOUT.size:
        return None
    at_s, step, what = LAYOUT.unpack(data)
    return Doing(step, what.rstrip(b"\0").decode(errors="replace"), time.monotonic() - at_s) if at_s else None
