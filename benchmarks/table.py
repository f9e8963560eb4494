"""The tables of measured figures: written into README.md and docs/, each figure read from a file in `benchmarks/results/`.

    python benchmarks/table.py            # write README.md and the pages of docs/ again
    python benchmarks/table.py --check    # exit with 1 if any of them differs from the results

`rows.py` declares the rows: what was measured, the file and the field of the figure, its format, and the same of one peer. A table
stands between `<!-- table: name -->` and `<!-- end of table -->`. A figure in running text is followed by `<!-- figure: name -->`; what
stands before the comment is replaced. A row or figure whose result is not there yet is left out of its table, and named.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")))
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.S)
FIGURE = re.compile(r"\S+(?: (?:s|ms|µs|%|GB/s|times))?( ?<!-- figure: ([\w-]+) -->)")

REDUCE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "sum": sum,
    "max": max,
    "min": min,
    "count": len,
    "first 4": lambda values: statistics.fmean(values[:4]),
    "last 4": lambda values: statistics.fmean(values[-4:]),
    "farthest from 1": lambda values: max(values, key=lambda value: abs(value - 1)),
    "items": lambda values: sum(len(value) if isinstance(value, list) else 1 for value in values),
}


@dataclass(frozen=True)
class Each:
    """All items of a list or an object that have these values."""

    having: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"[*{''.join(f', {key}={value}' for key, value in self.having.items())}]"


class NotMeasured(Exception):
    """A result that is declared and not there: the message is its file and field."""


@dataclass(frozen=True)
class Figure:
    """One number of a file of results: `path` leads to it by keys, by an index, or by what an item of a list has.

    `reduce` makes one number of a list; of a .jsonl file, and of `Each` in the path, the values of all lines or items are the list.
    `of` divides by another figure.
    """

    file: str
    path: tuple[Any, ...]
    form: str
    scale: float = 1.0
    reduce: str | None = None
    of: "Figure | None" = None

    def value(self) -> float:
        found = _at(_loaded(self.file), self.path, self.where)
        if isinstance(found, dict):
            found = list(found.values())
        number = REDUCE[self.reduce](found) if self.reduce else found
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{self.where} is {number!r}, which is no number")
        return self.scale * number / (self.of.value() if self.of else 1.0)

    def text(self) -> str:
        return self.form.format(self.value())

    @property
    def where(self) -> str:
        """File and field, as they are shown."""
        keys = [f"[{', '.join(f'{k}={v}' for k, v in key.items())}]" if isinstance(key, Mapping) else str(key) for key in self.path]
        whole = f"{self.file}: {' › '.join(keys)}" + (f" ({self.reduce})" if self.reduce else "")
        return f"{whole}; over {self.of.where}" if self.of else whole


@dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, the number, one peer with its number, and the command. `{name}` in the words is one of
    `words`, read from a file as well."""

    what: str
    figure: Figure
    script: str
    peer: str = ""
    beside: Figure | None = None
    words: Mapping[str, Figure] | None = None

    def cells(self) -> list[str]:
        words = {name: figure.text() for name, figure in (self.words or {}).items()}
        return [self.what.format(**words), self.figure.text(), self._beside(), f"`{self.script}`", f"`{self.figure.where}`"]

    def _beside(self) -> str:
        """The peer and its figure; nothing where the peer was not measured."""
        try:
            return f"{self.peer}: {self.beside.text()}" if self.beside else self.peer
        except NotMeasured:
            return ""

    def missing(self) -> list[str]:
        """The declared rows and figures without a result."""
        found = []
        for figure in (self.figure, self.beside, *(self.words or {}).values()):
            try:
                if figure:
                    figure.value()
            except NotMeasured as reason:
                found.append(str(reason))
        return found


@lru_cache(maxsize=64)
def _loaded(file: str) -> Any:
    path = RESULTS / file
    if not path.is_file():
        raise NotMeasured(file)
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def _at(value: Any, path: Sequence[Any], where: str) -> Any:
    """Follow a path; a list of records gives the list of what each has."""
    for place, key in enumerate(path):
        if isinstance(value, list) and isinstance(key, str):
            key, place = Each(), place - 1
        if isinstance(key, Each):
            items = [item for item in (value.values() if isinstance(value, dict) else value) if isinstance(item, dict)]
            having = key.having.items()
            return [_at(item, path[place + 1 :], where) for item in items if all(item.get(k) == v for k, v in having)]
        if isinstance(key, Mapping):
            value = next((item for item in value if all(item.get(k) == v for k, v in key.items())), None)
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[key]
        if value is None:
            raise NotMeasured(where)
    return value


def table(head: Sequence[str], rows: Iterable[Row], columns: int, most: int | None = None) -> tuple[str, list[str]]:
    """Return the rows as Markdown, the first `columns` cells of each, and the results that are missing, in which case a row or its peer is
    left out."""
    rows, lines = list(rows), []
    for row in rows:
        try:
            lines.append(f"| {' | '.join(row.cells()[:columns])} |")
        except NotMeasured:
            continue
    missing = [reason for row in rows for reason in row.missing()]
    marks = "|".join("---" for _ in head)
    return "\n".join([f"| {' | '.join(head)} |", f"|{marks}|", *lines[:most]]) + "\n", missing


def rendered(page: str, tables: Mapping[str, str], figures: Mapping[str, Figure]) -> str:
    """Return a page with its tables and marked figures written again. Raises KeyError for one that is not declared."""
    page = TABLE.sub(lambda found: found[1] + tables[found[2]] + found[3], page)
    return FIGURE.sub(lambda found: figures[found[2]].text() + found[1], page)


def main() -> int:
    import rows

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page differs")
    given = arguments.parse_args()
    tables, missing = rows.tables()
    differs = []
    for name in PAGES:
        before = (ROOT / name).read_text(encoding="utf-8")
        after = rendered(before, tables, rows.FIGURES)
        if before != after:
            differs.append(name)
            if not given.check:
                (ROOT / name).write_text(after, encoding="utf-8")
    for reason in dict.fromkeys(missing):
        print(f"not measured, so left out: {reason}")
    print(f"{'differ' if given.check else 'written'}: {', '.join(differs) or 'none'}")
    return int(given.check and bool(differs))


if __name__ == "__main__":
    sys.exit(main())
