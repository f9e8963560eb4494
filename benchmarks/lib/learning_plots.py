"""Tables and curves of runs that learn: mean over seeds, with each seed beside it."""

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.learning_runs import Run, interval, named
from rlgraph.render.plan_picture import IN_THE_DARK

MARKED = 30  # points that a curve may have to show each of them
COLOURS = ("#2f6fd0", "#c2330f", "#2b8a57", "#8a4fbe", "#b7791f", "#4a5568")
REACHED = 0.95  # of the final accuracy at depth 0, for the seconds that a setting takes to be as good


def grouped(runs: Mapping[str, Run], *by: str) -> dict[tuple[Any, ...], list[Run]]:
    """Group runs by parts of their keys, in order of these."""
    found: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs.values():
        found.setdefault(tuple(run["key"][name] for name in by), []).append(run)
    return dict(sorted(found.items()))


def reached(run: Run, accuracy: float) -> tuple[float, float]:
    """Find the updates and the seconds after which a run's accuracy was first as high; NaN if it never was."""
    return next(((updates, seconds) for updates, seconds, found, _ in run["accuracy"] if found >= accuracy), (math.nan, math.nan))


def with_seconds_alone(runs: Mapping[str, Run], alone: Mapping[str, float]) -> dict[str, Run]:
    """Take runs that shared a machine with others to the seconds that their steps take alone, where these were measured."""
    found = {}
    for name, run in runs.items():
        step_s = alone.get(named({part: value for part, value in run["key"].items() if part != "seed"}))
        times = {} if step_s is None else {"step_s": step_s, "accuracy": [[one[0], one[0] * step_s, *one[2:]] for one in run["accuracy"]]}
        found[name] = run | times
    return found


def staleness_table(runs: Mapping[str, Run]) -> str:
    """Write a row for each correction and depth, as Markdown."""
    to = f"to {REACHED:.0%} of depth 0"
    head = (
        "correction", "depth", "seeds", "final accuracy", "within", f"updates {to}", f"seconds {to}", "a step", "staleness, mean", "worst",
        "mismatch",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    groups = grouped(runs, "correction", "depth")
    for (correction, depth), own in groups.items():
        mean, half = interval([run["final_accuracy"] for run in own])
        fresh = [run["final_accuracy"] for run in groups.get((correction, 0), [])]
        there = [reached(run, REACHED * statistics.fmean(fresh)) if fresh else (math.nan, math.nan) for run in own]
        updates, seconds = (statistics.fmean(values) for values in zip(*there, strict=True))
        mismatch = [next(iter(run["mismatch"].values()), math.nan) for run in own]
        step_s, stale = statistics.fmean(run["step_s"] for run in own), statistics.fmean(run["staleness_mean"] for run in own)
        cells = (
            correction, depth, len(own), shown(mean), f"± {shown(half)}", shown(updates, "{:.0f}"), shown(seconds, "{:.0f} s"),
            shown(step_s, "{:.2f} s"), shown(stale, "{:.2f}"), shown(max(run["staleness_worst"] for run in own), "{:.0f}"),
            shown(statistics.fmean(mismatch), "{:.4f}"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    errors = statistics.fmean(run["final_stderr"] for run in runs.values())
    where = sorted({", ".join(run["machine"]["gpus"]) or "CPU" for run in runs.values()})
    share = f"Standard error over the held-out questions, which all runs share: {shown(errors)}."
    return "\n".join([*lines, "", f"Intervals: 95 % over seeds. {share} On {'; '.join(where)}."])


def shown(value: float, form: str = "{:.3f}") -> str:
    return form.format(value) if math.isfinite(value) else "–"


def draw_staleness(runs: Mapping[str, Run]) -> dict[str, str]:
    """Draw accuracy by updates and by seconds, and by updates alone, for each correction, as SVG by name."""
    groups = grouped(runs, "correction", "depth")
    corrections = sorted({correction for correction, _ in groups})
    both, axes = _figure(len(corrections), 2)
    for correction, row in zip(corrections, axes, strict=True):
        _accuracy(row[0], groups, correction, 0)
        _accuracy(row[1], groups, correction, 1)
    alone, axes = _figure(len(corrections), 1)
    for correction, row in zip(corrections, axes, strict=True):
        _accuracy(row[0], groups, correction, 0)
    return {"accuracy": as_svg(both), "updates": as_svg(alone)}


def _accuracy(axis: Any, groups: Mapping[tuple[Any, ...], Sequence[Run]], correction: str, along: int) -> None:
    """Draw a curve of each depth by updates (0) or by seconds (1)."""
    for colour, depth in zip(COLOURS, [depth for name, depth in groups if name == correction], strict=False):
        curves = [([each[along] for each in run["accuracy"]], [each[2] for each in run["accuracy"]]) for run in groups[correction, depth]]
        _curves(axis, curves, colour, f"depth {depth}")
    axis.set_title("no correction" if correction == "disabled" else f"correction: {correction}", loc="left", fontsize=11)
    axis.set_xlabel(("updates", "seconds")[along])
    axis.set_ylabel("held-out accuracy")
    axis.legend(frameon=False, fontsize=10)


def draw_learning(runs: Mapping[str, Run]) -> str:
    """Draw mean reward and held-out accuracy of the seeds, as SVG."""
    figure, axes = _figure(1, 2)
    rewards = [(list(range(1, len(run["reward"]) + 1)), smooth(run["reward"])) for run in runs.values()]
    _curves(axes[0][0], rewards, COLOURS[0], "mean of 5 steps")
    _curves(
        axes[0][1],
        [([each[0] for each in run["accuracy"]], [each[2] for each in run["accuracy"]]) for run in runs.values()],
        COLOURS[2],
        "",
    )
    for axis, label, along in zip(axes[0], ("mean reward, of 5 steps", "held-out accuracy"), ("step", "updates"), strict=True):
        axis.set_ylabel(label)
        axis.set_xlabel(along)
    return as_svg(figure)


def smooth(values: Sequence[float], over: int = 5) -> list[float]:
    """Average each value with those before it, at most `over` in all."""
    return [statistics.fmean(values[max(0, at + 1 - over) : at + 1]) for at in range(len(values))]


def at(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Interpolate a curve at `x`; NaN outside of it."""
    if not xs or not xs[0] <= x <= xs[-1]:
        return math.nan
    right = next(index for index, end in enumerate(xs) if end >= x)
    if xs[right] == x:
        return ys[right]
    share = (x - xs[right - 1]) / (xs[right] - xs[right - 1])
    return ys[right - 1] + share * (ys[right] - ys[right - 1])


def mean_curve(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """Average curves at every place of any of them, where all of them are."""
    places = sorted({x for xs, _ in curves for x in xs})
    means = [(x, statistics.fmean(at(xs, ys, x) for xs, ys in curves)) for x in places]
    kept = [(x, mean) for x, mean in means if math.isfinite(mean)]
    return [x for x, _ in kept], [mean for _, mean in kept]


def _curves(axis: Any, curves: Sequence[tuple[Sequence[float], Sequence[float]]], colour: str, label: str) -> None:
    """Draw the mean of several curves strongly, and each of them faintly."""
    for xs, ys in curves:
        axis.plot(xs, ys, color=colour, linewidth=0.7, alpha=0.35)
    means = mean_curve(curves)
    axis.plot(*means, color=colour, linewidth=2.0, label=label, marker="o" if len(means[0]) <= MARKED else None, markersize=4)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(color="#e4e8ed", linewidth=0.8)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6 if columns == 1 else 4.4 * columns, 3.0 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def keep_curves(folder: Path, drawn: Mapping[str, str]) -> None:
    """Write curves into a folder, each as SVG under its name, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    print(f"curves: {', '.join(str(folder / f'{name}.svg') for name in drawn)}")


def as_svg(figure: Any) -> str:
    """Write a figure as SVG that is the same for the same runs."""
    import matplotlib

    target = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rlgraph", "svg.fonttype": "none"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    lines = [line.rstrip() for line in target.getvalue().splitlines()]
    lines.insert(next(at for at, line in enumerate(lines) if line.strip() == "<defs>"), IN_THE_DARK)
    return "\n".join(lines) + "\n"
