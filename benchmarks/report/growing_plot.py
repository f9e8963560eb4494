"""The picture of docs/prediction.md: a run whose responses grow, under the best split that stays and under splits that follow."""

from collections.abc import Mapping
from typing import Any

from benchmarks.lib.learning_plots import as_svg

FIXED, FOLLOWED = "#2b6cb0", "#c05621"


def svg(found: Mapping[str, Any]) -> str:
    """Draw a panel for each run: the seconds of a step over the mean tokens of a response."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 6.0), layout="constrained")
    for axis, run in zip(figure.subplots(len(found["runs"]), sharex=True), found["runs"], strict=True):
        generate, train = run["fixed"]
        stays = f"{generate} generate, {train} train"
        axis.plot(run["mean_tokens"], run["fixed_step_s"], "o-", color=FIXED, markersize=4, label=f"the best split that stays: {stays}")
        label = f"splits that follow: {run['changes']} changes, {run['replanned_over_fixed']:.2f} of the time"
        axis.plot(run["mean_tokens"], run["followed_step_s"], "s--", color=FOLLOWED, markersize=4, label=label)
        axis.set_title(f"{run['model']} on {run['gpus']:,} GPUs", fontsize=11, loc="left")
        axis.set(xscale="log", yscale="log", ylabel="seconds of a step")
        axis.set_xticks([500, 1000, 2000, 4000, 8000], ["500", "1,000", "2,000", "4,000", "8,000"])
        axis.minorticks_off()
        axis.grid(color="#e4e8ed", linewidth=0.8)
        axis.legend(fontsize=10)
    axis.set_xlabel("mean tokens of a response")
    return as_svg(figure)
