"""A run as values: its plan, the metrics of its steps and its spans. Bubbles, advice and the report are computed from it."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import msgspec

from rlgraph.analysis.attribution import Bubbles, Use, attribute, devices
from rlgraph.errors import CertificateError, DataError
from rlgraph.plan.events import publish_event
from rlgraph.plan.plan import ChannelEnd, Plan, PlannedLoop, with_new_names
from rlgraph.plan.schedule import Reason, Span

# Check a running job against its plan's certificate: no observed maximum exceeds the derived bound.


@dataclass(frozen=True)
class Observed:
    """The maxima that a run has shown so far, to compare with the bounds of its certificate."""

    staleness: int = 0
    open_batches: int = 0
    channel_slots: Mapping[str, int] | None = None  # in use at once, by channel


class InvariantMonitor:
    """Check the spans and slot counts of each step and raise at the first that the certificate rules out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        kept = plan.certificate.open_batches + 1  # as many as can matter
        self._published: dict[str, deque[float]] = {loop.name: deque(maxlen=kept) for loop in plan.loops}
        self._bounds = {loop.name: loop for loop in plan.certificate.loops}
        self._slots = {channel.name: channel.slots for channel in plan.channels}
        self.observed = Observed()

    def check(
        self,
        step: int,
        spans: Sequence[Span],
        staleness: int,
        peaks: Mapping[ChannelEnd, int],
        slack_s: float = 0.0,
        behind: Mapping[str, int] | None = None,
    ) -> None:
        """Check one finished step: its spans, its staleness, and the largest number of slots in use at each channel end.

        `slack_s` is how far apart two moments on different hosts may be in the wrong order, because the hosts' clocks
        differ. `behind` is the staleness of each loop, if known.

        Raises CertificateError with the bound that was exceeded.
        """
        proof, so_far = self.plan.certificate, self.observed
        if staleness > proof.staleness_bound:
            raise self._certificate_error(
                step, f"its oldest token is {staleness} versions behind", f"staleness at most {proof.staleness_bound}"
            )
        for name, versions in (behind or {}).items():
            if name in self._bounds and versions > self._bounds[name].staleness:
                limit = f"staleness at most {self._bounds[name].staleness} in '{name}'"
                raise self._certificate_error(step, f"its oldest token there is {versions} versions behind", limit)
        opened = max((self._checked_open(step, loop, spans, slack_s) for loop in self.plan.loops), default=0)
        used = dict(so_far.channel_slots or {})
        for end, peak in peaks.items():
            if end.name in self._slots and peak > self._slots[end.name]:
                raise self._certificate_error(step, f"channel '{end.name}' held {peak} messages", f"{self._slots[end.name]} slots")
            used[end.name] = max(peak, used.get(end.name, 0))
        self.observed = Observed(max(staleness, so_far.staleness), max(opened, so_far.open_batches), used)

    def _checked_open(self, step: int, loop: PlannedLoop, spans: Sequence[Span], slack_s: float) -> int:
        """Count the open batches of a loop. Raises CertificateError if there are more than the loop may have."""
        bound, opened = self._bounds.get(loop.name), self._open(loop, spans, slack_s)
        most = self.plan.certificate.open_batches if bound is None else bound.open_batches
        if opened > most:
            where = f" in '{loop.name}'" if len(self._bounds) > 1 else ""
            raise self._certificate_error(step, f"{opened} batches were open when it was admitted", f"at most {most} open{where}")
        return opened

    def _open(self, loop: PlannedLoop, spans: Sequence[Span], slack_s: float) -> int:
        """Count the batches of a loop, this step's included, that were open when this step's was admitted. A run may begin at any step.

        A version counts as published from the start of its publish: the reader can have it before the writer reads its clock.
        """
        names = {event.name for event in self.plan.schedule.events if event.node in loop.readers and event.kind in ("fire", "load")}
        began = [span.start_s for span in spans if span.name in names and span.kind in ("fire", "load")]  # a wait has its channel's name
        published = self._published[loop.name]
        opened = 1 + sum(at > min(began) + slack_s for at in published) if began else 0
        published.append(min((s.start_s for s in spans if s.name == publish_event(loop.name)), default=float("-inf")))
        return opened

    def _certificate_error(self, step: int, what: str, limit: str) -> CertificateError:
        return CertificateError(
            f"step {step} of '{self.plan.graph}' broke the plan's certificate ({limit}): {what}; this is a bug in rlgraph: "
            "please report it with plan.to_json()"
        )


WARM_UP = 2  # steps that are left out if enough others remain: first calls compile and allocate
FILE = "run.json"
Settings = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Run:
    """A run, finished or so far. Seconds count from the first tick, so the launch is before 0.

    `steps` holds the metrics of each step. `priced` is the plan of the same graph, compiled with the costs that this run measured; None
    until there are enough steps. `settings` gives the settings of each model and node, `observed` the maxima that the certificate bounds,
    `notices` the settings that worked otherwise than asked. `earlier` holds the steps before the resume of this job.
    """

    plan: Plan
    steps: tuple[Mapping[str, float], ...]
    spans: tuple[Span, ...]
    start_s: float
    end_s: float
    priced: Plan | None
    settings: Settings
    observed: Observed = field(default_factory=Observed)
    notices: tuple[str, ...] = ()
    earlier: tuple[Mapping[str, float], ...] = ()

    @cached_property
    def all_steps(self) -> tuple[Mapping[str, float], ...]:
        """The steps of this job, and the steps before its resume."""
        return (*self.earlier, *self.steps)

    @cached_property
    def first_steady(self) -> int:
        """The number of the first step after the warm-up."""
        numbers = [int(step["training/global_step"]) for step in self.steps]
        return numbers[WARM_UP] if len(numbers) > 2 * WARM_UP else numbers[0] if numbers else 0

    @cached_property
    def steady(self) -> tuple[Mapping[str, float], ...]:
        """The steps after the warm-up."""
        return tuple(step for step in self.steps if step["training/global_step"] >= self.first_steady)

    def values(self, metric: str) -> list[float]:
        """Collect the finite values of a metric over the steps after the warm-up."""
        return [step[metric] for step in self.steady if math.isfinite(step.get(metric, math.nan))]

    @cached_property
    def step_s(self) -> float:
        """The median seconds of a step after the warm-up."""
        return median(self.values("timing_s/step") or [0.0])

    @cached_property
    def bubbles(self) -> Bubbles:
        """The use of each device-second of the whole run, start-up included."""
        return attribute(self.spans, self.plan, self.start_s, self.end_s)

    @cached_property
    def steady_bubbles(self) -> Bubbles:
        """The use of each device-second after the warm-up."""
        before = max((span.end_s for span in self.spans if span.step < self.first_steady), default=self.start_s)
        return attribute(self.spans, self.plan, before, self.end_s)

    def durations(self, event: str) -> list[float]:
        """Sum the seconds of a node, or of another event, in each step after the warm-up: all chunks, and the slowest rank."""
        found: dict[int, dict[str, float]] = {}
        for span in self.steady_spans.get(event, ()):
            ranks = found.setdefault(span.step, {})
            ranks[span.worker] = ranks.get(span.worker, 0.0) + span.end_s - span.start_s
        return [max(ranks.values()) for ranks in found.values()]

    @cached_property
    def steady_spans(self) -> Mapping[str, Sequence[Span]]:
        """The spans after the warm-up of each node and of each other event, by name."""
        events = {event.name: event for event in self.plan.schedule.events}
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            event = events.get(span.name)
            if event is not None and span.step >= self.first_steady and event.kind == span.kind:
                found.setdefault(event.node if event.kind == "fire" else span.name, []).append(span)
        return found

    def save(self, folder: str | Path) -> None:
        """Write the run into a folder for `Run.load`. JSON has no NaN, so a metric that is not finite is left out of its step."""
        steps, earlier = (
            tuple({name: value for name, value in step.items() if math.isfinite(value)} for step in part)
            for part in (self.steps, self.earlier)
        )
        priced = None if self.priced is None else self.priced.values
        unfinished = Path(folder) / f"{FILE}.part"  # a reader during the run finds a complete file
        unfinished.write_bytes(msgspec.json.encode(replace(self, plan=self.plan.values, priced=priced, steps=steps, earlier=earlier)))
        unfinished.replace(Path(folder) / FILE)

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Read the run in a folder. Raises DataError if the folder has none, or if the file is not a run."""
        path = Path(folder) / FILE
        if not path.is_file():
            raise DataError(f"'{path}': there is no recorded run; rg.record(job, steps, folder) writes one")
        try:
            raw = msgspec.json.decode(path.read_bytes())
            if isinstance(raw, dict):
                raw |= {key: with_new_names(raw[key]) for key in ("plan", "priced") if key in raw}
            return msgspec.convert(raw, cls)
        except msgspec.DecodeError as error:
            raise DataError(f"'{path}' is not a recorded run: {error}; it may have been cut off, or come from another version") from error


@dataclass(frozen=True)
class EventComparison:
    """Predicted and measured seconds of an event, or of the step."""

    name: str
    predicted_s: float
    measured_s: float  # the median
    p10_s: float  # 10th percentile
    p90_s: float  # 90th percentile
    count: int


def compare_events(run: Run) -> Iterator[EventComparison]:
    """Yield the step, then every measured event, with the launch plan's prediction for it."""
    predicted: dict[str, float] = {}
    for event in run.plan.schedule.events:
        name = event.node if event.kind == "fire" else event.name
        predicted[name] = predicted.get(name, 0.0) + event.seconds
    measured = {"step": run.values("timing_s/step"), **{name: run.durations(name) for name in predicted}}
    for name, seconds in measured.items():
        if seconds:
            ordered = sorted(seconds)
            p10_s, p90_s = (ordered[round(quantile * (len(ordered) - 1))] for quantile in (0.1, 0.9))
            yield EventComparison(name, predicted.get(name, run.plan.prediction.step_s), median(seconds), p10_s, p90_s, len(seconds))


@dataclass(frozen=True)
class WaitComparison:
    """Predicted and measured seconds per step that a pool, or a worker of the host, waits for a channel or a feedback edge."""

    who: str
    on: str
    reason: Reason
    predicted_s: float
    measured_s: float


USES: Mapping[Reason, Use] = {"data": "data", "slots": "room", "loop": "weights"}


def compare_waits(run: Run) -> Iterator[WaitComparison]:
    """Yield the waits that the plan priced with this run's costs predicts, longest first, next to the measured waits."""
    steps = len(run.steady)
    counts: dict[str | None, float] = {}
    for device in devices(run.plan):
        counts[device.pool] = counts.get(device.pool, 0.0) + device.count
    for wait in run.priced.prediction.waits if run.priced is not None and steps else ():
        pooled = wait.who in counts
        rows = run.steady_bubbles.of_pool(wait.who) if pooled else run.steady_bubbles.of_worker(wait.who)
        total = sum(row.seconds for row in rows if row.use == USES.get(wait.reason) and row.name == wait.on)
        yield WaitComparison(wait.who, wait.on, wait.reason, wait.seconds, total / (counts[wait.who] if pooled else 1.0) / steps)


# The facts of a run for the model card of an export, besides its plan.


@dataclass(frozen=True)
class CardFacts:
    """The exported model and its run: the model's name in the plan, its `base` (a hub id or a folder), the steps that the weights have
    seen, the settings of the graph, and the metrics of the run's first and last step."""

    model: str
    base: str
    step: int
    dtype: str
    settings: Settings
    first: Mapping[str, float]
    last: Mapping[str, float]
