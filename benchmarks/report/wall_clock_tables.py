"""The table and the picture of `wall_clock.py` in docs/benchmarks.md: accuracy against seconds, by mode."""

import json
import math
import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from benchmarks.lib.figures import RESULTS
from benchmarks.lib.learning_plots import COLOURS, as_svg, at, grouped, mean_curve, shown
from benchmarks.lib.learning_runs import Run

FILE = "wall_clock_h200.json"
BASE = "time-shared"
MODES = (BASE, "one step off", "continuous")
LEVELS = (0.6, 0.65)
HEAD = (
    "mode",
    "a step, predicted before",
    "measured, each seed",
    "over time-shared",
    "generation, update",
    "accuracy at the end",
    *(f"seconds to {level:.2f}" for level in LEVELS),
    "to the end of time-shared",
    "over time-shared",
    "age of a token, mean and worst",
)


def tables() -> dict[str, str]:
    """Write the table by its name."""
    return {"wall-clock": by_mode(json.loads((RESULTS / FILE).read_text(encoding="utf-8"))["runs"])}


def curve(run: Run) -> tuple[list[float], list[float]]:
    """The seconds and the accuracy of a run's evaluations."""
    return [each[1] for each in run["accuracy"]], [each[2] for each in run["accuracy"]]


def seconds_to(accuracy: float, run: Run) -> float:
    """When a run first reaches `accuracy`, on a straight line between two evaluations; NaN if it never does.

    >>> seconds_to(0.5, {"accuracy": [[0, 0.0, 0.2], [8, 10.0, 0.6]]})
    7.5
    """
    times, found = curve(run)
    if found[0] >= accuracy:
        return times[0]
    for (begin, low), (end, high) in pairwise(zip(times, found, strict=True)):
        if high >= accuracy:
            return begin + (end - begin) * (accuracy - low) / (high - low)
    return math.nan


def by_mode(runs: Mapping[str, Run]) -> str:
    """Write a row for each mode, with a figure of each seed, as Markdown. A run is compared with the time-shared run of its seed."""
    groups = grouped(runs, "mode")
    base = {run["key"]["seed"]: run for run in groups[BASE,]}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for mode, own in ((mode, groups[mode,]) for mode in MODES if (mode,) in groups):
        beside = [base[run["key"]["seed"]] for run in own]
        ends = [
            (seconds_to(other["final_accuracy"], run), seconds_to(other["final_accuracy"], other))
            for run, other in zip(own, beside, strict=True)
        ]
        parts = [statistics.fmean(run["parts_s"][part] for run in own) for part in ("gen", "update_actor")]
        cells = (
            mode,
            f"{own[0]['predicted_s']:.2f} s",
            ", ".join(f"{run['step_s']:.2f} s" for run in own),
            ", ".join(f"{run['step_s'] / other['step_s']:.2f}" for run, other in zip(own, beside, strict=True)),
            ", ".join(f"{part:.2f} s" for part in parts),
            ", ".join(f"{run['final_accuracy']:.3f}" for run in own),
            *(", ".join(shown(seconds_to(level, run), "{:.0f}") for run in own) for level in LEVELS),
            ", ".join(shown(to_s, "{:.0f}") for to_s, _ in ends),
            ", ".join(shown(to_s / base_s, "{:.2f}") for to_s, base_s in ends),
            f"{statistics.fmean(run['staleness_mean'] for run in own):.2f}, {max(run['staleness_worst'] for run in own):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(found: Mapping[str, Any]) -> str:
    """Draw accuracy against seconds: the mean of the seeds, and a band from the worst to the best of them, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.0), layout="constrained")
    axis = figure.subplots()
    groups = grouped(found["runs"], "mode")
    wanted = statistics.fmean(run["final_accuracy"] for run in groups[BASE,])
    for mode, colour in zip(MODES, COLOURS, strict=False):
        runs = [curve(run) for run in groups.get((mode,), [])]
        times, means = mean_curve(runs)
        each = [[at(xs, ys, time) for xs, ys in runs] for time in times]
        axis.fill_between(times, [min(ys) for ys in each], [max(ys) for ys in each], color=colour, alpha=0.15, linewidth=0)
        axis.plot(
            times,
            means,
            color=colour,
            linewidth=2.0,
            marker="o",
            markersize=4,
            label=f"{mode} ({len(runs)} seed{'s' if len(runs) > 1 else ''})",
        )
    axis.axhline(wanted, color="#4a5568", linewidth=1.0, linestyle=(0, (4, 3)))
    axis.annotate(f"{wanted:.3f}: the end of time-shared", (0, wanted), (4, 4), textcoords="offset points", fontsize=10, color="#4a5568")
    axis.set_xlabel("seconds since the first step", fontsize=11)
    axis.set_ylabel("held-out accuracy", fontsize=11)
    axis.set_xlim(left=0)
    axis.tick_params(labelsize=10)
    axis.grid(color="#e4e8ed", linewidth=0.8)
    axis.legend(frameon=False, fontsize=11, loc="lower right")
    return as_svg(figure)
