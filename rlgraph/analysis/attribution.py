"""Attribute each device-second of a run to one use, as data and as a table: the uses of a device add up to 100 %."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal, TypeAlias

from rich.table import Table
from rich.text import Text

from rlgraph.analysis import words
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.plan.schedule import Span, SpanKind

# The device-seconds of a run as rows that add up to 100 %, as data and as a table for the terminal.

Use: TypeAlias = Literal["node", "moving", "sleep", "carry", "tools", "data", "weights", "room", "order", "idle", "start", "unexplained"]
BUSY: tuple[Use, ...] = ("node", "moving", "sleep", "carry")
LEAST = 0.002  # of a pool's time: smaller rows are added up into one line of the table
HAND_OVER = "message in transit"  # the cause of a wait during which no upstream worker was busy
SMALL = "all smaller rows"


@dataclass(frozen=True)
class Row:
    """Device-seconds of one use of a device.

    `name` is the node, weights event, channel or feedback edge. `cause` is the activity that a wait was for. `model` is the worker's model
    if that has several ranks, else empty.

    | use | the device |
    |---|---|
    | `node` | runs a node |
    | `moving` | publishes, receives or loads weights |
    | `sleep` | copies the memory of an engine that shares its devices to the host or back |
    | `carry` | copies and checks columns around a node |
    | `tools` | waits for tools or environments: no response can decode |
    | `data` | waits for a message |
    | `weights` | waits for a weight version |
    | `room` | waits for a free slot of a channel |
    | `order` | waits for another node of its pool that comes first in the order |
    | `idle` | has no step to work on |
    | `start` | starts up, before the first step or after a restart |
    | `unexplained` | has no span |
    """

    pool: str | None
    worker: str
    use: Use
    name: str
    cause: str
    seconds: float
    model: str = ""

    def __str__(self) -> str:
        cause = f"; cause: {words.clean(self.cause)}" if self.cause else ""
        name = words.clean(self.name)
        match self.use:
            case "node" | "moving" | "sleep":
                return name
            case "carry":
                return f"copies and checks around {name}"
            case "tools":
                return f"engine waits for tools or environments of {name}"
            case "data":
                return f"wait for data of '{name}'{cause}"
            case "weights":
                return f"wait for a version of '{name}'{cause}"
            case "room":
                return f"wait for a free slot of '{name}'{cause}"
            case "order":
                return f"wait for its turn in the pool ('{name}'){cause}"
            case "unexplained":
                return "not explained"
            case _:
                return name


@dataclass(frozen=True)
class Bubbles:
    """The use of each device-second from `start_s` to `end_s`.

    `pools` counts each device once, `workers` the time of each worker. Rows without a pool belong to host processes; each counts as one
    device.
    """

    start_s: float
    end_s: float
    pools: tuple[Row, ...]
    workers: tuple[Row, ...]

    @property
    def residual(self) -> float:
        """The share of device-seconds that no row explains."""
        return _share(self.pools, (row for row in self.pools if row.use == "unexplained"))

    def of_pool(self, pool: str | None) -> tuple[Row, ...]:
        """The rows of a pool (None: the host's), largest first."""
        return _sort_rows(row for row in self.pools if row.pool == pool)

    def of_worker(self, worker: str) -> tuple[Row, ...]:
        """The rows of one worker, largest first."""
        return _sort_rows(row for row in self.workers if row.worker == worker)

    def share(self, rows: Iterable[Row], within: Sequence[Row]) -> float:
        """Compute the share of the seconds `within` that `rows` take."""
        return _share(within, rows)

    def busy(self, pool: str | None) -> float:
        """The share of a pool's time in which it works."""
        rows = self.of_pool(pool)
        return _share(rows, (row for row in rows if row.use in BUSY))

    def __rich__(self) -> Table:
        return table(self)

    def __str__(self) -> str:
        console = words.Terminal(width=words.PAGE, color_system=None)
        with console.capture() as captured:
            console.print(table(self))
        return captured.get().rstrip("\n")


def table(bubbles: Bubbles) -> Table:
    """Print the rows of each pool as a table: seconds of one device, and the share of the pool's time."""
    span_s = bubbles.end_s - bubbles.start_s
    title = f"where {words.seconds(span_s)} went; {bubbles.residual:.2%} not explained"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name, right in (("pool", False), ("worker", False), ("seconds", True), ("share", True), ("spent on", False)):
        drawn.add_column(name, justify="right" if right else "left", no_wrap=name != "spent on", overflow="ellipsis")
    for pool in dict.fromkeys(row.pool for row in bubbles.pools):
        rows = by_model(bubbles.of_pool(pool))
        total = sum(row.seconds for row in rows)
        small = [row for row in rows if row.seconds < LEAST * total]
        pool_name = Text(words.HOST if pool is None else words.clean(pool))
        for row in rows:
            if row not in small:
                style = "" if row.use in BUSY else "red" if row.use == "unexplained" else "yellow"
                worker, spent = Text(words.clean(row.worker)), Text(str(row), style)
                drawn.add_row(pool_name, worker, f"{row.seconds:.2f}", f"{row.seconds / total:.1%}", spent)
        if small:
            rest = sum(row.seconds for row in small)
            drawn.add_row(pool_name, "", f"{rest:.2f}", f"{rest / total:.1%}", SMALL)
        drawn.add_row(pool_name, "", f"{total:.2f}", "100.0%", Text("all", "bold"), end_section=True)
    return drawn


def by_model(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Add up the ranks of each model, largest first."""
    total: dict[Row, float] = {}
    for row in rows:
        key = replace(row, worker=row.model or row.worker, seconds=0.0)
        total[key] = total.get(key, 0.0) + row.seconds
    return _sort_rows(replace(key, seconds=seconds) for key, seconds in total.items())


def _sort_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _share(all_rows: Iterable[Row], some: Iterable[Row]) -> float:
    total = sum(row.seconds for row in all_rows)
    return sum(row.seconds for row in some) / total if total else 0.0


# Attribute each device-second of a run to one use: a pure function of the run's spans and its plan.
#
# At each moment a device has one use. If workers share a device, work counts before waits, and a wait for data counts before a wait for a
# place in the pool's order, because the wait for data leaves the device idle. A wait gets a cause: what the awaited worker did meanwhile.
# If that worker waited too, the cause is the worker that it waited for, and so on.

USES: Mapping[SpanKind, Use] = {
    "fire": "node",
    "publish": "moving",
    "receive": "moving",
    "load": "moving",
    "wake": "sleep",
    "sleep": "sleep",
    "carry": "carry",
    "tools": "tools",
    "room": "room",
    "idle": "idle",
    "start": "start",
}
CHAIN = 12  # waits followed from one worker to the next; a longer chain is given up
START_UP, BETWEEN, FINISHED = "start-up", "between steps", "after the last step"
CLAIMS = ("fire", "load", "wake", "sleep", "publish", "receive", "carry", "tools", "wait", "room", "order", "idle", "start")
RANK = {claim: rank for rank, claim in enumerate(CLAIMS)}


@dataclass(frozen=True)
class SharedDevice:
    """A GPU, the cores of one rank, or a host process, with the workers that share it. `count` is the number of devices it stands for."""

    pool: str | None
    workers: tuple[str, ...]
    count: float


def attribute(spans: Sequence[Span], plan: Plan, start_s: float | None = None, end_s: float | None = None) -> Bubbles:
    """Attribute every device-second between two moments, by default from the start of the first span to the end of the last.

    Spans are in seconds on one clock; a worker's spans may come in any order. Time that no span covers gets a separate row.
    """
    start_s = min((span.start_s for span in spans), default=0.0) if start_s is None else start_s
    end_s = max((span.end_s for span in spans), default=0.0) if end_s is None else end_s
    by_worker: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        by_worker[span.worker].append(span)
    recorded = _SpanIndex(plan, by_worker)
    lanes = [SharedDevice(w.pool, (w.name,), max(len(w.gpus), 1)) for w in plan.workers]
    return Bubbles(
        start_s=start_s,
        end_s=end_s,
        pools=_sum_rows((row for device in devices(plan) for row in _rows(device, recorded, start_s, end_s)), plan),
        workers=_sum_rows((row for lane in lanes for row in _rows(lane, recorded, start_s, end_s)), plan),
    )


def devices(plan: Plan) -> Iterator[SharedDevice]:
    """Yield every device of every pool that has workers, and every process of the host."""
    for pool in plan.pools:
        members = [worker for worker in plan.workers if worker.pool == pool.name]
        if pool.gpus:
            for gpu in pool.gpus:
                yield SharedDevice(pool.name, tuple(w.name for w in members if gpu in w.gpus), 1.0)
        elif members:
            lanes = max(worker.world for worker in members)
            for lane in range(lanes):
                sharing = tuple(w.name for w in members if w.rank == lane * w.world // lanes)
                yield SharedDevice(pool.name, sharing, pool.cpus / lanes)
    for worker in plan.workers:
        if worker.pool is None:
            yield SharedDevice(None, (worker.name,), 1.0)


def _sum_rows(rows: Iterable[Row], plan: Plan) -> tuple[Row, ...]:
    """Add up the rows that differ in seconds only."""
    models = {worker.name: worker.model or "" for worker in plan.workers if worker.world > 1}
    total: dict[tuple[str | None, str, Use, str, str], float] = defaultdict(float)
    for row in rows:
        total[row.pool, row.worker, row.use, row.name, row.cause] += row.seconds
    return tuple(Row(*key, seconds, models.get(key[1], "")) for key, seconds in total.items() if seconds > 0)


def _rows(device: SharedDevice, recorded: "_SpanIndex", start_s: float, end_s: float) -> Iterator[Row]:
    """Yield the rows of one device, a row for each stretch of time with one use."""
    home = device.workers[0] if device.workers else ""
    for begin, end, span in _sweep([recorded.spans.get(name, []) for name in device.workers], recorded, start_s, end_s):
        seconds = (end - begin) * device.count
        if span is None:
            use, name = recorded.idle_use(device.workers, begin, end)
            yield Row(device.pool, home, use, name, "", seconds)
        elif span.kind in ("wait", "room"):
            for cause, waited_s in recorded.causes(span, begin, end):
                yield Row(device.pool, span.worker, recorded.use(span), span.name, cause, waited_s * device.count)
        else:
            yield Row(device.pool, span.worker, recorded.use(span), recorded.name(span), "", seconds)


def _sweep(
    workers: Sequence[Sequence[Span]], recorded: "_SpanIndex", start_s: float, end_s: float
) -> Iterator[tuple[float, float, Span | None]]:
    """Yield the stretches of time from `start_s` to `end_s`, each with the span that claims the device, or None if no span is open."""
    moments = sorted({start_s, end_s, *(t for spans in workers for s in spans for t in (s.start_s, s.end_s) if start_s < t < end_s)})
    places = [0] * len(workers)
    active: list[list[Span]] = [[] for _ in workers]
    for begin, end in pairwise(moments):
        for index, spans in enumerate(workers):
            while places[index] < len(spans) and spans[places[index]].start_s <= begin:
                active[index].append(spans[places[index]])
                places[index] += 1
            active[index] = [span for span in active[index] if span.end_s > begin]
        yield begin, end, min((innermost(found) for found in active if found), key=recorded.rank, default=None)


def innermost(spans: Sequence[Span]) -> Span:
    """Choose the span that began last among the open spans of one worker. Receiving comes last, since it runs next to other work."""
    return max(spans, key=lambda span: (span.kind != "receive", span.start_s, -span.end_s))


def _start(span: Span) -> float:
    return span.start_s


class _SpanIndex:
    """Look up a run's spans by worker, and find the worker that a wait is for."""

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
        """The name of a span in a row: the node for a firing, whichever chunk of the batch it fires for."""
        return self._nodes.get(span.name, span.name) if span.kind == "fire" else span.name

    def rank(self, span: Span) -> int:
        """The rank of a claim to a device; 0 is the strongest claim."""
        return RANK["order" if self.use(span) == "order" else span.kind]

    def use(self, span: Span) -> Use:
        """The use of the device that a span stands for."""
        if span.kind == "wait":
            if span.name in self.loops:
                return "weights"
            channel = self.channels.get(span.name)
            return "order" if channel is not None and channel.kind == "order" else "data"
        return USES[span.kind]

    def idle_use(self, workers: Sequence[str], begin: float, end: float) -> tuple[Use, str]:
        """Name the use of a stretch in which no worker of the device has a span.

        Before the first span of its workers, or before a restart, the device starts up; after the last span it is finished; else nothing
        explains the stretch.
        """
        known = [name for name in workers if name in self._ends]
        later = [span for name in workers for span in islice(self._open_spans(name, end, float("inf")), 2) if span.start_s >= end]
        if not known or end <= min(self._starts[name][0] for name in known) or (later and min(later, key=_start).kind == "start"):
            return "start", START_UP
        if begin >= max(self._ends[name] for name in known):
            return "idle", FINISHED
        return "unexplained", ""

    def causes(self, wait: Span, begin: float, end: float, depth: int = 0) -> Iterator[tuple[str, float]]:
        """Yield each cause of a wait from `begin` to `end` with its seconds, which add up to the whole stretch."""
        worker = self._awaited_worker(wait)
        covered = begin
        for span in self._open_spans(worker, begin, end) if worker is not None and depth < CHAIN else ():
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

    def _open_spans(self, worker: str, begin: float, end: float) -> Iterator[Span]:
        """Yield a worker's spans that are open between `begin` and `end`."""
        spans = self.spans.get(worker, [])
        for index in range(max(bisect_right(self._starts.get(worker, []), begin) - 1, 0), len(spans)):
            if spans[index].start_s >= end:
                return
            yield spans[index]

    def _awaited_worker(self, wait: Span) -> str | None:
        """Find the worker that a wait is for: the writer or reader rank that finishes last. None if the plan has no such channel."""
        if wait.name in self.loops:
            loop = self.loops[wait.name]
            if wait.kind == "wait":
                return self._last([loop.writer], wait.step if wait.version is None else wait.version - 1)
            return self._last(loop.readers, wait.step + 1 - loop.slots)
        channel = self.channels.get(wait.name)
        if channel is None:
            return None
        if wait.kind == "wait":
            steps = channel.credits // channel.chunks if channel.kind == "earlier" else channel.credits
            return self._last([channel.writer], wait.step - steps)
        return self._last(channel.readers, wait.step - channel.slots // channel.chunks)

    def _last(self, nodes: Iterable[str], step: int) -> str | None:
        """Find the worker in which the last of the nodes fired for `step`; a firing without a span counts as the latest."""
        found = [(self._fired.get((node, step, worker), float("inf")), worker) for node in nodes for worker in self.plan.node(node).workers]
        return max(found, default=(0.0, None))[1]
