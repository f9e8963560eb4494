"""The steps of a run and their metrics: named timings, and what a job remembers of its steps.

A job keeps numbers in arrays and each name once, so that the memory of a long run is small and bounded.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Span

NO_STEP = "the job took no step; `for step in job.steps(n): …` takes them, `job.steps(n)` alone does not"


@dataclass(frozen=True)
class Step:
    """One finished step: its metrics, how many versions its oldest token was behind, and seconds since the step before."""

    index: int
    metrics: Mapping[str, float]
    staleness: int
    seconds: float


# Names that verl's users know; other nodes keep their own names.
TIMINGS = {
    "rollout": "gen",
    "advantages": "adv",
    "update": "update_actor",
    "critic_update": "update_critic",
    "old_log_probs": "old_log_prob",
    "ref_log_probs": "ref",
}


def average_metrics(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Join the metrics of all workers; a metric that several ranks report is averaged."""
    values: dict[str, list[float]] = {}
    for metrics in found:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    # A number on which all ranks agree is kept unchanged, since a mean would round it.
    return {name: fmean(each) if len(set(each)) > 1 else each[0] for name, each in values.items()}


def bits(plan: Plan) -> dict[str, float]:
    """Make `dtype/<model>_bits` for each model: 16 if it computes in bfloat16, 32 in float32. The plan lists the reason."""
    return {f"dtype/{model.name}_bits": 32.0 if model.dtype == "float32" else 16.0 for model in plan.models}


def timings(plan: Plan, spans: Iterable[Span]) -> dict[str, float]:
    """Sum `timing_s/*` of one step: each node's own work, the update's wait for its batch, and the wake and sleep of engines that
    time-share a pool.

    The chunks of a batch are added up, and so are the time slices of a step. Among several ranks the slowest counts.
    """
    found: dict[tuple[str, str], float] = {}
    nodes = {event.name: event.node for event in plan.schedule.events}
    batches = {channel.name for channel in plan.channels if channel.kind == "batch"}
    trainers = {worker for loop in plan.loops for worker in plan.node(loop.writer).workers}
    names = {"publish": "publish", "load": "update_weights"}
    slices: dict[tuple[str, str], float] = {}  # by kind and event
    for span in spans:
        if span.kind in ("wake", "sleep"):
            slices[span.kind, span.name] = max(span.seconds, slices.get((span.kind, span.name), 0.0))
            continue
        name = TIMINGS.get(nodes[span.name], nodes[span.name]) if span.kind == "fire" else names.get(span.kind)
        if span.kind == "wait" and span.worker in trainers and span.name in batches:
            name = "wait_prev_gen"
        if name is not None:
            found[name, span.worker] = found.get((name, span.worker), 0.0) + span.end_s - span.start_s
    slowest: dict[str, float] = {}
    for (name, _), seconds in found.items():
        slowest[name] = max(slowest.get(name, 0.0), seconds)
    for (kind, _), seconds in slices.items():
        slowest[kind] = slowest.get(kind, 0.0) + seconds
    return {f"timing_s/{name}": seconds for name, seconds in slowest.items()}


def oldest(metrics: Mapping[str, float]) -> dict[str, float]:
    """Summarise the staleness of a step with several updates, each of which measured its own: the oldest token, the largest mean."""
    found = {kind: [value for name, value in metrics.items() if name.endswith(kind)] for kind in ("/staleness/max", "/staleness/mean")}
    return {kind.removeprefix("/"): max(values) for kind, values in found.items() if values}


def behind_by_loop(plan: Plan, metrics: Mapping[str, float]) -> dict[str, int]:
    """Read the staleness of each loop from the metrics of the update that closes it. Loops closed by one update get the same value."""
    trained = [loop for loop in plan.loops if loop.due is None]
    if len(trained) == 1:
        measured = {trained[0].name: metrics.get("staleness/max")}
    else:
        writers = [loop.writer for loop in trained]
        measured = {loop.name: metrics.get(f"{loop.writer}/staleness/max") for loop in trained if writers.count(loop.writer) == 1}
    return {name: int(value) for name, value in measured.items() if value is not None}


# The records of a job's steps: numbers in arrays and each name once, so that the memory of a long run is small and bounded.

_ROW = np.dtype(
    [
        ("name", "i4"),
        ("kind", "i4"),
        ("step", "i8"),
        ("worker", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("version", "i8"),
        ("bytes", "i8"),
    ]
)
_NONE = -1  # where a span has no version, or no bytes


class Spans:
    """The last `kept` spans. Their memory is allocated at the start."""

    def __init__(self, kept: int) -> None:
        self._rows = np.zeros(kept, _ROW)
        self._rows["version"] = _NONE  # which touches every page of it
        self._added = 0
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return min(self._added, len(self._rows))

    @property
    def full(self) -> bool:
        """Whether the next span takes the place of the first."""
        return len(self) == len(self._rows)

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            version, size = (_NONE if value is None else value for value in (span.version, span.bytes))
            name, kind, worker = self._code(span.name), self._code(span.kind), self._code(span.worker)
            self._rows[self._added % len(self._rows)] = (name, kind, span.step, worker, span.start_s, span.end_s, version, size)
            self._added += 1

    def since(self, start_s: float) -> list[Span]:
        """List the spans, oldest first, in seconds from `start_s`."""
        names: list[Any] = list(self._codes)
        first = self._added if self.full else 0
        return [
            Span(
                names[name], names[kind], step, names[worker], start - start_s, end - start_s, _value_or_none(version), _value_or_none(size)
            )
            for name, kind, step, worker, start, end, version, size in np.roll(self._rows, -first)[: len(self)].tolist()
        ]

    def _code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))


def _value_or_none(value: int) -> int | None:
    return None if value == _NONE else value


class Metrics:
    """The metrics of the last steps: at least `kept` of them, and fewer than twice as many."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._columns: dict[str, array[float]] = {}
        self._steps = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, float]]:
        for step in range(self._steps):
            found = {name: column[step] for name, column in self._columns.items()}
            yield {name: value for name, value in found.items() if value == value}  # NaN: that step does not have it

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step. NaN marks a metric that the step does not have; a node that reports NaN has been refused before."""
        for name in metrics.keys() - self._columns.keys():
            self._columns[name] = array("d", [np.nan]) * self._steps
        for name, column in self._columns.items():
            column.append(metrics.get(name, np.nan))
        self._steps += 1
        if self._steps == 2 * self._kept:
            self._steps = self._kept
            for column in self._columns.values():
                del column[: self._kept]
