"""The tables and pictures of measured figures: written into README.md and docs/, each figure read from `benchmarks/results/`.

    python benchmarks/report/table.py            # write README.md, the pages and the pictures of docs/ again
    python benchmarks/report/table.py --check    # exit with 1 if any of them differs from the results

`*_rows.py` declare the rows: what was measured, the file and the field of the figure, its format, and the same of one peer. `rows.py`
makes tables of them, and `pictures.py` names the pictures. A table stands between `<!-- table: name -->` and `<!-- end of table -->`. A
figure in running text is followed by `<!-- figure: name -->`; what stands before the comment is replaced. A row or figure whose result is
not there yet is left out of its table, and named.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.figures import Figure, NotMeasured

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md")))
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.S)
FIGURE = re.compile(r"\S+(?: (?:s|ms|µs|%|GB/s|times))?( ?<!-- figure: ([\w-]+) -->)")


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
        return [self.what.format(**words), self.figure.text(), self._beside().format(**words), f"`{self.script}`", f"`{self.figure.where}`"]

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


def table(head: Sequence[str], rows: Iterable[Row], columns: int, most: int | None = None) -> tuple[str, list[str]]:
    """Write the rows as Markdown, the first `columns` cells of each. Rows and peers without a result are left out; the second value
    lists those results."""
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
    """Write a page with its tables and marked figures written again. Raises KeyError for one that is not declared."""
    page = TABLE.sub(lambda found: found[1] + tables[found[2]] + found[3], page)
    return FIGURE.sub(lambda found: figures[found[2]].text() + found[1], page)


def main() -> int:
    from benchmarks.report import pictures, rows

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page or picture differs")
    given = arguments.parse_args()
    tables, missing = rows.tables()
    differs = []
    for name in (*PAGES, *pictures.PICTURES):
        before = (ROOT / name).read_text(encoding="utf-8")
        after = pictures.drawn(name) if name in pictures.PICTURES else rendered(before, tables, rows.FIGURES)
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
