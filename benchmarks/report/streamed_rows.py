"""The rows and the picture of updates that learn from the chunks of a rollout."""

from collections.abc import Mapping
from typing import Any

from benchmarks.lib.figures import percent, share
from benchmarks.lib.learning_plots import as_svg
from benchmarks.report.table import Row

FILE = "streamed_cpu.json"
DRAWN = ("on-policy, whole", "on-policy, 6 chunks, order of finish")
COLOURS = {"rollout": "#2b6cb0", "update": "#c05621"}

STREAMED = [
    Row(f"{depth} on two cores, an update on 6 chunks of the rollout, in the order of {order}: step time relative to whole batches",
        share(FILE, "ways", f"{depth}, 6 chunks, order of {order}", "over_whole"),
        "benchmarks/speed/streamed.py", "error of its prediction", percent(FILE, "ways", f"{depth}, 6 chunks, order of {order}", "error"))
    for depth in ("on-policy", "one step off") for order in ("data", "finish")
]  # fmt: skip


def draw(found: Mapping[str, Any]) -> str:
    """Draw two measured steps of a generator and its trainer, on whole batches and on chunks, on one time scale, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    axes = figure.subplots(len(DRAWN), sharex=True)
    for axis, way in zip(axes, DRAWN, strict=True):
        spans = [(name.split(" ")[0], begin, end) for _, name, begin, end in found["ways"][way]["timeline"]]
        first = min(begin for node, begin, _ in spans if node in COLOURS)
        for node, begin, end in (span for span in spans if span[0] in COLOURS):
            place = list(COLOURS).index(node)
            axis.barh(place, end - begin, left=begin - first, height=0.6, color=COLOURS[node], edgecolor="white", linewidth=0.6)
        axis.set_xlim(left=0)
        axis.set_yticks(range(len(COLOURS)), list(COLOURS), fontsize=11)
        axis.invert_yaxis()
        axis.set_title(way, fontsize=11, loc="left")
        axis.tick_params(labelsize=10)
        axis.grid(axis="x", color="#e4e8ed", linewidth=0.8)
        axis.set_axisbelow(True)
    axes[-1].set_xlabel("seconds", fontsize=11)
    return as_svg(figure)
