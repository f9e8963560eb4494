"""Record what a worker does: its current activity as a value, its time as spans, and its Python stacks when it is stuck.

The worker writes its activity to a few mapped bytes, which the driver reads without a message. Spans cover every moment of a step.
A stuck worker writes its stacks itself when it receives a signal, even inside C code: the handler needs neither the interpreter's lock
nor a free thread, so it works during a blocking poll or an endless kernel.
"""

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rlgraph.plan.events import load_event, publish_event, sleep_event, wake_event
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.plan.schedule import Span, SpanKind
from rlgraph.runtime.worker.spec import file_name

# A worker's current activity, as a value. It becomes text only for people; no code parses the text.

ActivityKind: TypeAlias = Literal[
    "idle", "open", "connect", "load_engine", "fire", "probe", "take", "put", "receive", "publish", "load", "wake", "sleep", "export"
]
KINDS: tuple[ActivityKind, ...] = get_args(ActivityKind)
WAITS: frozenset[ActivityKind] = frozenset(("take", "put", "receive"))
WORKS: frozenset[ActivityKind] = frozenset(("fire", "publish", "load", "wake", "sleep"))  # each has an event in the plan


@dataclass(frozen=True)
class Activity:
    """The activity that a worker began last: its `node`, its `edge` (a channel or a feedback edge), and its `version` of the weights.

    `idle` and `export` are between two steps; `open`, `connect` and `load_engine` are before the first. `take` waits for a message, `put`
    for room, `receive` for a version. `probe` fires a node for a single prompt, whose index in the batch is `prompt`. The others are events
    of the plan.

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
        """Whether the worker only waits for another one."""
        return self.kind in WAITS

    @property
    def works(self) -> bool:
        """Whether it is an event of the plan: a node fires, weights move, an engine wakes or sleeps."""
        return self.kind in WORKS

    def __str__(self) -> str:
        return describe_activity(self)


IDLE = Activity("idle")


def describe_activity(activity: Activity, plan: Plan | None = None) -> str:
    """Describe an activity in words; with a plan, also name the workers at the other end of its edge."""
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
    """Name work for counts and warnings: after its node, for any chunk of a batch, otherwise after its event."""
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


# The current activity of each worker, in a few bytes of a file that worker and driver map, so that writing needs no message.
#
# The driver reads it only after a time without messages, to find which worker keeps others waiting.

NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
LAYOUT = struct.Struct("<dqqqqB255s255s")  # when, step, process, version, prompt, kind, node, edge
COUNTS = struct.Struct("<ii32s")


@dataclass(frozen=True)
class Heartbeat:
    """A worker's state: the step, the activity that it began last, the seconds since then, and its progress: `done` of `total` `unit`."""

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
        """Describe it in words; with a plan, also name the workers at the other end of the edge for which it waits."""
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
        """Write the progress of the activity."""
        COUNTS.pack_into(self._map, LAYOUT.size, done, total, unit.encode())


def status_path(folder: str, worker: str) -> Path:
    """Name the file of a worker's heartbeat."""
    return Path(folder) / f"{file_name(worker)}.status"


def read_status(folder: str, worker: str) -> Heartbeat | None:
    """Read the activity that a worker of this host began last; None if it has not begun any."""
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
    """Whether a process of this host is stopped, by a signal or a debugger."""
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


# The Python stacks of a stuck worker, which writes them itself when it receives a signal, even inside C code.

SIGNAL = signal.SIGRTMIN + 9  # a signal that neither Ray nor torch nor users' code handles
ANSWER_S = 5.0  # for the answers of all workers; on an overloaded machine a process may wait this long for a core
QUIET_S = 0.3  # after the last line: an answer has no end mark
MOST_BYTES = 1 << 16  # capacity of a pipe
_handles: list[int] = []  # of this process, at most one


def _pipe(folder: str, worker: str) -> Path:
    return Path(folder) / f"{file_name(worker)}.stacks"


def offer_stacks(folder: str, worker: str) -> None:
    """Let this process write its stacks into a pipe in the job's folder whenever it receives the signal."""
    path = _pipe(folder, worker)
    os.mkfifo(path, 0o600)
    handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # never blocks, also without a reader
    faulthandler.register(SIGNAL, file=handle, all_threads=True)
    for earlier in _handles:  # of an earlier job of this process
        os.close(earlier)
    _handles[:] = [handle]


def read_stacks(folder: str, pids: Mapping[str, int]) -> dict[str, str]:
    """Ask all workers of this host at once for the stacks of their threads; without an answer, return the reason instead."""
    found: dict[str, bytes] = {}
    handles: dict[int, str] = {}
    silent = dict.fromkeys(pids, "(it has not begun)")
    try:
        for worker, pid in pids.items():
            with contextlib.suppress(FileNotFoundError):
                handle = os.open(_pipe(folder, worker), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                handles[handle] = worker
                _drain(handle)  # an earlier call may have left bytes in the pipe
                silent[worker] = "(no answer: its process does not run, or the machine is overloaded)"
                if is_stopped(pid):  # it would not answer
                    silent[worker] = "(its process is stopped)"
                    os.close(handle)
                    del handles[handle]
                    continue
                try:
                    os.kill(pid, SIGNAL)
                except ProcessLookupError:
                    silent[worker] = "(its process has ended)"
                    os.close(handle)
                    del handles[handle]
        _collect(handles, found)
    finally:
        for handle in handles:
            os.close(handle)
    return {worker: found.get(worker, b"").decode(errors="replace").strip() or why for worker, why in silent.items()}


def _collect(handles: Mapping[int, str], found: dict[str, bytes]) -> None:
    """Read until all workers have answered and are quiet, for at most `ANSWER_S`."""
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    end = time.monotonic() + ANSWER_S
    while (left_s := end - time.monotonic()) > 0:
        answered = len(found) == len(handles) and all(answer.endswith(b"\n") for answer in found.values())
        ready = poll.poll(1000 * (QUIET_S if answered else left_s))  # a line is written in pieces, by a thread that may have to wait
        if not ready:
            return
        for handle, _ in ready:
            found[handles[handle]] = found.get(handles[handle], b"") + _drain(handle)


def _drain(handle: int) -> bytes:
    try:
        return os.read(handle, MOST_BYTES)
    except BlockingIOError:
        return b""


def of_interest(stacks: str) -> str:
    """Keep the threads that run a node's or rlgraph's code; the others belong to Ray, and only wait."""
    threads = stacks.split("\n\n")
    ours = [thread for thread in threads if "/rlgraph/" in thread]
    return "\n\n".join(ours or threads)


# Record how a worker spends its time: one span after another, so that every moment of a step has a name.

ABSORBED_S = 20e-6  # a shorter gap joins the next span, because recording it would last about as long


class SpanRecorder:
    """A worker's spans. The caller names the time in `span`; the time between two of them counts as rlgraph's work.

    Spans can nest, as when weights are loaded while a node decodes.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._spans: list[Span] = []
        self._until_s = time.monotonic()  # all earlier time is recorded
        self._started = False
        self._open = 0

    def begin(self, step: int) -> None:
        """Record the time since the last firing as idle; before the first firing the job was starting."""
        self._close("between steps" if self._started else "start-up", "idle" if self._started else "start", step)
        self._started = True

    def carry(self, node: str, step: int) -> None:
        """Record the time since the last span as work around a node: checks, copies, releasing slots."""
        self._close(node, "carry", step)

    @contextmanager
    def span(self, name: str, kind: SpanKind, step: int, version: int | None = None) -> Iterator[list[int]]:
        """Time a block, also one that raises. The block appends the bytes that it moved to the list that this yields."""
        start_s, moved = self._enter(), list[int]()
        try:
            yield moved
        finally:
            self._leave()
            self._add(name, kind, step, start_s, time.monotonic(), version, sum(moved) or None)

    @contextmanager
    def time_transfer(
        self,
        name: str,
        blocked: SpanKind,
        blocked_s: Callable[[], float],
        then: tuple[str, SpanKind],
        step: int,
        version: int | None = None,
    ) -> Iterator[None]:
        """Time a block that waits on channel `name` and moves data: the growth of `blocked_s` is the wait, the rest is `then`."""
        start_s, before_s = self._enter(), blocked_s()
        try:
            yield
        finally:
            self._leave()
            now = time.monotonic()
            moved_s = min(start_s + max(blocked_s() - before_s, 0.0), now)
            self._add(name, blocked, step, start_s, moved_s, version)
            self._add(*then, step, moved_s, now, version)

    def _enter(self) -> float:
        """Open a span and return its start: the end of the previous span, or now if it is nested."""
        self._open += 1
        return self._until_s if self._open == 1 else time.monotonic()

    def _leave(self) -> None:
        self._open -= 1

    def _close(self, name: str, kind: SpanKind, step: int) -> None:
        now = time.monotonic()
        if now - self._until_s > ABSORBED_S:
            self._add(name, kind, step, self._until_s, now)

    def _add(
        self, name: str, kind: SpanKind, step: int, start_s: float, end_s: float, version: int | None = None, size: int | None = None
    ) -> None:
        if end_s > start_s:
            self._spans.append(Span(name, kind, step, self.worker, start_s, end_s, version, size))
        if not self._open:
            self._until_s = end_s

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans, self._spans = self._spans, []
        return spans
