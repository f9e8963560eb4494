"""Where the device-seconds of a run went: a pure function of its spans and its plan.

Each moment of each device is given to one thing. Where the workers of a pool share a device, what works comes before what waits,
and who waits for data before who waits for its turn: it is the former that leaves the device idle. A wait is traced to its cause:
what the worker that was waited for did meanwhile; where it waited itself, the one that it waited for, and so on.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from rlgraph.analysis.bubbles import HAND_OVER, Bubbles, Row, Use
from rlgraph.compiler.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.compiler.schedule import Span, SpanKind

USES: Mapping[SpanKind, Use] = {
    "fire": "node",
    "publish": "moving",
    "receive": "moving",
    "load": "moving",
    "wake": "sleep",
    "sleep": "sleep",
    "carry": "carry",
    "room": "room",
    "idle": "idle",
    "start": "start",
}
CHAIN = 12  # waits followed from one worker to the next; a longer chain is given up
START_UP, BETWEEN, FINISHED = "start-up", "between steps", "no further step"
CLAIMS = ("fire", "load", "wake", "sleep", "publish", "receive", "carry", "wait", "room", "order", "idle", "start")
RANK = {claim: rank for rank, claim in enumerate(CLAIMS)}


@dataclass(frozen=True)
class SharedDevice:
    """A GPU, the cores of one rank, or the process of a host node: the workers that share it, and how many devices it counts for."""

    pool: str | None
    workers: tuple[str, ...]
    count: float


def attribute(spans: Sequence[Span], plan: Plan, start_s: float | None = None, end_s: float | None = None) -> Bubbles:
    """What every device-second between two moments was spent on; without them, between the first span and the last.

    Spans are in seconds on one clock, those of a worker in any order. What no span covers is a row of its own.
    """
    start_s = min((span.start_s for span in spans), default=0.0) if start_s is None else start_s
    end_s = max((span.end_s for span in spans), default=0.0) if end_s is None else end_s
    by_worker: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        by_worker[span.worker].append(span)
    trace = _Trace(plan, by_worker)
    lanes = [SharedDevice(w.pool, (w.name,), max(len(w.gpus), 1)) for w in plan.workers]
    return Bubbles(
        start_s=start_s,
        end_s=end_s,
        pools=_summed((row for device in devices(plan) for row in _rows(device, trace, start_s, end_s)), plan),
        workers=_summed((row for lane in lanes for row in _rows(lane, trace, start_s, end_s)), plan),
    )


def devices(plan: Plan) -> Iterator[SharedDevice]:
    """Yield every device of every pool that has workers, and every process of the host."""
    for pool in plan.pools:
        crew = [worker for worker in plan.workers if worker.pool == pool.name]
        if pool.gpus:
            for gpu in pool.gpus:
                yield SharedDevice(pool.name, tuple(w.name for w in crew if gpu in w.gpus), 1.0)
        elif crew:
            lanes = max(worker.world for worker in crew)
            for lane in range(lanes):
                sharing = tuple(w.name for w in crew if w.rank == lane * w.world // lanes)
                yield SharedDevice(pool.name, sharing, pool.cpus / lanes)
    for worker in plan.workers:
        if worker.pool is None:
            yield SharedDevice(None, (worker.name,), 1.0)


def _summed(rows: Iterable[Row], plan: Plan) -> tuple[Row, ...]:
    """Add up rows that differ in seconds only."""
    models = {worker.name: worker.model or "" for worker in plan.workers if worker.world > 1}
    total: dict[tuple[str | None, str, Use, str, str], float] = defaultdict(float)
    for row in rows:
        total[row.pool, row.worker, row.use, row.name, row.cause] += row.seconds
    return tuple(Row(*key, seconds, models.get(key[1], "")) for key, seconds in total.items() if seconds > 0)


def _rows(device: SharedDevice, trace: "_Trace", start_s: float, end_s: float) -> Iterator[Row]:
    home = device.workers[0] if device.workers else ""
    for begin, end, span in _sweep([trace.spans.get(name, []) for name in device.workers], trace, start_s, end_s):
        seconds = (end - begin) * device.count
        if span is None:
            use, name = trace.silence(device.workers, begin, end)
            yield Row(device.pool, home, use, name, "", seconds)
        elif span.kind in ("wait", "room"):
            for cause, part in trace.causes(span, begin, end):
                yield Row(device.pool, span.worker, trace.use(span), span.name, cause, part * device.count)
        else:
            yield Row(device.pool, span.worker, trace.use(span), trace.name(span), "", seconds)


def _sweep(workers: Sequence[Sequence[Span]], trace: "_Trace", start_s: float, end_s: float) -> Iterator[tuple[float, float, Span | None]]:
    """Yield stretches that cover the time from `start_s` to `end_s`, each with the span that the device belongs to then."""
    moments = sorted({start_s, end_s, *(t for spans in workers for s in spans for t in (s.start_s, s.end_s) if start_s < t < end_s)})
    places = [0] * len(workers)
    active: list[list[Span]] = [[] for _ in workers]
    for begin, end in pairwise(moments):
        for index, spans in enumerate(workers):
            while places[index] < len(spans) and spans[places[index]].start_s <= begin:
                active[index].append(spans[places[index]])
                places[index] += 1
            active[index] = [span for span in active[index] if span.end_s > begin]
        yield begin, end, min((innermost(found) for found in active if found), key=trace.rank, default=None)


def innermost(spans: Sequence[Span]) -> Span:
    """Of the spans of one worker that are open at a time, the one begun last; receiving weights goes on beside the others."""
    return max(spans, key=lambda span: (span.kind != "receive", span.start_s, -span.end_s))


def _start(span: Span) -> float:
    return span.start_s


class _Trace:
    """A run's spans by worker, and who is waited for when."""

    def __init__(self, plan: Plan, spans: Mapping[str, list[Span]]) -> None:
        self.plan, self.spans = plan, spans
        self.channels: dict[str, PlannedChannel] = {channel.name: channel for channel in plan.channels}
        self.loops: dict[str, PlannedLoop] = {loop.name: loop for loop in plan.loops}
        self._starts = {worker: [span.start_s for span in found] for worker, found in spans.items()}
        self._ends = {worker: max(span.end_s for span in found) for worker, found in spans.items()}
        self._nodes = {event.name: event.node for event in plan.schedule.events if event.kind == "fire"}
        self._fired: dict[tuple[str, int, str], float] = {}
        for span in (s for found in spans.values() for s in found if s.kind == "fire"):
            key = self.name(span), span.step, span.worker
            self._fired[key] = max(span.end_s, self._fired.get(key, 0.0))

    def name(self, span: Span) -> str:
        """What a span is called in a row: its node, whichever part of a batch it fires for."""
        return self._nodes.get(span.name, span.name) if span.kind == "fire" else span.name

    def rank(self, span: Span) -> int:
        """Return the order of claims to a device, the strongest first."""
        return RANK["order" if self.use(span) == "order" else span.kind]

    def use(self, span: Span) -> Use:
        if span.kind == "wait":
            if span.name in self.loops:
                return "weights"
            channel = self.channels.get(span.name)
            return "order" if channel is not None and channel.kind == "order" else "data"
        return USES[span.kind]

    def silence(self, workers: Sequence[str], begin: float, end: float) -> tuple[Use, str]:
        """What it means that no worker of a device has a span: before its first one, or before it is started again, it
        starts; after its last it is done."""
        known = [name for name in workers if name in self._ends]
        later = [span for name in workers for span in islice(self._during(name, end, float("inf")), 2) if span.start_s >= end]
        if not known or end <= min(self._starts[name][0] for name in known) or (later and min(later, key=_start).kind == "start"):
            return "start", START_UP
        if begin >= max(self._ends[name] for name in known):
            return "idle", FINISHED
        return "unexplained", ""

    def causes(self, wait: Span, begin: float, end: float, depth: int = 0) -> Iterator[tuple[str, float]]:
        """Yield what was done meanwhile by whom a wait is for, and for how many seconds of the stretch; together they cover it."""
        worker = self._awaited(wait)
        covered = begin
        for span in self._during(worker, begin, end) if worker is not None and depth < CHAIN else ():
            first, last = max(span.start_s, covered), min(span.end_s, end)
            if last <= first:
                continue
            if first > covered:
                yield HAND_OVER, first - covered
            if span.kind in ("wait", "room"):
                yield from self.causes(span, first, last, depth + 1)
            else:
                yield self.name(span), last - first
            covered = last
        if covered < end:
            yield HAND_OVER, end - covered

    def _during(self, worker: str, begin: float, end: float) -> Iterator[Span]:
        spans = self.spans.get(worker, [])
        for index in range(max(bisect_right(self._starts.get(worker, []), begin) - 1, 0), len(spans)):
            if spans[index].start_s >= end:
                return
            yield spans[index]

    def _awaited(self, wait: Span) -> str | None:
        """Return the worker that a wait is for: of the ranks that write, or of those that read, the last to be done."""
        if wait.name in self.loops:
            loop = self.loops[wait.name]
            if wait.kind == "wait":
                return self._last([loop.writer], wait.step if wait.version is None else wait.version - 1)
            return self._last(loop.readers, wait.step + 1 - loop.slots)
        channel = self.channels.get(wait.name)
        if channel is None:
            return None
        if wait.kind == "wait":
            return self._last([channel.writer], wait.step - channel.credits)
        return self._last(channel.readers, wait.step - channel.slots // channel.chunks)

    def _last(self, nodes: Iterable[str], step: int) -> str | None:
        """Return the worker in which the last of the nodes fired for `step`; one whose firing is not known yet is later than all."""
        found = [(self._fired.get((node, step, worker), float("inf")), worker) for node in nodes for worker in self.plan.node(node).workers]
        return max(found, default=(0.0, None))[1]
