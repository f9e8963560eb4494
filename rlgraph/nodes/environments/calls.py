"""Calls of environments: coroutines in a separate event loop, each with a deadline; a loop collects their results.

Thousands of waiting calls use one thread. A heartbeat detects a call that blocks the loop: the loop is abandoned with all its calls, and
later calls run in a new loop.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

BLOCKED_S = 30.0  # without a heartbeat of the event loop, until it is abandoned
BEAT_S = 1.0  # between two heartbeats

T = TypeVar("T")
Failure = Literal["errors", "timeouts", "blocked"]


@dataclass(eq=False)
class Call:
    """A call for `owner`, and its result: a value, or why it `failed` and what the `reason` was."""

    owner: Any
    kind: str
    value: Any = None
    failed: Failure | None = None
    reason: str = ""
    seconds: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class _Begun:
    """A call that waits to be handed to the event loop."""

    call: Call
    function: Callable[[], Awaitable[Any]]
    deadline_s: float


class EnvironmentCalls:
    """Runs calls, and returns finished ones. Another thread calls `wake` when a call has finished.

    The event loop receives the calls that began between two decode steps together. Each turn of the event loop needs the interpreter's lock
    of the decoding thread, so a call is only one task and one timer, with as few turns as possible.
    """

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._ended: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._begun: list[_Begun] = []
        self._running: dict[Call, None] = {}  # in the order in which they began
        self._loop, self._thread = _new_loop()
        self._asked = self._beat = time.monotonic()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, call: Call, function: Callable[[], Awaitable[Any]], deadline_s: float) -> None:
        """Queue a call for the next `send`. It ends with what the function returns or raises, or at its deadline."""
        if not self._running:
            self._asked = self._beat = time.monotonic()
        self._running[call] = None
        self._begun.append(_Begun(call, function, deadline_s))

    def send(self) -> None:
        """Start the calls that have begun."""
        if self._begun:
            begun, self._begun = self._begun, []
            self._loop.call_soon_threadsafe(self._start, begun)

    def cancel(self, kinds: Collection[str]) -> None:
        """Give up the calls of these kinds."""
        gone = [call for call in self._running if call.kind in kinds]
        for call in gone:
            del self._running[call]
        self._loop.call_soon_threadsafe(_cancel, gone)

    def take_finished_calls(self, wait_s: float) -> list[Call]:
        """Collect the finished calls; wait up to `wait_s` for the first."""
        self.send()
        found: list[Call] = []
        while self._running:
            try:
                call = self._ended.get(timeout=0 if found else wait_s) if wait_s else self._ended.get_nowait()
            except queue.Empty:
                return found + self._check_heartbeat()
            if call in self._running:  # not a call of an abandoned loop
                del self._running[call]
                found.append(call)
        return found

    def _start(self, begun: Sequence[_Begun]) -> None:
        """Make the tasks of calls; in the event loop."""
        for one in begun:
            if one.call in self._running:  # else it was given up
                one.call.task = asyncio.get_running_loop().create_task(self._run(one))

    async def _run(self, begun: _Begun) -> None:
        call, start = begun.call, time.monotonic()
        if call in self._running:  # else this loop was abandoned
            self._beat = start  # if calls begin together, each runs for a while before the loop handles a heartbeat
        timer = asyncio.get_running_loop().call_later(begun.deadline_s, self._late, begun, start)
        value, raised = None, ""
        try:
            value = await begun.function()
        except BaseException as error:  # noqa: BLE001 (a user's environment: its error ends only its conversation)
            raised = f"{call.kind} raised {type(error).__name__}: {error!s:.300}"
        timer.cancel()
        call.task = None
        if call.failed is None:  # else it is past its deadline, or this loop was given up
            call.value, call.failed, call.reason = value, "errors" if raised else None, raised
            self._end(call, start)

    def _late(self, begun: _Begun, start: float) -> None:
        """End a call at its deadline, without waiting for code that ignores its cancellation."""
        call = begun.call
        call.failed, call.reason = "timeouts", f"{call.kind} took longer than {begun.deadline_s:g} s"
        self._end(call, start)
        _cancel([call])

    def _end(self, call: Call, start: float) -> None:
        call.seconds = time.monotonic() - start
        self._ended.put(call)
        self._wake()

    def _check_heartbeat(self) -> list[Call]:
        """Ask the event loop for a heartbeat. If it has sent none for long, abandon it, and end all its calls."""
        now = time.monotonic()
        if self._beat >= self._asked:
            if now - self._asked > BEAT_S:
                self._asked = now
                self._loop.call_soon_threadsafe(self._beat_now)
            return []
        if now - self._asked <= BLOCKED_S:
            return []
        lost, self._running, self._begun = list(self._running), {}, []
        self._loop, self._thread = _new_loop()
        self._asked = self._beat = now
        for call in lost:
            call.failed = "blocked"
            call.reason = f"a call has blocked the event loop for {BLOCKED_S:g} s: await what takes time, or use a thread"
        return lost

    def _beat_now(self) -> None:
        self._beat = time.monotonic()


def _cancel(calls: Sequence[Call]) -> None:
    """Cancel the tasks of calls; in their event loop."""
    for call in calls:
        if call.task is not None:
            call.task.cancel()


def _new_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run_on, args=(loop,), name="environments", daemon=True)
    thread.start()
    return loop, thread


def _run_on(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop until it is stopped. A task that calls `sys.exit` ends only itself, not the loop of the others."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of a thread, since the caller may have its own, e.g. a notebook."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
