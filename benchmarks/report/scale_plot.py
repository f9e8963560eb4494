"""The picture of docs/developers/scale.md: failures by checkpoint interval, the weights' fan-out, and what others have published."""

from collections.abc import Mapping
from typing import Any

from benchmarks.lib.learning_plots import as_svg

COLOURS = ("#2f6fd0", "#c2330f", "#2b8a57", "#8a4fbe")


def svg(values: Mapping[str, Any]) -> str:
    """Draw the three panels of a result."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 11, "font.family": "sans-serif"}):
        figure = Figure(figsize=(8, 12), layout="tight")
        losing, moving, beside = figure.subplots(3, 1)
        _intervals(losing, values["intervals"])
        _fan_out(moving, values["fan_out"]["8B, from 8 hosts"])
        _anchors(beside, values["anchors"])
        return as_svg(figure)


def _intervals(axes: Any, curves: Any) -> None:
    for colour, curve in zip(COLOURS, curves, strict=False):
        every = [point["every"] for point in curve["points"]]
        label = f"{curve['model']}, {curve['gpus']:,} GPUs"
        axes.plot(every, [100 * point["lost"] for point in curve["points"]], "o-", color=colour, label=label, markersize=4)
        axes.plot(every, [100 * point["daly_lost"] for point in curve["points"]], "--", color=colour, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="steps between two checkpoints", ylabel="% of the time lost", ylim=(0.1, 100))
    axes.set_title("Failures and checkpoints (dashed: Daly's formula)")
    axes.legend(fontsize=10)


def _fan_out(axes: Any, rows: Any) -> None:
    hosts = [row["generator_hosts"] for row in rows]
    for colour, name, label in zip(COLOURS, ("direct_s", "passed_on_s"), ("each generator", "from host to host"), strict=False):
        axes.plot(hosts, [row[name] for row in rows], "o-", color=colour, label=label, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="hosts of 8 generators", ylabel="seconds of a version")
    axes.set_title("8B in bfloat16 from 8 hosts, 400 GB/s a host")
    axes.legend(fontsize=10)


def _anchors(axes: Any, rows: Any) -> None:
    for place, row in enumerate(rows):
        axes.barh(place - 0.2, row["published_s"], 0.36, color=COLOURS[0], label="published" if not place else None)
        axes.barh(place + 0.2, row["modelled_s"], 0.36, color=COLOURS[1], label="modelled" if not place else None)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="seconds of a step")
    axes.set_title("Step times of NeMo RL v0.4")
    axes.legend(fontsize=10)
