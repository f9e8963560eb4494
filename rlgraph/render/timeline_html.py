"""The timeline of a report as HTML: a lane for each worker, a block for each span. It scrolls and zooms without a library."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from rlgraph.analysis import words
from rlgraph.analysis.attribution import USES
from rlgraph.plan.plan import Plan, PlannedWorker
from rlgraph.plan.play import simulate
from rlgraph.plan.schedule import Span
from rlgraph.render.chrome_trace import PREFIX, per_rank
from rlgraph.render.curve import ticks

SETTLE = 12  # predicted steps that fill the pipeline before the shown ones
RANKS = 2  # lanes of one model; its other ranks do the same work
THINNEST = 1e-4  # of the window: shorter spans cannot be seen, even zoomed


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
        for worker in _shown(plan):
            yield from _lane(worker, [s for s in window.spans if s.worker == worker.name], window.begin_s, length, plan)
    yield "</div></div>"


def _shown(plan: Plan) -> list[PlannedWorker]:
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
