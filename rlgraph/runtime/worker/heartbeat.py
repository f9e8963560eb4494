"""What each worker does at this moment, in a few bytes of a file that worker and driver map: writing takes no message.

The driver reads it only when nothing was heard for a while, to say who keeps whom waiting.
"""

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rlgraph.plan.plan import Plan
from rlgraph.runtime.worker.activity import KINDS, Activity, described, event_name

NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
LAYOUT = struct.Struct("<dqqqqB255s255s")  # when, step, process, version, prompt, kind, node, edge
COUNTS = struct.Struct("<ii32s")


@dataclass(frozen=True)
class Heartbeat:
    """A worker's state: the step, the activity it began last, the seconds since then, and its progress: `done` of `total` `unit`."""

    step: int
    activity: Activity
    for_s: float
    done: int = 0
    total: int = 0
    unit: str = ""
    stopped: bool = False  # whether the process is stopped: by `kill -STOP`, Ctrl-Z or a debugger

    def __str__(self) -> str:
        return self.told()

    def told(self, plan: Plan | None = None) -> str:
        """Describe it in words; with a plan, also who is at the other end of the edge on which it waits."""
        counts = f" ({self.done} of {self.total} {self.unit})" if self.total else ""
        at = f", step {self.step}" if self.step >= 0 else ""
        stopped = " (its process is stopped)" if self.stopped else ""
        return f"{described(self.activity, plan)}{counts}{at}, for {self.for_s:.1f} s{stopped}"


class StatusWriter:
    """Writes the heartbeat of one worker."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(LAYOUT.size + COUNTS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LAYOUT.size + COUNTS.size)

    def enter(self, step: int, activity: Activity) -> None:
        """Write the activity that begins now."""
        COUNTS.pack_into(self._map, LAYOUT.size, 0, 0, b"")
        names = activity.node.encode(), activity.edge.encode()
        numbers = activity.version, activity.prompt, NUMBERS[activity.kind]
        LAYOUT.pack_into(self._map, 0, time.monotonic(), step, os.getpid(), *numbers, *names)

    def count(self, done: int, total: int, unit: str) -> None:
        """Write how far the activity is."""
        COUNTS.pack_into(self._map, LAYOUT.size, done, total, unit.encode())


def status_path(folder: str, worker: str) -> Path:
    """Name the file of a worker's heartbeat."""
    return Path(folder) / f"{quote(worker, safe='[]')}.status"


def read_status(folder: str, worker: str) -> Heartbeat | None:
    """Read what the worker of this host began last; None if it has begun nothing yet."""
    try:
        data = status_path(folder, worker).read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < LAYOUT.size + COUNTS.size:
        return None
    at_s, step, pid, version, prompt, kind, node, edge = LAYOUT.unpack_from(data)
    if not at_s:
        return None
    done, total, unit = COUNTS.unpack_from(data, LAYOUT.size)
    activity = Activity(KINDS[kind], _text(node), _text(edge), version, prompt)
    return Heartbeat(step, activity, time.monotonic() - at_s, done, total, _text(unit), stopped(pid))


def stopped(pid: int) -> bool:
    """Tell whether a process of this host is stopped, by a signal or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    except OSError:
        return False


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")


def under_way(states: Mapping[str, Heartbeat], plan: Plan) -> str:
    """Describe the workers' progress: `rollout 34 of 128 responses, update 2 of 6 micro-batches`. Ranks of one node are added up.
    Nodes without a count are named only if no node has one."""
    counts: dict[tuple[str, str], list[int]] = {}
    names: dict[str, None] = {}
    for state in states.values():
        if not state.activity.works:
            continue
        name = event_name(state.activity, plan)
        names[name] = None
        if state.total:
            found = counts.setdefault((name, state.unit), [0, 0])
            found[0], found[1] = found[0] + state.done, found[1] + state.total
    return ", ".join([f"{node} {done} of {total} {unit}" for (node, unit), (done, total) in counts.items()] or names)
