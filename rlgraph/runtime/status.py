"""What each worker does at this moment, in a few bytes of a file that both sides map: writing costs no message.

The driver reads it only when something is wrong, to say who keeps whom waiting.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

BETWEEN = "idle between two steps"
LAYOUT = struct.Struct("<dq240s")


@dataclass(frozen=True)
class Doing:
    """What a worker began last: at which step, what, and when on the machine's monotonic clock."""

    step: int
    what: str
    at_s: float


class StatusWriter:
    """A worker's side."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LAYOUT.size)

    def enter(self, step: int, what: str) -> None:
        """Say what begins now."""
        LAYOUT.pack_into(self._map, 0, time.monotonic(), step, what.encode()[:240])


def read_status(path: Path) -> Doing | None:
    """Return what the worker began last, or None if it has begun nothing yet."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) < LAYOUT.size:
        return None
    at_s, step, what = LAYOUT.unpack(data)
    return Doing(step, what.rstrip(b"\0").decode(errors="replace"), at_s) if at_s else None
