"""The pictures of README.md and docs/ that show results, each drawn from one file in `benchmarks/results/`. `table.py` writes them.

A picture is the same for the same result and the matplotlib of `requirements/cpu.lock`.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.lib.figures import RESULTS
from benchmarks.lib.learning_plots import draw_learning, draw_staleness
from benchmarks.report import scale_plot, streamed_rows, wall_clock_tables

PICTURES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "docs/mathematics.svg": ("mathematics_cpu.json", lambda found: draw_learning(found["runs"])),
    "docs/scale.svg": ("scale.json", scale_plot.svg),
    "docs/staleness.svg": ("staleness_h200.json", lambda found: draw_staleness(found["runs"])["updates"]),
    "docs/streamed.svg": (streamed_rows.FILE, streamed_rows.draw),
    "docs/wall_clock.svg": (wall_clock_tables.FILE, wall_clock_tables.draw),
}


def drawn(picture: str) -> str:
    """Draw one of `PICTURES` from its file of results, as SVG."""
    file, draw = PICTURES[picture]
    return draw(json.loads((RESULTS / file).read_text(encoding="utf-8")))
