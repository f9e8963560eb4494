"""The curves of a report: which metrics have a chart, and a small line chart as SVG."""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from statistics import fmean

from rlgraph.analysis import words
from rlgraph.analysis.run import Run
from rlgraph.render.plan_labels import fit_text, width

# A small line chart as SVG, for metrics by step.

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
            raise ValueError(f"series '{name}' has {len(values)} values for {len(xs)} positions; pass one value for each position")
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
        _text(14, 24, fit_text(words.clean(title), 15.0, WIDTH - 28.0, bold=True), INK, extra=' font-size="15" font-weight="bold"'),
        _text(14, 44, fit_text(words.clean(y_label), SIZE, WIDTH - 28.0), MUTED),
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
            yield _text(x + 24, y, fit_text(words.clean(names[index]), SIZE, 240.0), INK)


def _text(x: float, y: float, value: str, fill: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{extra}>{escape(value, quote=False)}</text>'


# The curves of a report: which metrics have a chart, including evaluations and the user's own metrics.

POINTS = 240  # of a curve; longer runs show means of several steps
REWARD = "critic/rewards/mean"

Steps = Sequence[Mapping[str, float]]  # the metrics of each
Chart = tuple[str, str, tuple[tuple[str, str], ...]]  # title, what its values are, and (name, metric) of each line
FAILURES = ("errors", "timeouts", "blocked", "template_errors", "malformed_calls", "failures")
LIMITS = ("tokens", "turns", "seconds", "cost")


def _of_conversations(prefix: str) -> tuple[Chart, ...]:
    """The charts of conversations with environments (`agent`) or with tools."""
    ends = (("median", "p50"), ("90th percentile", "p90"), ("most", "max"))
    return (
        ("Turns", "per conversation", tuple((said, f"{prefix}/turns/{end}") for said, end in ends)),
        ("Seconds", "per conversation", tuple((said, f"{prefix}/seconds/{end}") for said, end in ends)),
        ("Failures", "conversations per step", tuple((kind.replace("_", " "), f"{prefix}/{kind}") for kind in FAILURES)),
        ("Limits hit", "conversations per step", tuple((kind, f"{prefix}/limit_{kind}") for kind in LIMITS)),
    )


CHARTS: tuple[Chart, ...] = (
    ("Reward", "mean per batch", (("reward", REWARD),)),
    ("Staleness", "weight versions behind the policy", (("oldest token", "staleness/max"), ("mean", "staleness/mean"))),
    ("Response length", "tokens", (("mean", "response_length/mean"), ("longest", "response_length/max"))),
    ("Loss", "policy loss", (("policy loss", "actor/pg_loss"),)),
    ("Imitation", "negative log-likelihood, nats per token", (("of the examples", "actor/nll"),)),
    ("Preferences", "share of pairs in the right order", (("policy", "preference/accuracy"), ("reward model", "reward/accuracy"))),
    ("Distillation", "divergence from the teacher, nats per token", (("divergence", "actor/distillation"),)),
    ("KL", "nats per token", (("policy has moved (ppo_kl)", "actor/ppo_kl"), ("to the reference", "actor/kl_loss"))),
    ("Engine and trainer", "KL of their log-probs, nats per token", (("k3", "rollout_corr/k3_kl"), ("k1", "rollout_corr/kl"))),
    ("Clipped", "share of tokens", (("clipped", "actor/pg_clipfrac"),)),
    ("Entropy", "nats per token", (("entropy", "actor/entropy"),)),
    ("Gradient", "norm before clipping", (("norm", "actor/grad_norm"),)),
    ("Value loss", "critic", (("value loss", "critic/vf_loss"),)),
    *(chart for prefix in ("agent", "tools") for chart in _of_conversations(prefix)),
    ("Step time", "seconds", (("step", "timing_s/step"), ("gen", "timing_s/gen"), ("update_actor", "timing_s/update_actor"))),
    ("Waiting", "seconds per step", (("wait_prev_gen", "timing_s/wait_prev_gen"), ("update_weights", "timing_s/update_weights"))),
)
# What evaluations measure: the ending of the metric's name before its number of samples, and what its values are.
EVALUATED = (("Held-out accuracy", "acc/mean@", "share of correct answers"), ("Held-out reward", "reward/mean@", "mean reward"))
# The first part of the names of rlgraph's own metrics; others are the user's.
OURS = {
    "actor", "agent", "critic", "data", "dtype", "dynamic_sampling", "exact", "examples", "guards", "moe", "perf", "preference",
    "preferred", "prompt_length", "response", "response_length", "reward", "rollout_corr", "samples", "staleness", "step", "teachers",
    "timing_s", "timing_per_token_ms", "tools", "training", "val",
}  # fmt: skip
OWN = 40  # charts of the user's metrics, at most


def charts_of(steps: Steps) -> Iterator[Chart]:
    """Yield the charts of these steps' metrics: evaluations first, the user's own last."""
    yield from _evaluations(steps)
    yield from CHARTS
    yield from _custom_charts(steps)


def curves(run: Run) -> Iterator[str]:
    """Draw the curves of a run, and of the steps before its resume."""
    steps = run.all_steps
    size = max(-(-len(steps) // POINTS), 1)
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    if size > 1:
        yield f"<p>Each point is the mean of {size} steps.</p>"
    if run.earlier:
        yield f"<p>The first {words.with_count(len(run.earlier), 'step')} ran before the run resumed from its checkpoint.</p>"
    yield '<div class="charts">'
    for chart in charts_of(steps):
        yield from _draw_chart(chart, groups if chart in CHARTS else _groups_with_metrics(chart, groups))
    yield "</div>"


def _groups_with_metrics(chart: Chart, groups: Sequence[Steps]) -> Sequence[Steps]:
    """Leave out groups of steps without the chart's metrics, so that the line of an evaluation connects its points."""
    metrics = [metric for _, metric in chart[2]]
    return [group for group in groups if any(math.isfinite(step.get(metric, math.nan)) for step in group for metric in metrics)]


def _draw_chart(chart: Chart, groups: Sequence[Steps]) -> Iterator[str]:
    title, unit, lines = chart
    series = {name: [_mean([step[metric] for step in group if metric in step]) for group in groups] for name, metric in lines}
    series = {name: values for name, values in series.items() if any(map(math.isfinite, values))}
    if series:
        yield f"<figure>{svg(title, [group[0]['training/global_step'] for group in groups], series, unit)}</figure>"


def metric_names(steps: Steps) -> Sequence[str]:
    """List the names of all metrics, in the order in which they came."""
    return list(dict.fromkeys(name for step in steps for name in step))


def _evaluations(steps: Steps) -> Iterator[Chart]:
    """The charts of what evaluations measured; of rewards only if they are not accuracies."""
    found, version = metric_names(steps), of_version(steps)
    for title, ending, said in EVALUATED:
        names = [name for name in found if name.startswith("val/") and ending in name]
        right = [name.replace("reward/mean@", "acc/mean@") for name in names]
        if ending == "acc/mean@" or any(step.get(a) != step.get(b) for step in steps for a, b in zip(names, right, strict=True)):
            yield title, f"{said}{version}", tuple((name.removeprefix("val/"), name) for name in names)


def of_version(steps: Steps) -> str:
    """Name the version that was evaluated last; empty if there is none."""
    versions = [step[name] for step in steps for name in step if name.startswith("val/") and name.endswith("/version")]
    return f"; the last is of version {versions[-1]:.0f}" if versions else ""


def _custom_charts(steps: Steps) -> Iterator[Chart]:
    """A chart of each metric that the user's own nodes, losses and environments return."""
    for name in [name for name in metric_names(steps) if name.partition("/")[0] not in OURS][:OWN]:
        yield name, "", ((name, name),)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return fmean(finite) if finite else math.nan
