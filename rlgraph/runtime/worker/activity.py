"""What a worker does at a moment, as a value, and the few mapped bytes in which it tells the driver without a message."""

import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rlgraph.plan.events import load_event, publish_event, sleep_event, wake_event
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.runtime.worker.spec import file_name

# What a worker does at a moment, as a value. Words are made where a person reads them; nothing parses them back.

ActivityKind: TypeAlias = Literal[
    "idle", "open", "connect", "load_engine", "fire", "probe", "take", "put", "receive", "publish", "load", "wake", "sleep", "export"
]
KINDS: tuple[ActivityKind, ...] = get_args(ActivityKind)
WAITS: frozenset[ActivityKind] = frozenset(("take", "put", "receive"))
WORKS: frozenset[ActivityKind] = frozenset(("fire", "publish", "load", "wake", "sleep"))  # each has an event in the plan


@dataclass(frozen=True)
class Activity:
    """The activity that a worker began last: its `node`, its `edge` (a channel or a feedback edge), and its `version` of the weights.

    `idle` lies between two steps; `open`, `connect` and `load_engine` before the first. `take` waits for a message, `put` for room,
    `receive` for a version. `export` lies between two steps. `probe` fires a node for one prompt alone, whose number in the batch is
    `prompt`. The others are events of the plan.

    >>> str(Activity("take", "update", "rollout")), str(Activity("load", "rollout", "weights", 3))
    ("waiting for channel 'rollout'", "loading version 3 of 'weights' before node 'rollout'")
    """

    kind: ActivityKind
    node: str = ""
    edge: str = ""
    version: int = 0
    prompt: int = 0

    @property
    def idle(self) -> bool:
        return self.kind == "idle"

    @property
    def waits(self) -> bool:
        """Whether the worker waits for another one and does nothing else."""
        return self.kind in WAITS

    @property
    def works(self) -> bool:
        """Whether it is an event of the plan: a node fires, weights move, an engine wakes or sleeps."""
        return self.kind in WORKS

    def __str__(self) -> str:
        return describe_activity(self)


IDLE = Activity("idle")


def describe_activity(activity: Activity, plan: Plan | None = None) -> str:
    """Describe an activity in words; with a plan they name who is at the other end of its edge, too."""
    node, edge, version = activity.node, activity.edge, activity.version
    end = edge_of(plan, activity) if plan is not None else None
    readers = f" (read by {list(end.readers)})" if end is not None else ""
    match activity.kind:
        case "idle":
            return "idle between two steps"
        case "open":
            return "opening its channels"
        case "connect":
            return "connecting to its channels"
        case "load_engine":
            return "loading its engine"
        case "fire":
            return f"running node '{node}'"
        case "probe":
            return f"trying prompt {activity.prompt} alone in node '{node}'"
        case "take":
            return f"waiting for channel '{edge}'" + (f" (written by node '{end.writer}')" if end is not None else "")
        case "put":
            return f"waiting for room in channel '{edge}'{readers}"
        case "receive":
            return f"waiting for version {version} of '{edge}'" + (f" (published by node '{end.writer}')" if end is not None else "")
        case "publish":
            return f"publishing version {version} of '{edge}'{readers}"
        case "load":
            return f"loading version {version} of '{edge}' before node '{node}'"
        case "wake":
            return f"giving its engine the devices ('{wake_event(node)}')"
        case "export":
            return "writing its shards of an export"
        case "sleep":
            return f"taking the devices from its engine ('{sleep_event(node)}')"


def event_name(activity: Activity, plan: Plan) -> str:
    """Name work for counts and warnings: by its node, whichever chunk of a batch it fires for, else by its event."""
    match activity.kind:
        case "publish":
            return publish_event(activity.edge)
        case "load":
            end = edge_of(plan, activity)
            return load_event(activity.edge, activity.node, apart=isinstance(end, PlannedLoop) and end.due is not None)
        case "wake":
            return wake_event(activity.node)
        case "sleep":
            return sleep_event(activity.node)
        case _:
            return activity.node


def edge_of(plan: Plan, activity: Activity) -> PlannedChannel | PlannedLoop | None:
    """Find the channel or the feedback edge of an activity; None if it has none, or the plan does not know it."""
    ends = plan.channels if activity.kind in ("take", "put") else plan.loops
    return next((end for end in ends if end.name == activity.edge), None)


# What each worker does at this moment, in a few bytes of a file that worker and driver map: writing takes no message.
#
# The driver reads it only when nothing was heard for a while, to say who keeps whom waiting.

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
        return self.describe()

    def describe(self, plan: Plan | None = None) -> str:
        """Describe it in words; with a plan, also who is at the other end of the edge on which it waits."""
        counts = f" ({self.done} of {self.total} {self.unit})" if self.total else ""
        at = f", step {self.step}" if self.step >= 0 else ""
        stopped = " (its process is stopped)" if self.stopped else ""
        return f"{describe_activity(self.activity, plan)}{counts}{at}, for {self.for_s:.1f} s{stopped}"


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
    return Path(folder) / f"{file_name(worker)}.status"


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
    return Heartbeat(step, activity, time.monotonic() - at_s, done, total, _text(unit), is_stopped(pid))


def is_stopped(pid: int) -> bool:
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
