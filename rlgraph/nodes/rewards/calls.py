"""How a user's function is called: how many calls at a time, with which deadline and retries, and what a failure scores."""

import asyncio
import functools
import heapq
import inspect
import queue
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from rlgraph import settings
from rlgraph.errors import GraphError, RlgraphError, show_value
from rlgraph.settings import AtLeastZero, Finite, Natural, Range, Seconds

# Retries of calls that fail: their number, the pauses, and the score if all fail.


class Busy(Exception):
    """A service asks to be called again, after `after_s` seconds at the earliest."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Retry:
    """Call a reward function again if it raises, misses its deadline, or returns no finite number. For calls over a network.

    >>> import rlgraph as rg
    >>> retry = rg.options.Retry(times=2, backoff_s=1.0, default=0.0)  # for rg.reward(judge, rollout, retries=retry)
    >>> 1.0 <= retry.delay(place=0, attempt=0) < 1.5, 2.0 <= retry.delay(place=0, attempt=1) < 3.0
    (True, True)

    * `times`: further calls after a failed one.
    * `backoff_s`: seconds before the first further call. Each next pause is twice as long.
    * `most_s`: the longest pause.
    * `jitter`: the largest random share by which a pause is longer, so that calls that failed together are not repeated together.
    * `seed`: the seed of the jitter.
    * `default`: the score of a response whose calls all failed. None: the last error ends the run.

    An `RlgraphError` that the function raises ends the run at once: it means that no further call can succeed. A call that misses
    its deadline continues in the background if it runs on a thread, and is cancelled if it is async.
    """

    times: Annotated[int, Range(least=0, rule="how many times a failed call is repeated, a whole number of at least 0")] = 3
    backoff_s: Annotated[float, Range(least=0, rule="a number of seconds of at least 0")] = 1.0
    most_s: Seconds = 60.0
    jitter: AtLeastZero = 0.5
    default: Finite | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        settings.check(self)

    def delay(self, place: int, attempt: int, at_least_s: float = 0.0) -> float:
        """Compute the seconds between the failure of an attempt, 0 for the first, and the next. The call's place seeds the jitter."""
        pause = min(self.backoff_s * 2**attempt, self.most_s)
        return max(pause, at_least_s) * (1 + self.jitter * random.Random(f"{self.seed} {place} {attempt}").random())


ONCE = Retry(times=0)  # a call that fails ends the run


# How a reward function is called: how many calls at a time, with which deadline, and how failures are handled.

CONCURRENCY = 16


class Scorer(ABC):
    """A reward function with settings of its calls: how many run at a time, and how failures are handled."""

    concurrency: int
    retries: Retry | None

    def check(self) -> None:  # noqa: B027 (a scorer may need nothing)
        """Check what the scorer needs before anything starts. Raises RlgraphError."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score a response."""


@dataclass(frozen=True)
class Calls:
    """How a reward function is called. None: the scorer's own setting, or else 16 at a time without retries.

    With `trial` the launch tries it on a made-up batch.
    """

    concurrency: int | None
    deadline_s: float
    retries: Retry | None
    trial: bool = True

    def tries(self, function: Callable[..., Any]) -> bool:
        """Whether the launch tries a function: not a scorer, which checks itself, nor calls that may fail."""
        return self.trial and self.retries is None and not isinstance(function, Scorer)

    def of(self, where: str, function: Callable[..., Any]) -> tuple[int, float, Retry | None]:
        """Look up the settings for a function. Raises GraphError if both have retries."""
        if not isinstance(function, Scorer):
            return self.concurrency or CONCURRENCY, self.deadline_s, self.retries
        if self.retries is not None and function.retries is not None:
            raise GraphError(f"{where} has retries={show_value(self.retries)}, but {show_value(function)} has its own; set them there")
        return self.concurrency or function.concurrency, self.deadline_s, self.retries or function.retries


# Concurrent calls of a user's function, each with a deadline, and repeated after failures. An error names the place of the failed call.

Arguments = Mapping[str, object]
Attempt = tuple[int, int]  # the place of a call, and how often it was called before


class CallFailed(Exception):
    """The call at `place` raised, or did not return in time. `__cause__` is the exception that it raised."""

    def __init__(self, place: int, what: str, late: bool = False) -> None:
        super().__init__(what)
        self.place, self.what, self.late = place, what, late


@dataclass(frozen=True)
class Returned:
    """The result of one attempt: a value, or the exception that it raised."""

    attempt: Attempt
    value: object = None
    error: BaseException | None = None


class _Late(Exception):
    """An attempt missed its deadline."""


class _Unusable(Exception):
    """An attempt returned a value that the caller cannot use."""


@dataclass
class FunctionPool:
    """Call a user's function for each of `arguments`, at most `concurrency` calls at a time. Used once.

    A plain function runs on threads; an `async def` one in an event loop, where a waiting call holds no thread. The threads are daemons, so
    that one that hangs keeps no process alive. `retry` decides how a failed call is repeated. `usable` decides which values are results;
    any other value is a failure. After `run`, `retries` counts repeated calls, `defaults` holds the places where all calls failed, whose
    result is None, and `failure` is the last error.
    """

    function: Callable[..., object]
    arguments: Sequence[Arguments]
    concurrency: int
    deadline_s: float
    retry: Retry = ONCE
    usable: Callable[[object], bool] = lambda value: True
    retries: int = 0
    defaults: list[int] = field(default_factory=list)
    failure: str = ""
    begun: dict[Attempt, float] = field(default_factory=dict)
    pausing: list[tuple[float, Attempt]] = field(default_factory=list)  # by the time of the next attempt
    returned: "queue.SimpleQueue[Returned]" = field(default_factory=queue.SimpleQueue)
    waiting: "queue.SimpleQueue[Attempt | None]" = field(default_factory=queue.SimpleQueue)
    tasks: "dict[Attempt, Future[None]]" = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: int = 0
    abandoned: set[Attempt] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.limit = asyncio.Semaphore(self.concurrency) if inspect.iscoroutinefunction(_underlying_function(self.function)) else None

    def run(self) -> list[object]:
        """Make all calls; the results are in the order of `arguments`. Raises CallFailed for the first call that fails for good."""
        for place in range(len(self.arguments)):
            self._start((place, 0))
        if self.limit is None:
            for _ in range(min(self.concurrency, len(self.arguments))):
                self._add_thread()
        try:
            return self._collect_results()
        finally:
            self.stopped.set()
            for _ in range(self.threads):
                self.waiting.put(None)

    def _start(self, attempt: Attempt) -> None:
        if self.limit is None:
            self.waiting.put(attempt)
        else:
            self.tasks[attempt] = asyncio.run_coroutine_threadsafe(self._task(attempt), event_loop())

    def _collect_results(self) -> list[object]:
        found: dict[int, object] = {}
        while len(found) < len(self.arguments):
            one = self._next()
            place = one.attempt[0]
            if self.begun.pop(one.attempt, None) is None:
                continue  # it returned after its deadline
            self.tasks.pop(one.attempt, None)
            error = one.error
            if error is None and self.retry != ONCE and not self.usable(one.value):
                error = _Unusable(f"returned {type(one.value).__name__}, which is not a score")
            if error is None or (isinstance(error, _Unusable) and not self._has_more(one.attempt) and self.retry.default is None):
                found[place] = one.value
            elif not self._plan_retry(one.attempt, error):
                found[place] = None
        return [found[place] for place in range(len(self.arguments))]

    def _has_more(self, attempt: Attempt) -> bool:
        return attempt[1] < self.retry.times

    def _plan_retry(self, attempt: Attempt, error: BaseException) -> bool:
        """Plan the next attempt after a failure; False if the default takes its place. Raises CallFailed if neither is left."""
        place, before = attempt
        what = str(error) if isinstance(error, _Late | _Unusable) else f"raised {type(error).__name__}: {error}"
        final = isinstance(error, RlgraphError) or not isinstance(error, Exception)
        if not final and self._has_more(attempt):
            pause = self.retry.delay(place, before, error.after_s if isinstance(error, Busy) else 0.0)
            heapq.heappush(self.pausing, (time.monotonic() + pause, (place, before + 1)))
            self.retries += 1
            return True
        if not final and self.retry.default is not None:
            self.defaults.append(place)
            self.failure = what
            return False
        times = f" ({before + 1} calls failed)" if before else ""
        raise CallFailed(place, f"{what}{times}", isinstance(error, _Late)) from (None if isinstance(error, _Late | _Unusable) else error)

    def _next(self) -> Returned:
        """Wait for the next result, and start attempts whose pause is over. A call that exceeds its deadline fails, the oldest first."""
        while True:
            now = time.monotonic()
            while self.pausing and self.pausing[0][0] <= now:
                self._start(heapq.heappop(self.pausing)[1])
            oldest, since = min(list(self.begun.items()), key=lambda item: item[1], default=(None, now))
            wake = min([since + self.deadline_s, *(due for due, _ in self.pausing[:1])])
            try:
                return self.returned.get(timeout=max(wake - now, 0.0))
            except queue.Empty:
                if oldest is not None and time.monotonic() - since >= self.deadline_s:
                    self._abandon(oldest)
                    return Returned(oldest, error=_Late(f"has not returned within {self.deadline_s:g} s"))

    def _abandon(self, attempt: Attempt) -> None:
        """Free the place of a call that hangs: cancel its task, or start another thread in addition to its own."""
        self.abandoned.add(attempt)
        if self.limit is None:
            self._add_thread()
        elif attempt in self.tasks:
            self.tasks[attempt].cancel()

    def _add_thread(self) -> None:
        self.threads += 1
        threading.Thread(target=self._thread, name="calls", daemon=True).start()

    def _thread(self) -> None:
        while (attempt := self.waiting.get()) is not None and not self.stopped.is_set():
            self.begun[attempt] = time.monotonic()
            try:
                value = self.function(**self.arguments[attempt[0]])
            except BaseException as error:  # noqa: BLE001 (the outer edge of a thread; `run` raises it again)
                self._record_failure(attempt, error)
            else:
                self.returned.put(Returned(attempt, value))
            if attempt in self.abandoned:
                return  # it returned after its deadline, and another thread has its place

    async def _task(self, attempt: Attempt) -> None:
        assert self.limit is not None
        async with self.limit:
            if self.stopped.is_set():
                return
            self.begun[attempt] = time.monotonic()
            try:
                value = await cast(Awaitable[Any], self.function(**self.arguments[attempt[0]]))
            except BaseException as error:  # noqa: BLE001 (the outer edge of a task; `run` raises it again)
                self._record_failure(attempt, error)
            else:
                self.returned.put(Returned(attempt, value))

    def _record_failure(self, attempt: Attempt, error: BaseException) -> None:
        if self.retry == ONCE:
            self.stopped.set()  # before the next call begins
        self.returned.put(Returned(attempt, error=error))


def _underlying_function(function: Callable[..., object]) -> Any:
    """The function itself, or the method that a call of an object runs."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return inner if inspect.isroutine(inner) else type(inner).__call__


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Start this process's event loop, once, on a separate thread. All firings share it, so that a function can keep its clients."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop", daemon=True).start()
    return loop
