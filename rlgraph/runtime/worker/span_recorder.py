"""Record what a worker spends its time on: one span after another, so that every moment of a step has a name."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlgraph.plan.schedule import Span, SpanKind

ABSORBED_S = 20e-6  # a shorter gap joins the span after it, because recording it would take about as long


class SpanRecorder:
    """A worker's spans. The caller names the time in `span`; the time between two of them is rlgraph's own work.

    Spans can nest, as when weights are loaded while a node decodes.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._spans: list[Span] = []
        self._until_s = time.monotonic()  # everything before is accounted for
        self._started = False
        self._open = 0

    def begin(self, step: int) -> None:
        """Record the time since the last firing as idle; before the first firing the job was starting."""
        self._close("between steps" if self._started else "start-up", "idle" if self._started else "start", step)
        self._started = True

    def carry(self, node: str, step: int) -> None:
        """Record the time since the last span as work around a node: checks, copies, slots given back."""
        self._close(node, "carry", step)

    @contextmanager
    def span(self, name: str, kind: SpanKind, step: int, version: int | None = None) -> Iterator[list[int]]:
        """Time a block, also one that raises. The block appends the bytes that it moved to the list that it is given."""
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
        """Time a block that waits on channel `name` and moves data: what `blocked_s` grows by is the wait, the rest is `then`."""
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
        """Open a span and give its start: the end of the span before it, or now if it lies within another."""
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
        """Take the spans since the last call."""
        spans, self._spans = self._spans, []
        return spans
