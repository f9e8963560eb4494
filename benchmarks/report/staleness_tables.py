"""The table of staleness in docs/benchmarks.md, from `staleness.py` on a GPU that runs shared: by updates, not by seconds."""

import json
import statistics
from collections.abc import Mapping
from itertools import pairwise

from benchmarks.lib.figures import RESULTS
from benchmarks.lib.learning_plots import grouped, reached, shown
from benchmarks.lib.learning_runs import Run

HEAD = (
    "correction",
    "depth",
    "updates to 0.95, each seed",
    "accuracy at the end, each seed",
    "mean over the run",
    "largest fall between two evaluations",
)
HIGH = 0.95


def tables() -> dict[str, str]:
    """Write the table by its name."""
    return {"staleness": by_updates(json.loads((RESULTS / "staleness_h200.json").read_text(encoding="utf-8"))["runs"])}


def by_updates(runs: Mapping[str, Run]) -> str:
    """Write a row for each correction and depth, as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for (correction, depth), own in grouped(runs, "correction", "depth").items():
        curves = [[each[2] for each in run["accuracy"]] for run in own]
        cells = (
            f"`{correction}`",
            str(depth),
            ", ".join(shown(reached(run, HIGH)[0], "{:.0f}") for run in own),
            ", ".join(f"{run['final_accuracy']:.3f}" for run in own),
            f"{statistics.fmean(statistics.fmean(curve) for curve in curves):.3f}",
            f"{max(0.0, *(before - after for curve in curves for before, after in pairwise(curve))):.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
