"""Calls of environments: coroutines in an event loop of their own, each with a deadline; a loop picks up their results.

Thousands of waiting calls take one thread. A call that blocks the loop is found by a heartbeat: the loop is given up with all calls in
it, and later calls run in a new one.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
BLOCKED_S = 30.0  # without a heartbeat of the event loop, until it is given up
BEAT_S = 1.0  # between two heartbeats

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


class EnvironmentCalls:
    """Runs calls, and returns those that have ended. `wake` is called from another thread when one has."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._ended: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._running: dict[Call, Future[None]] = {}
        self._loop, self._thread = _new_loop()
        self._asked = self._beat = time.monotonic()

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, call: Call, function: Callable[[], Awaitable[Any]], deadline_s: float) -> None:
        """Start a call. It ends with what the function returns or raises, or at its deadline."""
        if not self._running:
            self._asked = self._beat = time.monotonic()
        self._running[call] = Future()  # before it may begin
        self._running[call] = asyncio.run_coroutine_threadsafe(self._run(call, function, deadline_s), self._loop)

    def cancel(self, kinds: Collection[str]) -> None:
        """Give up the calls of these kinds."""
        for call in [call for call in self._running if call.kind in kinds]:
            self._running.pop(call).cancel()

    def ended(self, wait_s: float) -> list[Call]:
        """Take the calls that have ended; wait up to `wait_s` for the first."""
        found: list[Call] = []
        while self._running:
            try:
                call = self._ended.get(timeout=0 if found else wait_s) if wait_s else self._ended.get_nowait()
            except queue.Empty:
                return found + self._blocked()
            if call in self._running:  # not one of a loop that was given up
                del self._running[call]
                found.append(call)
        return found

    async def _run(self, call: Call, function: Callable[[], Awaitable[Any]], deadline_s: float) -> None:
        start = time.monotonic()
        try:
            call.value = await within(self._begun(call, function), deadline_s)
        except _PastDeadline:
            call.failed, call.reason = "timeouts", f"{call.kind} took longer than {deadline_s:g} s"
        except Exception as error:  # noqa: BLE001 (a user's environment: whatever it raises ends its conversation alone)
            call.failed, call.reason = "errors", f"{call.kind} raised {type(error).__name__}: {error!s:.300}"
        call.seconds = time.monotonic() - start
        self._ended.put(call)
        self._wake()

    async def _begun(self, call: Call, function: Callable[[], Awaitable[Any]]) -> Any:
        if call in self._running:  # else this loop was given up
            self._beat = time.monotonic()  # of calls that begin together each takes its time before the loop hears of a heartbeat
        return await _guarded(function)

    def _blocked(self) -> list[Call]:
        """Ask the event loop for a heartbeat. If it has given none for long, give it up, and end all its calls."""
        now = time.monotonic()
        if self._beat >= self._asked:
            if now - self._asked > BEAT_S:
                self._asked = now
                self._loop.call_soon_threadsafe(self._heard)
            return []
        if now - self._asked <= BLOCKED_S:
            return []
        lost, self._running = list(self._running), {}
        self._loop, self._thread = _new_loop()
        self._asked = self._beat = now
        for call in lost:
            call.failed = "blocked"
            call.reason = f"a call has blocked the event loop for {BLOCKED_S:g} s: await what takes time, or use a thread"
        return lost

    def _heard(self) -> None:
        self._beat = time.monotonic()


class _PastDeadline(TimeoutError):
    """A call missed its deadline."""


async def within(awaited: Awaitable[T], deadline_s: float) -> T:
    """Await something for `deadline_s` seconds. Unlike `asyncio.wait_for` it does not wait for a task that ignores its cancellation.

    Raises TimeoutError at the deadline.
    """
    task = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        task.add_done_callback(lambda late: late.cancelled() or late.exception())  # so that asyncio does not report it
        raise _PastDeadline
    return task.result()


async def _guarded(function: Callable[[], Awaitable[Any]]) -> Any:
    """Call the function. What would end the event loop, as `sys.exit`, becomes an error of this call."""
    try:
        return await function()
    except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _new_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="environments", daemon=True)
    thread.start()
    return loop, thread
