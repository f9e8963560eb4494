"""Place each node in the grid of the picture: its lane, its column (how far downstream it is) and its row in the lane."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlgraph.plan.plan import Plan, PlannedChannel, PlannedNode, PlannedPool


@dataclass(frozen=True)
class Cell:
    """The place of a node; `strip` is the index of its row among all strips of the picture, gaps between rows included."""

    lane: int
    column: int
    row: int
    strip: int


@dataclass(frozen=True)
class Strip:
    """A horizontal band of the picture: a row of boxes, or the gap above, between or below rows."""

    lane: int
    is_row: bool


@dataclass(frozen=True)
class Grid:
    """Lanes from top to bottom (None is the host), strips from top to bottom, and the cell of each node by name."""

    lanes: tuple[PlannedPool | None, ...]
    strips: tuple[Strip, ...]
    columns: int
    cells: Mapping[str, Cell]

    def is_free(self, strip: int, first: int, last: int) -> bool:
        """True if no box stands in columns `first` to `last` of a strip."""
        return not any(cell.strip == strip and first <= cell.column <= last for cell in self.cells.values())

    def is_free_below(self, cell: Cell) -> bool:
        """True if no box stands under a cell, down to the bottom of the picture."""
        return not any(other.column == cell.column and other.strip > cell.strip for other in self.cells.values())


def drawn_channels(plan: Plan) -> list[PlannedChannel]:
    """Select the channels that the picture draws as edges; a channel of kind order is a number in a box instead."""
    return [channel for channel in plan.channels if channel.kind == "batch"]


def arrange(plan: Plan) -> Grid:
    """Place each node right of all nodes it reads from, in a row of its lane near them."""
    columns = _columns(plan)
    lanes: list[PlannedPool | None] = [*plan.pools]
    if any(node.pool is None for node in plan.nodes):
        lanes.append(None)
    strips: list[Strip] = []
    cells: dict[str, Cell] = {}
    for index, pool in enumerate(lanes):
        rows = _rows(plan, [n for n in plan.nodes if n.pool == (pool.name if pool else None)], columns)
        first = len(strips)
        count = max(rows.values(), default=0) + 1
        strips += [Strip(index, is_row) for is_row in (False, *(True, False) * count)]
        cells.update({name: Cell(index, columns[name], row, first + 1 + 2 * row) for name, row in rows.items()})
    return Grid(tuple(lanes), tuple(strips), max(columns.values(), default=0) + 1, cells)


def _columns(plan: Plan) -> dict[str, int]:
    """Compute the longest path from a source to each node; the plan lists producers first."""
    columns = {node.name: 0 for node in plan.nodes}
    channels = drawn_channels(plan)
    for node in plan.nodes:
        for channel in channels:
            if channel.writer == node.name:
                columns.update({reader: max(columns[reader], columns[node.name] + 1) for reader in channel.readers})
    return columns


def _rows(plan: Plan, nodes: list[PlannedNode], columns: Mapping[str, int]) -> dict[str, int]:
    """Choose the row of each node of one lane: the free row nearest to the nodes that it reads from."""
    rows: dict[str, int] = {}
    members = {node.name for node in nodes}
    order = {node.name: index for index, node in enumerate(plan.nodes)}
    for node in sorted(nodes, key=lambda n: (columns[n.name], order[n.name])):
        before = [rows[c.writer] for c in drawn_channels(plan) if node.name in c.readers and c.writer in members and c.writer in rows]
        taken = {row for name, row in rows.items() if columns[name] == columns[node.name]}
        wish = sum(before) / len(before) if before else 0.0
        rows[node.name] = min((row for row in range(len(nodes)) if row not in taken), key=lambda row: (abs(row - wish), row))
    return rows
