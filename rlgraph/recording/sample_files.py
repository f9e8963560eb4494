"""Write samples into rotated files: the newest as JSON lines, so that a killed run loses none, older ones in the format asked for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rlgraph.analysis.samples import FIELDS, FOLDER, LINES, TABLE, Sample, parquet, read_file, sample_files

TEXTS = ("kind", "rollout", "prompt", "response", "finish")
REALS = ("reward", "advantage", "log_prob_diff")
REAL_LISTS = ("token_advantages", "token_log_probs", "token_log_prob_diffs")


class SampleFiles:
    """The files of a run's samples. Each holds whole steps, in their order; a file that has grown to `file_bytes` is followed by another.

    Opened for a run that resumed after `finished` steps, it keeps the samples of those and drops the rest.
    """

    def __init__(self, folder: Path, finished: int, *, table: bool, file_bytes: int) -> None:
        self.folder, self.table, self.file_bytes = folder / FOLDER, table, file_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        for unfinished in self.folder.glob("*.part"):
            unfinished.unlink()
        for path in sample_files(folder):
            _keep_steps(path, finished)
        self._number = max((int(path.stem.rpartition("-")[2]) + 1 for path in sample_files(folder)), default=0)
        self._lines: TextIO | None = None

    def write(self, samples: Sequence[Sample]) -> None:
        """Append the samples of one step; they are in the file when this returns."""
        if self._lines is None:
            self._lines = (self.folder / f"samples-{self._number:05d}{LINES}").open("w", encoding="utf-8")
        self._lines.writelines(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples)
        self._lines.flush()
        if self._lines.tell() >= self.file_bytes:
            self.close()

    def close(self) -> None:
        """End the newest file, as a parquet file if that is the format."""
        if self._lines is None:
            return
        path = Path(self._lines.name)
        self._lines.close()
        self._lines, self._number = None, self._number + 1
        if self.table:
            _write_table(list(read_file(path)), path.with_suffix(TABLE))
            path.unlink()


def _keep_steps(path: Path, finished: int) -> None:
    """Drop the samples of later steps from a file, and the file if none are left."""
    twin = path.with_suffix(TABLE)
    if path.suffix == LINES and twin.exists():  # killed after the table was whole
        path.unlink()
        return
    samples = list(read_file(path)) if finished else []
    kept = [sample for sample in samples if sample["step"] < finished]
    if not kept:
        path.unlink()
    elif len(kept) < len(samples) or path.suffix == LINES:
        if path.suffix == TABLE:
            _write_table(kept, path)
        else:
            part = path.with_suffix(".part")
            part.write_text("".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in kept), encoding="utf-8")
            part.replace(path)


def _write_table(samples: Sequence[Sample], path: Path) -> None:
    """Write a parquet file whose columns have the same types in every file; `columns` is JSON, since its keys differ from run to run."""
    writer = parquet()
    import pyarrow

    rows = [{**sample, "columns": json.dumps(sample["columns"])} for sample in samples]
    schema = pyarrow.schema([(name, _type_of(name, pyarrow)) for name in FIELDS])
    part = path.with_suffix(".part")
    writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema), part)
    part.replace(path)


def _type_of(name: str, pyarrow: Any) -> Any:
    if name in (*TEXTS, "columns"):
        return pyarrow.string()
    if name == "token_texts":
        return pyarrow.list_(pyarrow.string())
    if name in REALS:
        return pyarrow.float64()
    if name in REAL_LISTS:
        return pyarrow.list_(pyarrow.float32())
    return pyarrow.list_(pyarrow.int32()) if name.startswith("token_") else pyarrow.int64()
