"""A small line chart as SVG, for metrics by step."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from rlgraph.analysis import words
from rlgraph.render.plan_svg.text_width import fitted, width

WIDTH, HEIGHT = 640.0, 300.0
SIZE = 12.0
COLOURS = ("#2f6fd0", "#c2330f", "#2b8a57", "#8a4fbe", "#b7791f", "#4a5568")
INK, MUTED, GRID = "#1c2130", "#4d5464", "#e4e8ed"
FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def svg(title: str, xs: Sequence[float], series: Mapping[str, Sequence[float]], y_label: str) -> str:
    """Draw each series over `xs` as a line chart; a NaN leaves a gap in its line.

    Raises ValueError if a series does not have one value for each of `xs`.
    """
    for name, values in series.items():
        if len(values) != len(xs):
            raise ValueError(f"series '{name}' has {len(values)} values for {len(xs)} positions; give one value for each position")
    seen = [value for values in series.values() for value in values if math.isfinite(value)]
    y_ticks, x_ticks = ticks(seen), ticks([x for x in xs if math.isfinite(x)], whole=all(float(x).is_integer() for x in xs))
    rows = _legend_rows(list(series)) if len(series) > 1 else []
    left, top = 22.0 + max(width(_number(tick, y_ticks), SIZE) for tick in y_ticks), 64.0 + 20.0 * len(rows)
    right, bottom = WIDTH - 24.0, HEIGHT + 20.0 * len(rows) - 42.0

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (right - left),
            bottom - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (bottom - top),
        )

    height = HEIGHT + 20.0 * len(rows)
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{WIDTH:g}" height="{height:g}" '
        f'font-family="{FONT}" font-size="{SIZE:g}" role="img" aria-label="{escape(words.clean(title))}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        _text(14, 24, fitted(words.clean(title), 15.0, WIDTH - 28.0, bold=True), INK, extra=' font-size="15" font-weight="bold"'),
        _text(14, 44, fitted(words.clean(y_label), SIZE, WIDTH - 28.0), MUTED),
        *_legend(rows, list(series)),
    ]
    for tick in y_ticks:
        y = at(x_ticks[0], tick)[1]
        body.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{GRID}"/>')
        body.append(_text(left - 8, y + 4, _number(tick, y_ticks), MUTED, "end"))
    for tick in x_ticks:
        body.append(_text(at(tick, y_ticks[0])[0], bottom + 18, _number(tick, x_ticks), MUTED, "middle"))
    body.append(_text((left + right) / 2, bottom + 35, "step", MUTED, "middle"))
    for index, (name, values) in enumerate(series.items()):
        body.append(
            _line(name, [[at(x, y) for x, y in run] for run in _runs(xs, values)], COLOURS[index % len(COLOURS)], index // len(COLOURS))
        )
    return "\n".join([*body, "</svg>"]) + "\n"


def ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Choose 3 to 8 round, evenly spaced numbers that enclose all values; a constant is enclosed too. `whole` allows integers only."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.5 or 1.0
        low, high = low - room, high + room
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = float(max(1, math.ceil(step)))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _number(value: float, scale: Sequence[float]) -> str:
    """Format a tick with as many digits as it needs to differ from its neighbours."""
    step = scale[1] - scale[0]
    largest = max(abs(scale[0]), abs(scale[-1]))
    if largest >= 1e6 or largest < 1e-3:
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if not math.isclose(round(step, digits), step, rel_tol=1e-6):
        digits += 1
    return f"{value + 0.0:.{digits}f}"


def _runs(xs: Sequence[float], values: Sequence[float]) -> Iterator[list[tuple[float, float]]]:
    """Yield the stretches of a series without a gap."""
    run: list[tuple[float, float]] = []
    for x, y in zip(xs, values, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run
            run = []
    if run:
        yield run


def _line(name: str, runs: Sequence[Sequence[tuple[float, float]]], colour: str, lap: int) -> str:
    """Draw a series: a line for each stretch, and dots for single points and for short series."""
    points = [point for run in runs for point in run]
    dotted = points if len(points) <= 30 else [run[0] for run in runs if len(run) == 1]
    dash = ' stroke-dasharray="5 3"' if lap else ""
    lines = [f'<path d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in run)}"{dash}/>' for run in runs if len(run) > 1]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}" stroke="none"/>' for x, y in dotted]
    return (
        f'<g class="series" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round">'
        f"<title>{escape(words.clean(name))}</title>{''.join(lines)}{''.join(dots)}</g>"
    )


def _legend_rows(names: Sequence[str]) -> list[list[tuple[float, int]]]:
    """Place the series in rows of a legend: the left end and the index of each, row by row."""
    rows: list[list[tuple[float, int]]] = []
    x = WIDTH
    for index, name in enumerate(names):
        wide = 44.0 + min(width(words.clean(name), SIZE), 240.0)
        if x + wide > WIDTH - 14.0:
            rows.append([])
            x = 14.0
        rows[-1].append((x, index))
        x += wide
    return rows


def _legend(rows: Sequence[Sequence[tuple[float, int]]], names: Sequence[str]) -> Iterator[str]:
    for row, entries in enumerate(rows):
        y = 64.0 + 20.0 * row
        for x, index in entries:
            colour, dash = COLOURS[index % len(COLOURS)], ' stroke-dasharray="5 3"' if index >= len(COLOURS) else ""
            yield f'<path d="M{x:.1f} {y - 4:.1f}H{x + 18:.1f}" stroke="{colour}" stroke-width="2.4"{dash}/>'
            yield _text(x + 24, y, fitted(words.clean(names[index]), SIZE, 240.0), INK)


def _text(x: float, y: float, value: str, fill: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{extra}>{escape(value, quote=False)}</text>'
