"""Concurrent calls of a user's function, each within a deadline. An error names the failed call by its place."""

import asyncio
import functools
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Arguments = Mapping[str, object]


class CallFailed(Exception):
    """The call at `place` raised, or did not return in time. `__cause__` is the exception that it raised."""

    def __init__(self, place: int, what: str) -> None:
        super().__init__(what)
        self.place, self.what = place, what


@dataclass(frozen=True)
class Returned:
    """The result of one call: a value, or the exception that it raised."""

    place: int
    value: object = None
    error: BaseException | None = None


@dataclass
class FunctionPool:
    """Call a user's function for each of `arguments`, at most `concurrency` calls at a time. Used once.

    A plain function runs on threads; an `async def` one in an event loop, where a waiting call holds no thread. The threads are
    daemons, so that one that hangs keeps no process alive.
    """

    function: Callable[..., object]
    arguments: Sequence[Arguments]
    concurrency: int
    deadline_s: float
    begun: dict[int, float] = field(default_factory=dict)
    returned: "queue.SimpleQueue[Returned]" = field(default_factory=queue.SimpleQueue)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> list[object]:
        """Make all calls; the results are in the order of `arguments`. Raises CallFailed for the first call that fails."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(len(self.arguments)):
            waiting.put(place)
        if inspect.iscoroutinefunction(self.function):
            asyncio.run_coroutine_threadsafe(self._all(), event_loop())
        else:
            for _ in range(min(self.concurrency, len(self.arguments))):
                threading.Thread(target=self._thread, args=(waiting,), name="calls", daemon=True).start()
        try:
            return self._collected()
        finally:
            self.stopped.set()

    def _collected(self) -> list[object]:
        found: dict[int, object] = {}
        while len(found) < len(self.arguments):
            one = self._next(found)
            if one.error is not None:
                raise CallFailed(one.place, f"raised {type(one.error).__name__}: {one.error}") from one.error
            found[one.place] = one.value
        return [found[place] for place in range(len(self.arguments))]

    def _next(self, found: Mapping[int, object]) -> Returned:
        """Wait for the next result. Raises CallFailed for the call that has run longest, once it exceeds the deadline."""
        while True:
            running = {place: at for place, at in list(self.begun.items()) if place not in found}
            place, since = min(running.items(), key=lambda item: item[1], default=(-1, time.monotonic()))
            try:
                return self.returned.get(timeout=max(since + self.deadline_s - time.monotonic(), 0.0))
            except queue.Empty:
                if place >= 0 and time.monotonic() - since >= self.deadline_s:
                    raise CallFailed(place, f"has not returned within {self.deadline_s:g} s") from None

    def _thread(self, waiting: "queue.SimpleQueue[int]") -> None:
        while not self.stopped.is_set():
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            self.begun[place] = time.monotonic()
            try:
                self.returned.put(Returned(place, self.function(**self.arguments[place])))
            except BaseException as error:  # noqa: BLE001 (the outer edge of a thread; `run` raises it again)
                self.stopped.set()
                self.returned.put(Returned(place, error=error))

    async def _all(self) -> None:
        limit = asyncio.Semaphore(self.concurrency)
        calls = [asyncio.create_task(self._one(place, limit)) for place in range(len(self.arguments))]
        await asyncio.gather(*calls)

    async def _one(self, place: int, limit: asyncio.Semaphore) -> None:
        async with limit:
            if self.stopped.is_set():
                return
            self.begun[place] = time.monotonic()
            try:
                value = await cast(Awaitable[Any], self.function(**self.arguments[place]))
            except BaseException as error:  # noqa: BLE001 (the outer edge of a task; `run` raises it again)
                self.stopped.set()
                self.returned.put(Returned(place, error=error))
            else:
                self.returned.put(Returned(place, value))


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Start this process's event loop, once, on a thread of its own. All firings share it, so that a function can keep its clients."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop
