"""Aligned tables and wrapped lines of at most 100 columns."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from rlgraph.analysis import words

WIDTH = 100
NAME_MOST = 30  # cells of a table's columns, but the last, which is wrapped


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as a table. A head that begins with `>` aligns its column to the right; the last column is wrapped."""
    right = [name.startswith(">") for name in head]
    cells = [[name.removeprefix(">") for name in head], *([words.clean(cell) for cell in row] for row in rows)]
    widths = [min(max(cell_len(row[i]) for row in cells), NAME_MOST) for i in range(len(head) - 1)]
    lines = []
    for row in cells:
        fixed = "  ".join(_cell(row[i], widths[i], right[i]) for i in range(len(widths)))
        first, *more = _pieces(row[-1], WIDTH - cell_len(fixed) - 2) or [""]
        lines += [f"{fixed}  {first}", *(f"{' ' * cell_len(fixed)}  {part}" for part in more)]
    return lines


def _cell(value: str, width: int, right: bool) -> str:
    if cell_len(value) > width:
        return set_cell_size(set_cell_size(value, width - 3).rstrip() + "...", width)
    space = " " * (width - cell_len(value))
    return space + value if right else value + space


def wrapped(line: str, indent: int = 0) -> Iterator[str]:
    """Yield a line in pieces of at most the page width; all but the first are indented."""
    lead = line[: len(line) - len(line.lstrip())]
    parts = _pieces(line.strip(), WIDTH - max(indent, len(lead)))
    for index, part in enumerate(parts):
        yield (lead if index == 0 else " " * indent) + part


def _pieces(line: str, room: int) -> list[str]:
    """Split at spaces into pieces of at most `room` cells; a longer word is broken."""
    parts: list[str] = []
    for word in line.split():
        if parts and cell_len(f"{parts[-1]} {word}") <= room:
            parts[-1] += f" {word}"
            continue
        while cell_len(word) > room:
            kept = next(n for n in range(len(word), 0, -1) if cell_len(word[:n]) <= room)
            parts.append(word[:kept])
            word = word[kept:]
        parts.append(word)
    return parts
