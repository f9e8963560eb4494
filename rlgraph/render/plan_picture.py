"""The picture of a plan as SVG: a lane for each pool, boxes for nodes, lines for channels, feedback edges below, the critical cycle red."""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from rlgraph.analysis import words
from rlgraph.channels.api import transport_of
from rlgraph.plan.plan import Plan, PlannedChannel
from rlgraph.render.plan_labels import LegendItem, TextLine, step_time
from rlgraph.render.plan_layout import ARROW, Box, Edge, Lane, Layout, LoopLine, Point, layout

FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
INK, MUTED, RED, VIOLET = "#1c2130", "#4d5464", "#c2330f", "#7a3fb0"
EDGE_COLOUR, LOCAL_COLOUR = "#565d73", "#aab0c0"
LANE_FILL, LANE_LINE = "#f4f6f8", "#d9dee4"
BADGES = {"badge": MUTED, "red badge": RED}
FILLS = {"generate": "#e3edfd", "train": "#fdeadb"}
# A picture in a separate file has a dark variant for readers who prefer one; a page that embeds a picture sets its colours.
IN_THE_DARK = "<style>@media (prefers-color-scheme: dark) { svg:root { filter: invert(0.9) hue-rotate(180deg) } }</style>"
RADIUS = 8.0  # of the corners of a feedback edge


def svg(plan: Plan) -> str:
    """Draw a plan as one SVG document that needs no font, script or other file."""
    picture = layout(plan)
    said = f"{words.clean(plan.graph)} on {words.cluster(plan.cluster)}: {step_time(plan)}"
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(picture.width)} {_n(picture.height)}" '
        f'width="{_n(picture.width)}" height="{_n(picture.height)}" font-family="{FONT}" role="img" aria-label="{escape(said)}">',
        IN_THE_DARK,
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *(_lane(lane) for lane in picture.lanes),
        *(_edge(edge, plan, picture) for edge in sorted(picture.edges, key=lambda e: _layer(e, picture))),
        *(_loop(line, plan, picture) for line in picture.loops),
        *(_box(box, plan, picture) for box in picture.boxes),
        *(_legend(item) for item in picture.legend),
        *(_text(text) for text in (*picture.texts, *(item.label for item in picture.legend))),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _title(*lines: str) -> str:
    return f"<title>{escape(chr(10).join(lines))}</title>"


def _lane(lane: Lane) -> str:
    name = words.HOST if lane.pool is None else words.clean(lane.pool.name)
    return (
        f'<g class="lane">{_title(name)}<rect x="{_n(lane.x)}" y="{_n(lane.y)}" width="{_n(lane.width)}" height="{_n(lane.height)}" '
        f'rx="6" fill="{LANE_FILL}" stroke="{LANE_LINE}"/></g>'
    )


def _box(box: Box, plan: Plan, picture: Layout) -> str:
    node, red = box.node, box.node.name in picture.critical.nodes
    tip = [
        f"{words.clean(node.name)}: {words.node_time(node)} ({node.cost}), {node.rows} rows per step",
        f"reads {words.elide(node.reads, len(node.reads)) or 'nothing'}",
        f"writes {words.elide(node.writes, len(node.writes)) or 'no columns'}",
        f"runs in {words.elide(node.workers, 8)}",
    ]
    if box.order:
        tip.append(f"number {box.order[0]} of {box.order[1]} in the order of pool {words.clean(node.pool or words.HOST)}")
    tip += [
        f"gets {words.earlier(channel)}, of {words.clean(channel.writer)}"
        for channel in plan.channels
        if channel.kind == "earlier" and node.name in channel.readers
    ]
    tip += [_channel_words(channel) for channel in plan.channels if channel.kind == "order" and node.name in channel.readers]
    return (
        f'<g class="node">{_title(*tip)}<rect x="{_n(box.x)}" y="{_n(box.y)}" width="{_n(box.width)}" height="{_n(box.height)}" rx="5" '
        f'fill="{FILLS.get(node.work, "#ffffff")}" stroke="{RED if red else EDGE_COLOUR}" stroke-width="{"2" if red else "1.2"}"/></g>'
    )


def _channel_words(channel: PlannedChannel) -> str:
    if channel.kind == "order":
        return (
            f"channel {words.clean(channel.name)}: carries the order only, {channel.transport}, {words.with_count(channel.slots, 'slot')}"
        )
    unit = "batch" if channel.chunks == 1 else "chunk of a batch"
    load = f"{words.size(channel.bytes)} a {unit}" if channel.bytes is not None else "bytes not known"
    return f"channel {words.clean(channel.name)}: {channel.transport}, {words.with_count(channel.slots, 'slot')}, {load}"


def _is_red(edge: Edge, picture: Layout) -> bool:
    return (edge.channel.writer, edge.reader) in picture.critical.edges


def _layer(edge: Edge, picture: Layout) -> int:
    """The drawing order of an edge; the most important edges are drawn last, on top."""
    return 2 if _is_red(edge, picture) else int(transport_of(edge.channel.transport).reach != "process")


def _edge(edge: Edge, plan: Plan, picture: Layout) -> str:
    red, channel = _is_red(edge, picture), edge.channel
    colour = RED if red else LOCAL_COLOUR if transport_of(channel.transport).reach == "process" else EDGE_COLOUR
    columns = words.read_of(channel.columns, plan.node(edge.reader).reads)
    tip = _title(
        f"{words.clean(channel.writer)} → {words.clean(edge.reader)}",
        f"columns {words.elide(columns, len(columns)) or 'none'}",
        _channel_words(channel),
    )
    line = _curved_path(edge.points[:-1])
    return (
        f'<g class="edge" fill="none" stroke="{colour}">{tip}<path d="{line}" stroke="transparent" stroke-width="9"/>'
        f'<path d="{line}" stroke-width="{"2.2" if red else "1.3"}"/>{_arrow(edge.points[-1], (1, 0), colour)}</g>'
    )


def _curved_path(points: Sequence[Point]) -> str:
    """Build a path through points: a line between two at one height, else a curve that leaves and arrives horizontally."""
    parts = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        middle = _n((x0 + x1) / 2)
        parts.append(f"H{_n(x1)}" if y0 == y1 else f"C{middle} {_n(y0)} {middle} {_n(y1)} {_n(x1)} {_n(y1)}")
    return "".join(parts)


def _loop(line: LoopLine, plan: Plan, picture: Layout) -> str:
    loop, red = line.loop, line.loop.name in picture.critical.loops
    colour = RED if red else VIOLET
    cost = "hidden behind other work" if loop.hidden else "which lengthens the step"
    version = "the latest version" if loop.latest else "exactly the version of its depth"
    tip = _title(
        f"{words.clean(loop.name)}: {words.clean(loop.writer)} → {words.clean(line.reader)}, {version}",
        words.loop_terms(loop),
        f"expected staleness {loop.staleness:.2f}, {words.with_count(loop.slots, 'slot')}",
        f"publishing takes {words.seconds(loop.publish_s, plan.prediction.cost)}, {cost}",
    )
    (_, y0), (x1, y1) = line.points[-2:]
    way = (1, 0) if y0 == y1 else (0, -1)
    short = (*line.points[:-1], (x1 - ARROW * way[0], y1 - ARROW * way[1]))
    return (
        f'<g class="loop" fill="none" stroke="{colour}">{tip}<path d="{_bent_path(short)}" stroke="transparent" stroke-width="9"/>'
        f'<path d="{_bent_path(short)}" stroke-width="{"2.6" if red else "1.6"}" stroke-dasharray="7 4"/>'
        f"{_arrow((x1, y1), way, colour)}</g>"
    )


def _bent_path(points: Sequence[Point]) -> str:
    """Build a path of right angles with round corners."""
    parts = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        start, end = _towards(corner, before), _towards(corner, after)
        parts.append(f"L{_n(start[0])} {_n(start[1])}Q{_n(corner[0])} {_n(corner[1])} {_n(end[0])} {_n(end[1])}")
    return "".join(parts) + f"L{_n(points[-1][0])} {_n(points[-1][1])}"


def _towards(corner: Point, other: Point) -> Point:
    dx, dy = other[0] - corner[0], other[1] - corner[1]
    length = abs(dx) + abs(dy)
    part = min(RADIUS, length / 2) / length if length else 0.0
    return corner[0] + dx * part, corner[1] + dy * part


def _arrow(tip: Point, way: tuple[int, int], colour: str) -> str:
    (x, y), (dx, dy), half = tip, way, 3.8
    left = (x - ARROW * dx - half * dy, y - ARROW * dy + half * dx)
    right = (x - ARROW * dx + half * dy, y - ARROW * dy - half * dx)
    return f'<path d="M{_n(x)} {_n(y)}L{_n(left[0])} {_n(left[1])}L{_n(right[0])} {_n(right[1])}Z" fill="{colour}" stroke="none"/>'


def _text(text: TextLine) -> str:
    badge = ""
    if text.tone in BADGES:
        badge = f'<circle cx="{_n(text.x)}" cy="{_n(text.y - 3.5)}" r="8" fill="{BADGES[text.tone]}"/>'
    fill = {"ink": INK, "muted": MUTED, "red": RED, "weights": VIOLET}.get(text.tone, "#ffffff")
    weight = ' font-weight="bold"' if text.bold else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    return (
        f'{badge}<text x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}" fill="{fill}" pointer-events="none"{weight}{anchor}>'
        f"{escape(text.text, quote=False)}</text>"
    )


def _legend(item: LegendItem) -> str:
    x, y = item.x, item.y - 4.0
    if item.mark == "order":
        return _text(TextLine(x + 15.0, item.y, "1", 11.0, "badge", bold=True, anchor="middle"))
    styles = {
        "critical": f'stroke="{RED}" stroke-width="2.2"',
        "local": f'stroke="{LOCAL_COLOUR}" stroke-width="1.6"',
        "weights": f'stroke="{VIOLET}" stroke-width="1.6" stroke-dasharray="7 4"',
    }
    return f'<path d="M{_n(x)} {_n(y)}H{_n(x + 25)}" fill="none" {styles[item.mark]}/>'
