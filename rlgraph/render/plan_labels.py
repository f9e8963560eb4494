"""Every text of the picture of a plan, placed so that it has room in any sans-serif font."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlgraph.analysis import words
from rlgraph.channels.api import transport_of
from rlgraph.plan.advice import Critical
from rlgraph.plan.plan import Plan, PlannedLoop, PlannedNode, PlannedPool

# Estimate the width of a text in any sans-serif font, as an upper bound, since the fonts of the reader's machine are unknown.
#
# Widths are classes of em, at least as wide as in Arial, DejaVu Sans and Verdana, which browsers fall back to.

_REGULAR = {
    0.37: "'ijlf .,",
    0.46: 'It()[]/\\:;!-r"|·',
    0.56: "cszL?J",
    0.60: "kvxy",
    0.64: "abdeghnopquFT0123456789_$*{}`",
    0.73: "ABCEKPRSVXYZ",
    0.80: "DGHNOQU&",
    0.87: "wM#+<=>^~",
    1.00: "mW…",
    1.08: "%@",
}
_BOLD = {
    0.38: "'il .,",
    0.44: "jf",
    0.50: "rt-!:;",
    0.56: "IJ()[]|·",
    0.60: "csz",
    0.69: "aekovxyLTF/\\?",
    0.72: 'bdghnpqu0123456789_$*{}"`',
    0.78: "ABCEKPRSVXYZ",
    0.88: "DGHNOQU&#+<=>^~",
    1.00: "wM…",
    1.13: "mW@",
    1.28: "%",
}
_OTHER, _WIDE = 1.5, 1.6  # characters of other scripts, and characters that fill two places in a terminal

UNTIMED = "placeholder costs, so no times"
ROUNDING = 1e-6  # pixels: tolerance for sums of floats, so that a text fits the room made for it


def _by_char(classes: Mapping[float, str]) -> dict[str, float]:
    return {char: em for em, chars in classes.items() for char in chars}


_EM = {False: _by_char(_REGULAR), True: _by_char(_BOLD)}


def width(text: str, size: float, bold: bool = False) -> float:
    """Bound the width in pixels of `text` at a font size of `size` pixels."""
    return size * sum(_em(char, bold) for char in text)


def _em(char: str, bold: bool) -> float:
    if char in _EM[bold]:
        return _EM[bold][char]
    return _WIDE if unicodedata.east_asian_width(char) in "WF" else _OTHER


def fit_text(text: str, size: float, room: float, bold: bool = False) -> str:
    """Cut `text` off with an ellipsis if it is wider than `room` pixels."""
    if width(text, size, bold) <= room + ROUNDING:
        return text
    kept = text
    while kept and width(kept + "…", size, bold) > room + ROUNDING:
        kept = kept[:-1]
    return kept.rstrip() + "…"


Tone: TypeAlias = Literal["ink", "muted", "red", "weights", "badge", "red badge"]
Mark: TypeAlias = Literal["critical", "local", "weights", "order"]

HEADING, NAME, SMALL = 18.0, 15.0, 13.0  # font sizes in pixels
PAD = 9.0  # between the edge of a box and its texts
BADGE = 20.0  # room for the number of a node's place in its pool, in front of its name
BOX_MOST = 320.0
LABEL_MOST = 190.0
PLACEHOLDERS = "nominal"  # costs that were not measured: a picture does not show their seconds


@dataclass(frozen=True)
class TextLine:
    """A line of text; `x` is its start, middle or end as `anchor` says, `y` its base line."""

    x: float
    y: float
    text: str
    size: float = SMALL
    tone: Tone = "ink"
    bold: bool = False
    anchor: Literal["start", "middle", "end"] = "start"

    @property
    def span(self) -> tuple[float, float]:
        """The leftmost and the rightmost pixel that the text can take."""
        wide = width(self.text, self.size, self.bold)
        left = self.x - {"start": 0.0, "middle": wide / 2, "end": wide}[self.anchor]
        return left, left + wide


@dataclass(frozen=True)
class LegendItem:
    """A sign of the picture with its meaning."""

    mark: Mark
    x: float
    y: float
    label: TextLine

    @property
    def right(self) -> float:
        return self.label.span[1]


def has_times(plan: Plan) -> bool:
    """True if the plan's seconds mean something; with placeholder costs they do not."""
    return plan.prediction.cost != PLACEHOLDERS


def step_time(plan: Plan) -> str:
    """Write the predicted step time, with the source of its costs."""
    return words.prediction(plan) if has_times(plan) else UNTIMED


def _time(node: PlannedNode) -> str:
    if node.cost != PLACEHOLDERS:
        return words.node_time(node)
    return f"every {node.due.every} steps" if node.due else ""


def header(plan: Plan, x: float) -> list[TextLine]:
    """Place the name of the graph and, below it, the cluster and the predicted step."""
    name = fit_text(words.clean(plan.graph), HEADING, 600.0, bold=True)
    return [
        TextLine(x, 26.0, name, HEADING, bold=True),
        TextLine(x, 48.0, f"{words.cluster(plan.cluster)} · {step_time(plan)}", NAME),
    ]


def lane_labels(lanes: Iterable[tuple[float, PlannedPool | None]], plan: Plan, x: float) -> list[TextLine]:
    """Place the name, devices and predicted busy share of each lane; each lane comes with the height at which it begins."""
    found = []
    for y, pool in lanes:
        lines = _label_lines(pool, plan)
        room = LABEL_MOST - 2 * PAD
        found.append(TextLine(x + PAD, y + 23.0, fit_text(lines[0], NAME, room, bold=True), NAME, bold=True))
        found += [
            TextLine(x + PAD, y + 42.0 + 18.0 * row, fit_text(line, SMALL, room), SMALL, "muted") for row, line in enumerate(lines[1:])
        ]
    return found


def label_width(lanes: Sequence[PlannedPool | None], plan: Plan) -> float:
    """Compute the room that the labels of the lanes take."""
    widest = max(
        max(width(line, NAME if i == 0 else SMALL, bold=i == 0) for i, line in enumerate(_label_lines(pool, plan))) for pool in lanes
    )
    return min(widest + 2 * PAD, LABEL_MOST)


def _label_lines(pool: PlannedPool | None, plan: Plan) -> list[str]:
    if pool is None:
        return [words.HOST]
    used = any(node.pool == pool.name for node in plan.nodes)
    models = {node.model for node in plan.nodes if node.pool == pool.name}
    shared = [model.split for model in plan.models if model.name in models and model.split]
    busy = [f"busy {pool.busy:.0%}"] if has_times(plan) else []
    return [words.clean(pool.name), " · ".join([words.devices(pool), *shared]), *(busy if used else ["no nodes"])]


def box_width(node: PlannedNode, order: tuple[int, int] | None, plan: Plan) -> float:
    """Compute the width at which the texts of a box fit, within limits."""
    first = (BADGE if order else 0.0) + width(words.clean(node.name), NAME, bold=True)
    return min(max(first, width(_time(node), SMALL)) + 2 * PAD, BOX_MOST)


def box_texts(
    node: PlannedNode, order: tuple[int, int] | None, place: tuple[float, float, float, float], plan: Plan, red: Critical
) -> list[TextLine]:
    """Place the name and, below it, the predicted seconds of a node whose box is at `place` (x, y, width, height)."""
    x, y, wide, high = place
    time = _time(node)
    base = y + high / 2 + (-3.0 if time else 5.0)
    found, start = [], x + PAD
    if order:
        badge: Tone = "red badge" if node.name in red.order else "badge"
        found.append(TextLine(start + 7.5, base - 1.5, str(order[0]), 11.0, badge, bold=True, anchor="middle"))
        start += BADGE
    name = fit_text(words.clean(node.name), NAME, x + wide - PAD - start, bold=True)
    found.append(TextLine(start, base, name, NAME, bold=True))
    if time:
        found.append(TextLine(x + PAD, base + 17.0, time, SMALL, "red" if node.name in red.nodes else "muted"))
    return found


def loop_label(
    loop: PlannedLoop, y: float, middle: float, lower: Sequence[float], room: tuple[float, float], tone: Tone = "weights"
) -> TextLine:
    """Place the label of a feedback edge as near to `middle` as it fits in `room`, clear of the vertical lines `lower`."""
    name = fit_text(words.clean(loop.name), SMALL, 220.0)
    wide = width(f"{name}: {words.loop_terms(loop)}", SMALL)
    least, most = room[0] + wide / 2, room[1] - wide / 2
    wish = min(max(middle, least), max(most, least))
    edges = [side for x in lower for side in (x - wide / 2 - 8.0, x + wide / 2 + 8.0)]
    beyond = max([least, *edges])
    free = [x for x in [wish, beyond, *(e for e in edges if least <= e <= most)] if all(abs(x - v) >= wide / 2 + 7.9 for v in lower)]
    return TextLine(min(free, key=lambda x: abs(x - wish)), y, f"{name}: {words.loop_terms(loop)}", SMALL, tone, anchor="middle")


def legend(plan: Plan, red: Critical, x: float, y: float, right: float) -> tuple[LegendItem, ...]:
    """Place the signs that this picture uses, in as many lines as the width requires."""
    pools = [node.pool for node in plan.nodes if node.pool is not None]
    said: list[tuple[Mark, str, bool]] = [
        ("critical", "critical cycle: sets the step", bool(red.nodes)),
        ("local", "within one process", any(transport_of(c.transport).reach == "process" for c in plan.channels)),
        ("weights", "weights for a later step", bool(plan.loops)),
        ("order", "order in its pool", len(set(pools)) < len(pools)),
    ]
    items: list[LegendItem] = []
    at = x + PAD
    for mark, meaning, used in said:
        if not used:
            continue
        wide = 32.0 + width(meaning, SMALL)
        if items and at + wide > right:
            at, y = x + PAD, y + 20.0
        items.append(LegendItem(mark, at, y, TextLine(at + 32.0, y, meaning, SMALL, "muted")))
        at += wide + 26.0
    return tuple(items)
