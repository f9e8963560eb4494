"""Rows of files: parquet and JSON lines, one file or several, by path, folder or glob."""

import bisect
import glob
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from rlgraph.data.rows import Policy, Row, Rows, build_rows, in_order, present_row
from rlgraph.errors import NOT_JSON, DataError, choices, show_value
from rlgraph.settings import Count, Name, check_arguments

Paths: TypeAlias = str | Path | Sequence[str | Path]
BATCH = 1024  # rows
SUFFIXES = (".parquet", ".jsonl", ".json")
INSTALL = "pip install 'rlgraph-dataflow[data]'"


@check_arguments(DataError)
def parquet(paths: Paths, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None, **fields: str) -> Rows:
    """Read parquet files: a path, a folder, a glob as "data/*.parquet", or a list of these.

    >>> import tempfile, rlgraph as rg
    >>> from pyarrow import Table, parquet as files
    >>> path = tempfile.mkdtemp() + "/train.parquet"
    >>> files.write_table(Table.from_pylist([{"question": "1 + 1 =", "reward_model": {"ground_truth": "2"}}]), path)
    >>> rg.data.parquet(path, prompt="question", answer="reward_model.ground_truth")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    `fields`, `overlong` and `max_prompt_tokens` are those of `rg.data.rows`. Only the columns of the fields are read. Arrow gives every
    nested mapping the keys of all rows; those that are None are left out again. Raises DataError for a path without files.
    """
    return _read(files_of(paths, (".parquet",)), fields, overlong, max_prompt_tokens, kind="parquet")


@check_arguments(DataError)
def jsonl(paths: Paths, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None, **fields: str) -> Rows:
    """Read JSON lines, or JSON files with a list of rows: a path, a folder, a glob as "data/*.jsonl", or a list of these.

    >>> import pathlib, tempfile, rlgraph as rg
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "train.jsonl"
    >>> _ = path.write_text('{"prompt": "1 + 1 =", "reward_model": {"ground_truth": "2"}}')
    >>> rg.data.jsonl(path, answer="reward_model.ground_truth")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    `fields`, `overlong` and `max_prompt_tokens` are those of `rg.data.rows`. Raises DataError for a path without files, and for a line
    that is not valid JSON.
    """
    return _read(files_of(paths, (".jsonl", ".json")), fields, overlong, max_prompt_tokens, kind="json")


def read(paths: Paths, *convert: Any, overlong: Policy, max_prompt_tokens: int | None) -> Rows:
    """Read files of any kind, by their suffixes, through the functions `convert`."""
    return _read(files_of(paths, SUFFIXES), {}, overlong, max_prompt_tokens, *convert)


def _read(
    files: Sequence[Path], fields: Mapping[str, str], overlong: Policy, max_prompt_tokens: int | None, *convert: Any, kind: str = ""
) -> Rows:
    wanted = {"prompt": "prompt", **fields} if fields else {}
    parts = [_table(file, wanted) if (kind or file.suffix[1:]) == "parquet" else _lines(file) for file in files]
    source = parts[0] if len(parts) == 1 else Several(tuple(parts))
    name = f"'{files[0]}'" if len(files) == 1 else f"'{files[0]}' and {len(files) - 1} more files"
    if len(source) == 0:
        raise DataError(f"{name}: no rows; a data set has at least one")
    return build_rows(source, name, fields, overlong, max_prompt_tokens, *convert)


def files_of(paths: Paths, suffixes: Sequence[str]) -> list[Path]:
    """List the files of paths, folders and globs, each in the order of its name. Raises DataError for one without files."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str | Path) else list(paths):
        if not isinstance(path, str | Path):
            raise DataError(f"{show_value(path)} is not a path of a file; pass text or a pathlib.Path")
        place = Path(path).expanduser()
        if place.is_dir():
            here = sorted(file for file in place.iterdir() if file.suffix in suffixes)
        elif place.exists():
            here = [place]
        else:
            here = [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
        if not here:
            raise DataError(f"'{path}': no such file, and no folder or glob with files of {' or '.join(suffixes)}; check the path")
        found += here
    if not found:
        raise DataError("no paths are given; a data set is read from at least one file")
    return found


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows of a file."""

    file: str

    def place(self, index: int) -> str:
        return f"row {index} of '{self.file}'"

    def folder(self, index: int) -> Path:
        """Return the folder of the file, in which relative paths of images begin."""
        return Path(self.file).parent


@dataclass(frozen=True, eq=False)
class Table(FileRows):
    """Rows of a file in an Arrow table."""

    table: Any

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, index: int) -> Row:
        return present_row(self.table.slice(index, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[Row]:
        """Read all rows, by batches: ten times as fast as one by one."""
        return (present_row(row) for batch in self.table.to_batches(BATCH) for row in batch.to_pylist())


@dataclass(frozen=True, eq=False)
class Listed(FileRows):
    """Rows of a list in a JSON file."""

    rows: Sequence[Row]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


@dataclass(frozen=True, eq=False)
class Lines(FileRows):
    """Rows of JSON, parsed when they are read."""

    lines: Sequence[tuple[int, bytes]]  # the number of each line, and its text

    def place(self, index: int) -> str:
        return f"line {self.lines[index][0]} of '{self.file}'"

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, index: int) -> Row:
        number, text = self.lines[index]
        try:
            row = json.loads(text)
        except NOT_JSON as error:
            raise DataError(
                f"line {number} of '{self.file}' is not valid JSON ({error!s:.120}): {show_value(text)}; write one row per line, "
                "or a list of rows"
            ) from None
        if not isinstance(row, Mapping):
            raise DataError(f"line {number} of '{self.file}' is {show_value(row)}; each line is a mapping, e.g. {{\"prompt\": …}}")
        return row


@dataclass(frozen=True, eq=False)
class Several:
    """The rows of several sources, one after another."""

    parts: "tuple[Table | Lines | Listed, ...]"

    @cached_property
    def ends(self) -> list[int]:
        """The number of rows up to the end of each source."""
        return list(itertools.accumulate(len(part) for part in self.parts))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Row:
        part, row = self._find(index)
        return part[row]

    def place(self, index: int) -> str:
        part, row = self._find(index)
        return part.place(row)

    def folder(self, index: int) -> Path:
        part, row = self._find(index)
        return part.folder(row)

    def _find(self, index: int) -> "tuple[Table | Lines | Listed, int]":
        part = bisect.bisect_right(self.ends, index)
        return self.parts[part], index - (self.ends[part - 1] if part else 0)

    def __iter__(self) -> Iterator[Row]:
        return itertools.chain.from_iterable(in_order(part) for part in self.parts)


def _table(file: Path, fields: Mapping[str, str]) -> Table:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"'{file}': parquet is read by pyarrow, which is not installed: {INSTALL}") from None
    try:
        columns = parquet.read_schema(file).names
        for name, path in fields.items():
            if path not in columns and path.partition(".")[0] not in columns:
                said = choices(path.partition(".")[0], columns, "its columns are")
                raise DataError(f"'{file}' has no column '{path}' for {name}=; {said}")
        tops = {path if path in columns else path.partition(".")[0] for path in fields.values()}
        return Table(str(file), parquet.read_table(file, columns=[name for name in columns if name in tops] if fields else None))
    except (OSError, ArrowException) as error:
        raise DataError(f"'{file}' cannot be read as parquet: {type(error).__name__}: {error!s:.200}") from None


def _lines(file: Path) -> Lines | Listed:
    try:
        text = file.read_bytes()
    except OSError as error:
        raise DataError(f"'{file}' cannot be read: {error}") from None
    if text.lstrip()[:1] == b"[":
        try:
            rows = json.loads(text)
        except NOT_JSON as error:
            raise DataError(f"'{file}' is not valid JSON: {error!s:.120}") from None
        return Listed(str(file), rows)
    return Lines(str(file), [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()])


# Rows of a data set of the Hugging Face hub, or of a folder that `save_to_disk` wrote.


@check_arguments(DataError)
def huggingface(
    path: Name,
    split: Name = "train",
    *,
    config: str | None = None,
    revision: str | None = None,
    overlong: Policy = "error",
    max_prompt_tokens: Count | None = None,
    **fields: str,
) -> Rows:
    """Read a split of a data set by its hub id, or of a folder of `Dataset.save_to_disk`. Give a `revision` so that it never changes.

        rows = rg.data.huggingface("openai/gsm8k", "train", config="main", prompt="question", answer="answer")

    >>> import datasets, tempfile, rlgraph as rg
    >>> datasets.disable_progress_bars()
    >>> folder = tempfile.mkdtemp()
    >>> datasets.Dataset.from_list([{"question": "1 + 1 =", "answer": "2"}]).save_to_disk(folder)
    >>> rg.data.huggingface(folder, prompt="question", answer="answer")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    `fields`, `overlong` and `max_prompt_tokens` are those of `rg.data.rows`. Raises DataError where it cannot be loaded, as without a
    network and without a copy in the cache.
    """
    return build_rows(load_dataset_split(path, split, config, revision), f"'{path}'", fields, overlong, max_prompt_tokens, present_row)


def load_dataset_split(path: str, split: str, config: str | None, revision: str | None) -> Any:
    """Load a `datasets.Dataset`. Raises DataError."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"data set '{path}': data sets of the hub are read by datasets, which is not installed: {INSTALL}") from None
    try:
        if (Path(path) / "state.json").exists():
            return datasets.load_from_disk(path)
        if (Path(path) / "dataset_dict.json").exists():
            return datasets.load_from_disk(path)[split]
        return datasets.load_dataset(path, config, split=split, revision=revision)
    except Exception as error:
        raise DataError(
            f"data set '{path}' ({split}) cannot be loaded: {type(error).__name__}: {error!s:.200}; check its name, split and network, or "
            "download it and give its files, e.g. rg.data.parquet('folder/*.parquet')"
        ) from error
