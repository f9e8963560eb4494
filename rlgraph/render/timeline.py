"""The spans of a run as a timeline: HTML for the report, and Chrome-trace JSON for ui.perfetto.dev."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from rlgraph.analysis import words
from rlgraph.analysis.attribution import USES
from rlgraph.plan.plan import Plan, PlannedLoop, PlannedWorker
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import WORK, Span
from rlgraph.render.charts import ticks

# Spans as Chrome-trace JSON for ui.perfetto.dev: a track for each worker, weight versions as arrows. Spans are predicted or measured.

PREDICTED, MEASURED = "predicted", "measured"
PREFIX = {
    "wait": "wait ",
    "room": "no free slot of ",
    "carry": "around ",
    "tools": "wait for tools of ",
    "idle": "",
    "start": "",
}  # of spans that are not events
MOST_ARROWS = 10**9  # in one group of tracks: arrows of two groups get different numbers
MARGIN_US = 0.001  # an arrow starts this long before its span ends, so that the viewer binds it to that span


def write_trace(path: str | Path, spans: Sequence[Span], plan: Plan) -> None:
    """Write the trace of `spans` as JSON, to open at ui.perfetto.dev."""
    Path(path).write_text(json.dumps(trace(spans, plan)), encoding="utf-8")


def write_two_traces(path: str | Path, predicted: Sequence[Span], measured: Sequence[Span], plan: Plan) -> None:
    """Write one trace with two groups of tracks, the predicted and the measured spans; both begin at 0."""
    pair = {PREDICTED: from_zero(predicted), MEASURED: from_zero(measured)}
    traces = [trace(spans, plan, number, f"{plan.graph}, {name}") for number, (name, spans) in enumerate(pair.items(), start=1)]
    both = {**traces[0], "traceEvents": [event for found in traces for event in found["traceEvents"]]}
    Path(path).write_text(json.dumps(both), encoding="utf-8")


def from_zero(spans: Sequence[Span]) -> list[Span]:
    """Shift the spans so that the first starts at 0."""
    zero = min((span.start_s for span in spans), default=0.0)
    return [replace(span, start_s=span.start_s - zero, end_s=span.end_s - zero) for span in spans]


def per_rank(spans: Sequence[Span], plan: Plan) -> list[Span]:
    """Repeat each predicted span for every rank that runs it."""
    ranks = {event.worker: plan.node(event.node).workers for event in plan.schedule.events}  # a wait is named after its channel
    return [replace(span, worker=worker) for span in spans for worker in ranks[span.worker]]


def trace(spans: Sequence[Span], plan: Plan, process: int = 1, title: str = "") -> dict[str, Any]:
    """Build the Chrome-trace JSON of spans that have the names of the plan's events; a wait has the name of its channel.

    Tracks are the plan's workers, in its order. Spans that overlap with a worker's main work, e.g. receiving weights, are on a second track
    under it. An arrow leads from each published version to each span that begins to use it.
    """
    tracks = _tracks(spans, plan)
    numbers = _numbers(tracks, plan)
    names: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": title or plan.graph}}]
    names.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
    for track, number in numbers.items():
        common = {"ph": "M", "pid": process, "tid": number}
        names.append({**common, "name": "thread_name", "args": {"name": str(track)}})
        names.append({**common, "name": "thread_sort_index", "args": {"sort_index": number}})
    complete = [_complete(span, process, numbers[track]) for span, track in zip(spans, tracks, strict=True)]
    arrows = list(_arrows(spans, process, [numbers[track] for track in tracks], plan))
    about = {"graph": plan.graph, "predicted_period_s": plan.prediction.period_s, "costs": plan.prediction.cost}
    return {"traceEvents": [*names, *complete, *arrows], "displayTimeUnit": "ms", "otherData": about}


def _us(value_s: float) -> float:
    return round(value_s * 1e6, 3)


def _complete(span: Span, process: int, track: int) -> dict[str, Any]:
    waits = span.kind in PREFIX
    event: dict[str, Any] = {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": f"{PREFIX.get(span.kind, '')}{span.name}@{span.step}",
        "cat": span.kind,
        "ts": _us(span.start_s),
        "dur": round(_us(span.end_s) - _us(span.start_s), 3),
        "args": {"step": span.step, "version": span.version, "kind": span.kind},
    }
    return {**event, "cname": "grey"} if waits else event


@dataclass(frozen=True, order=True)
class Track:
    """A track of a worker in the trace: its main track, or one of the tracks below it, numbered from 1."""

    worker: str
    place: int = 0

    def __str__(self) -> str:
        return self.worker if self.place == 0 else f"{self.worker} beside" if self.place == 1 else f"{self.worker} beside {self.place}"


def _tracks(spans: Sequence[Span], plan: Plan) -> list[Track]:
    """Assign each span to the first track of its worker on which spans nest; receiving is never on the main track."""
    found = [Track("")] * len(spans)
    open_spans: dict[Track, list[float]] = {}
    for index in sorted(range(len(spans)), key=lambda i: (_us(spans[i].start_s), -_us(spans[i].end_s))):
        span = spans[index]
        place = 1 if span.kind == "receive" else 0
        while not _nests(span, open_spans.setdefault(Track(span.worker, place), [])):
            place += 1
        found[index] = Track(span.worker, place)
    return found


def _nests(span: Span, ends: list[float]) -> bool:
    """Open a span on a track, given the ends of the spans open there; False if it does not nest in them."""
    while ends and ends[-1] <= _us(span.start_s):
        ends.pop()
    if ends and _us(span.end_s) > ends[-1]:
        return False
    ends.append(_us(span.end_s))
    return True


def _numbers(tracks: Sequence[Track], plan: Plan) -> dict[Track, int]:
    """Number the tracks: the plan's workers first, each with all of its tracks, then others in order of appearance."""
    known = [worker.name for worker in plan.workers]
    unknown = [track for track in dict.fromkeys(tracks) if track.worker not in known]
    ordered = [track for name in known for track in (Track(name), *sorted(t for t in set(tracks) if t.worker == name and t.place))]
    return {track: number for number, track in enumerate((*ordered, *unknown), start=1)}


def _arrows(spans: Sequence[Span], process: int, tracks: Sequence[int], plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the start and the end of an arrow for each use of a version. Step k publishes version k + 1; nothing publishes version 0."""
    number = 0
    for loop in plan.loops:
        published = _publishing_spans(spans, loop, plan)
        for index in _uses(spans, loop, plan):
            version = _version_of(spans, index, loop, published)
            if version not in published:
                continue
            number += 1
            source = published[version]
            name = f"{loop.name} v{version}"
            common = {"pid": process, "cat": "weights", "name": name, "id": process * MOST_ARROWS + number}
            begin, end = _us(spans[source].start_s), _us(spans[source].end_s)
            yield {**common, "ph": "s", "tid": tracks[source], "ts": round(max(begin, end - MARGIN_US), 3)}
            yield {**common, "ph": "f", "bp": "e", "tid": tracks[index], "ts": _us(spans[index].start_s)}


def _events(plan: Plan, loop: PlannedLoop, kind: str) -> set[str]:
    """The names of the events of one kind on a feedback edge."""
    return {event.name for event in plan.schedule.events if event.kind == kind and event.edge == loop.name}


def _publishing_spans(spans: Sequence[Span], loop: PlannedLoop, plan: Plan) -> Mapping[int, int]:
    """Find the span that published each version: the publish, or the update of that step if publishing has no span."""
    found: dict[int, int] = {}
    for names in ({loop.writer}, _events(plan, loop, "publish")):
        steps = {span.step + 1: index for index, span in reversed(list(enumerate(spans))) if span.name in names and span.kind in WORK}
        found.update(steps)
    return found


def _uses(spans: Sequence[Span], loop: PlannedLoop, plan: Plan) -> list[int]:
    """Find the spans that begin to use a version: each load, or the firing of the reader if loading has no span."""
    loads, readers = _events(plan, loop, "load"), set(loop.readers)
    loaded = {(span.worker, span.step) for span in spans if span.name in loads}
    return [
        index
        for index, span in enumerate(spans)
        if span.name in loads or (span.name in readers and span.kind == "fire" and (span.worker, span.step) not in loaded)
    ]


def _version_of(spans: Sequence[Span], index: int, loop: PlannedLoop, published: Mapping[int, int]) -> int:
    """The version that a span uses: the measured version, or else the version by the rule of its loop."""
    span = spans[index]
    if span.version is not None:
        return span.version
    if loop.due is not None:
        return span.step + 1
    if not loop.latest:
        return max(0, span.step - loop.depth)
    return max((version for version, source in published.items() if spans[source].end_s <= span.start_s), default=0)


# The timeline of a report as HTML: a lane for each worker, a block for each span. It scrolls and zooms without a library.

SETTLE = 12  # predicted steps that fill the pipeline before the shown ones
RANKS = 2  # lanes of one model; its other ranks do the same work
THINNEST = 1e-4  # share of the window: shorter spans are invisible, even zoomed


@dataclass(frozen=True)
class Window:
    """The spans of whole steps, cut to the time from `begin_s` to `end_s`."""

    spans: tuple[Span, ...]
    begin_s: float
    end_s: float


def last_steps(spans: Sequence[Span], count: int) -> Window:
    """Cut the spans to the last `count` steps, from the end of the step before them."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(span.end_s, ends.get(span.step, 0.0))
    steps = sorted(ends)[-count - 1 :]
    begin, end = (ends[steps[0]] if len(steps) > count else min(s.start_s for s in spans)), max(ends.values())
    cut = (replace(span, start_s=max(span.start_s, begin), end_s=min(span.end_s, end)) for span in spans)
    return Window(tuple(span for span in cut if span.end_s > span.start_s), begin, end)


def predicted_steps(plan: Plan, last: int, count: int) -> Window:
    """Simulate `count` steps of the steady state, numbered so that the last of them is step `last`."""
    spans = per_rank(simulate(plan.schedule, SETTLE + count), plan)
    return last_steps([replace(span, step=span.step + last + 1 - SETTLE - count) for span in spans], count)


def timeline(groups: Sequence[tuple[str, Window]], plan: Plan) -> Iterator[str]:
    """Yield the lanes of each group on one time scale, which begins at 0 for each group."""
    length = max((window.end_s - window.begin_s for _, window in groups), default=0.0) or 1.0
    yield '<div class="tracks"><div class="scale">'
    for title, window in groups:
        yield f'<div class="group">{escape(title)}</div>'
        yield '<div class="axis">'
        for tick in (t for t in ticks([0.0, length]) if t < length * 0.98):
            yield f'<span style="left:{100 * tick / length:.3f}%">{words.seconds(tick)}</span>'
        yield "</div>"
        for worker in _drawn_workers(plan):
            yield from _lane(worker, [s for s in window.spans if s.worker == worker.name], window.begin_s, length, plan)
    yield "</div></div>"


def _drawn_workers(plan: Plan) -> list[PlannedWorker]:
    return [worker for worker in plan.workers if worker.rank < RANKS]


def _lane(worker: PlannedWorker, spans: Sequence[Span], begin_s: float, length: float, plan: Plan) -> Iterator[str]:
    beside = [span for span in spans if span.kind == "receive"]
    for name, found in ((worker.name, [span for span in spans if span.kind != "receive"]), (f"{worker.name} beside", beside)):
        if name == worker.name or found:
            yield f'<div class="lane"><div class="name">{escape(words.clean(name))}</div>'
            yield from (_block(span, begin_s, length, plan) for span in found if span.end_s - span.start_s > THINNEST * length)
            yield "</div>"


def _block(span: Span, begin_s: float, length: float, plan: Plan) -> str:
    left, width = 100 * (span.start_s - begin_s) / length, 100 * (span.end_s - span.start_s) / length
    name = f"{PREFIX.get(span.kind, '')}{words.clean(span.name)}"
    tooltip = f"{name}, step {span.step}: {words.seconds(span.end_s - span.start_s)}" + (
        f", version {span.version}" if span.version is not None else ""
    )
    label = f"<b>{escape(words.clean(span.name))} {span.step}</b>" if span.kind == "fire" and width > 1 else ""
    return f'<i class="{colour(span, plan)}" style="left:{left:.4f}%;width:{width:.4f}%" title="{escape(tooltip)}">{label}</i>'


def colour(span: Span, plan: Plan) -> str:
    """Choose the CSS class that colours a span: the work of its node, or the use of the device."""
    if span.kind == "fire":
        return next((plan.node(event.node).work for event in plan.schedule.events if event.name == span.name), "host")
    if span.kind == "wait":
        return "weights" if any(loop.name == span.name for loop in plan.loops) else _wait_class(span.name, plan)
    return USES[span.kind]


def _wait_class(channel: str, plan: Plan) -> str:
    return "order" if any(c.name == channel and c.kind == "order" for c in plan.channels) else "data"
