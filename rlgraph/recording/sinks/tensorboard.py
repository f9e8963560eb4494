"""The sink TensorBoard, by tensorboardX, which needs no TensorFlow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from rlgraph.analysis.samples import Sample
from rlgraph.errors import PlanError
from rlgraph.recording.sinks.base import COLUMNS, Ended, Names, RecordedRun, Sink, needs, table
from rlgraph.settings import check

FLUSH_S = 10
CHARACTERS = 4000  # of a text in a table


@dataclass
class TensorBoard(Sink):
    """Write event files for TensorBoard: scalars, and the samples of a step as a text table.

    >>> import rlgraph as rg
    >>> rg.sinks.TensorBoard()  # for rg.record(job, 100, "runs/math", to=[…]); look with: tensorboard --logdir runs/math
    TensorBoard(folder=None)

    `folder` is `tensorboard/` in the run's folder if it is not given. After a resume, TensorBoard drops what an earlier part of the run
    had written of later steps. Needs the extra `tensorboard`.
    """

    rewinds: ClassVar[bool] = True
    folder: str | Path | None = None
    _writer: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, PlanError)
        needs(self, "tensorboardX", "tensorboard")

    def start(self, run: RecordedRun) -> None:
        from tensorboardX import SummaryWriter

        self._names = Names(r"[^\w./-]")
        folder = Path(self.folder) if self.folder is not None else run.folder / "tensorboard"
        # Files are named by the second, and read in the order of their names.
        options = {"purge_step": run.first, "filename_suffix": f".{run.first:08d}"}
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_S, **options)
        rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in run.settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.finished)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(self._names[name], value, step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        lines = [" | ".join(map(_cell, row)) for row in (COLUMNS, ["---"] * len(COLUMNS), *table(rows))]
        self._writer.add_text("samples", "\n".join(f"| {line} |" for line in lines), step)

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """Write a value into a cell of a Markdown table, where a bar or the end of a line would end it."""
    return escape(str(value))[:CHARACTERS].replace("|", "\\|").replace("\n", "<br>")
