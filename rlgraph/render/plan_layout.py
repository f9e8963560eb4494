"""Compute the coordinates of the picture of a plan: grid, lanes, boxes, edges and texts, in pixels from the top left. Draws nothing."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rlgraph.plan.advice import Critical, critical
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop, PlannedNode, PlannedPool
from rlgraph.render import plan_labels
from rlgraph.render.plan_labels import LegendItem, TextLine

# Place each node in the grid of the picture: its lane, its column (how far downstream it is) and its row in the lane.


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


# Route the edges that pass over columns: one horizontal trunk for each channel, in a strip without boxes.
#
# All readers of a channel branch off its trunk, so a batch that many nodes read is a single line.

PORT_STEP = 12.0  # between two channels that leave one box
_CLEAR = 7.0  # pixels between two trunks in a row of boxes
_ROW, _GAP = 50.0, 16.0  # nominal heights, to compare detours before the true ones are known
_GAP_COST = 4.0  # prefers a straight line next to boxes to an equally short line between rows

_MISLEADS = 20.0  # a line that ends next to a box looks as if it belonged to it


@dataclass(frozen=True)
class Trunk:
    """A horizontal line through columns `first` to `last`: `offset` pixels from a row's middle, or track `track` of a gap."""

    strip: int
    first: int
    last: int
    offset: float = 0.0
    track: int = 0

    def meets(self, other: "Trunk") -> bool:
        """True if both are in one strip and share a column or touch, so that they must not lie on one line."""
        return self.strip == other.strip and self.first <= other.last + 1 and other.first <= self.last + 1


def out_offset(plan: Plan, channel: PlannedChannel) -> float:
    """Compute the distance from the middle of its box at which a channel leaves it."""
    own = [c.name for c in drawn_channels(plan) if c.writer == channel.writer]
    return (own.index(channel.name) - (len(own) - 1) / 2) * PORT_STEP


def route_channels(plan: Plan, grid: Grid) -> dict[str, Trunk]:
    """Choose the cheapest trunk for each channel that has a reader beyond the next column, by name."""
    placed: dict[str, Trunk] = {}
    for channel in sorted(drawn_channels(plan), key=lambda c: _reach(grid, c)):
        first, last = _reach(grid, channel)
        if last >= first:
            options = _options(grid, channel, out_offset(plan, channel), list(placed.values()))
            placed[channel.name] = min(options, key=lambda trunk: _cost(grid, channel, trunk))
    return placed


def _reach(grid: Grid, channel: PlannedChannel) -> tuple[int, int]:
    """The first and the last column that the channel passes over."""
    return grid.cells[channel.writer].column + 1, max(grid.cells[reader].column for reader in channel.readers) - 1


def _options(grid: Grid, channel: PlannedChannel, straight: float, placed: Sequence[Trunk]) -> Iterator[Trunk]:
    first, last = _reach(grid, channel)
    for index, strip in enumerate(grid.strips):
        if not strip.is_row:
            yield _in_gap(index, first, last, placed)
        elif grid.is_free(index, first, last):
            offsets = [straight] if index == grid.cells[channel.writer].strip else [0.0, -9.0, 9.0, -18.0, 18.0]
            for offset in offsets:
                trunk = Trunk(index, first, last, offset)
                if not any(trunk.meets(other) and abs(offset - other.offset) < _CLEAR for other in placed):
                    yield trunk
                    break


def _in_gap(strip: int, first: int, last: int, placed: Sequence[Trunk]) -> Trunk:
    taken = {other.track for other in placed if other.meets(Trunk(strip, first, last))}
    return Trunk(strip, first, last, track=min(set(range(len(taken) + 1)) - taken))


def _cost(grid: Grid, channel: PlannedChannel, trunk: Trunk) -> tuple[float, int]:
    """Compute the vertical detour of a channel's line and its branches; the upper strip wins a tie."""
    height = _height(grid, trunk.strip)
    far = [grid.cells[reader] for reader in channel.readers if grid.cells[reader].column > trunk.first]
    detour = abs(height - _height(grid, grid.cells[channel.writer].strip)) + abs(trunk.offset)
    detour += sum(abs(height - _height(grid, cell.strip)) for cell in far)
    if not grid.strips[trunk.strip].is_row:
        return detour + _GAP_COST + 2.0 * trunk.track, trunk.strip
    joined = {channel.writer, *channel.readers}
    beside = [name for name, c in grid.cells.items() if c.strip == trunk.strip and c.column in (trunk.first - 1, trunk.last + 1)]
    return detour + _MISLEADS * sum(name not in joined for name in beside), trunk.strip


def _height(grid: Grid, strip: int) -> float:
    sizes = [_ROW if s.is_row else _GAP for s in grid.strips]
    return sum(sizes[:strip]) + sizes[strip] / 2


# Compute the coordinates of the picture of a plan: lanes, boxes, edges and texts, in pixels from the top left. Draws nothing.

Point: TypeAlias = tuple[float, float]

EDGE = 12.0  # between the picture and its frame
HEAD = 62.0  # the header
LANE_GAP = 8.0
LANE_LEAST = 84.0  # room for three lines of label
BOX_HEIGHT = 44.0
ARROW = 9.0
TRACK = 9.0  # between two lines in a gap
GAP_OUTER, GAP_INNER = 16.0, 16.0
LOOP_STEP = 36.0  # between two feedback edges below the lanes: a line and its label
IN_STEP = 9.0  # least distance between two edges that enter a box


@dataclass(frozen=True)
class Lane:
    """The band of a pool, or of the host where `pool` is None."""

    pool: PlannedPool | None
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Box:
    """A node; `order` is its place in the firing order of a shared pool and the number of nodes there, or None."""

    node: PlannedNode
    order: tuple[int, int] | None
    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height


@dataclass(frozen=True)
class Edge:
    """The line of a channel to one reader: a line between points of one height, else a curve, with an arrow at the end."""

    channel: PlannedChannel
    reader: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class LoopLine:
    """The line of a feedback edge to one reader: right angles below all lanes, with an arrow at the end."""

    loop: PlannedLoop
    reader: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """Everything that the picture of a plan shows, and where."""

    width: float
    height: float
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    loops: tuple[LoopLine, ...]
    texts: tuple[TextLine, ...]
    legend: tuple[LegendItem, ...]
    critical: Critical


@dataclass(frozen=True)
class _Frame:
    """The left end and width of each column, and the top and height of each strip and each lane."""

    columns: tuple[tuple[float, float], ...]
    strips: tuple[tuple[float, float], ...]
    lanes: tuple[tuple[float, float], ...]
    left: float
    right: float

    @property
    def bottom(self) -> float:
        return sum(self.lanes[-1])


NOTHING = Critical(frozenset(), frozenset(), frozenset(), frozenset())


def layout(plan: Plan) -> Layout:
    """Compute the coordinates of a plan's picture. No box, edge or text covers a box or a text that it does not belong to."""
    grid = arrange(plan)
    lines = route_channels(plan, grid)
    red = critical(plan) if plan_labels.has_times(plan) else NOTHING
    frame = _frame(plan, grid, lines)
    boxes = _boxes(plan, grid, frame)
    edges = _edges(plan, grid, lines, frame, boxes)
    loops = _loops(plan, grid, frame, boxes)
    content = [
        *plan_labels.header(plan, EDGE),
        *plan_labels.lane_labels([(y, grid.lanes[i]) for i, (y, _) in enumerate(frame.lanes)], plan, EDGE),
    ]
    for box in boxes.values():
        content += plan_labels.box_texts(box.node, box.order, (box.x, box.y, box.width, box.height), plan, red)
    foot = frame.bottom + LOOP_STEP * len(plan.loops)
    written = _loop_labels(plan, red, loops, frame)
    legend = plan_labels.legend(plan, red, EDGE, foot + 30, frame.right)
    content += written
    right = max([frame.right, *(text.span[1] for text in content), *(item.right for item in legend)])
    lanes = tuple(Lane(grid.lanes[i], EDGE, y, right - EDGE, height) for i, (y, height) in enumerate(frame.lanes))
    bottom = max([foot, *(item.y for item in legend)]) + EDGE + 2
    return Layout(right + EDGE, bottom, lanes, tuple(boxes.values()), edges, loops, tuple(content), legend, red)


def _frame(plan: Plan, grid: Grid, lines: Mapping[str, Trunk]) -> _Frame:
    left = EDGE + plan_labels.label_width(grid.lanes, plan)
    side = 6.0 * len(plan.loops)
    crossings = _crossings(plan, grid)
    columns, x = [], left + 12.0 + side
    for index in range(grid.columns):
        members = [node for node in plan.nodes if grid.cells[node.name].column == index]
        width = max(plan_labels.box_width(node, order_in_pool(plan, node), plan) for node in members)
        columns.append((x, width))
        x += width + min(28.0 + 4.0 * crossings[index], 64.0) + side
    right = sum(columns[-1]) + 12.0 + side
    ports = _ports(plan, grid)
    strips, lanes, y = [], [], HEAD
    for index in range(len(grid.lanes)):
        members_of = [i for i, strip in enumerate(grid.strips) if strip.lane == index]
        heights = [_strip_height(grid, i, lines, ports, i in (members_of[0], members_of[-1])) for i in members_of]
        spare = max(LANE_LEAST - sum(heights), 0.0) / 2
        heights[0] += spare
        heights[-1] += spare
        top = y
        for height in heights:
            strips.append((y, height))
            y += height
        lanes.append((top, y - top))
        y += LANE_GAP
    return _Frame(tuple(columns), tuple(strips), tuple(lanes), left, right)


def _crossings(plan: Plan, grid: Grid) -> list[int]:
    """Count the edges that bend in the space right of each column, which sets its width."""
    found = [0] * grid.columns
    for channel in drawn_channels(plan):
        leaves = grid.cells[channel.writer].column
        for column in {leaves, *(grid.cells[reader].column - 1 for reader in channel.readers)}:
            found[column] += 1
    return found


def _strip_height(grid: Grid, index: int, lines: Mapping[str, Trunk], ports: Mapping[str, int], outer: bool) -> float:
    if grid.strips[index].is_row:
        return max([BOX_HEIGHT, *(_box_height(ports.get(name, 0)) for name, cell in grid.cells.items() if cell.strip == index)])
    tracks = 1 + max((trunk.track for trunk in lines.values() if trunk.strip == index), default=-1)
    return max(GAP_OUTER if outer else GAP_INNER, TRACK * (tracks + 1))


def _ports(plan: Plan, grid: Grid) -> Counter[str]:
    """Count the edges that enter each box at its left side."""
    ports = Counter(reader for channel in drawn_channels(plan) for reader in channel.readers)
    ports.update(reader for loop in plan.loops for reader in loop.readers if not grid.is_free_below(grid.cells[reader]))
    return ports


def _box_height(ports: int) -> float:
    return max(BOX_HEIGHT, IN_STEP * (ports + 1) + 10.0)


def order_in_pool(plan: Plan, node: PlannedNode) -> tuple[int, int] | None:
    """Find a node's place in the order of its pool and the number of nodes there; None if it has the pool to itself."""
    shared = [other.name for other in plan.nodes if other.pool == node.pool]
    return None if node.pool is None or len(shared) < 2 else (shared.index(node.name) + 1, len(shared))


def _boxes(plan: Plan, grid: Grid, frame: _Frame) -> dict[str, Box]:
    ports = _ports(plan, grid)
    boxes = {}
    for node in plan.nodes:
        cell = grid.cells[node.name]
        (x, width), (top, height), own = frame.columns[cell.column], frame.strips[cell.strip], _box_height(ports[node.name])
        boxes[node.name] = Box(node, order_in_pool(plan, node), x, top + (height - own) / 2, width, own)
    return boxes


def _edges(plan: Plan, grid: Grid, lines: Mapping[str, Trunk], frame: _Frame, boxes: Mapping[str, Box]) -> tuple[Edge, ...]:
    """Route an edge for each channel and reader; edges enter a box in the order of the heights they come from."""
    starts: list[tuple[PlannedChannel, str, list[Point]]] = []
    for channel in drawn_channels(plan):
        box = boxes[channel.writer]
        for reader in channel.readers:
            points = [(box.right, box.y + box.height / 2 + out_offset(plan, channel))]
            column = grid.cells[reader].column
            if column > grid.cells[channel.writer].column + 1:
                trunk = lines[channel.name]
                y = _trunk_y(trunk, frame, lines)
                points += [(frame.columns[trunk.first][0], y), (sum(frame.columns[column - 1]), y)]
            starts.append((channel, reader, points))
    entering: dict[str, list[tuple[float, int]]] = {}
    for index, (_, reader, points) in enumerate(starts):
        entering.setdefault(reader, []).append((points[-1][1], index))
    ports, edges = _ports(plan, grid), []
    for index, (channel, reader, points) in enumerate(starts):
        queue = sorted(entering[reader])
        place = next(i for i, (_, other) in enumerate(queue) if other == index)
        x, y = boxes[reader].x, _port_y(boxes[reader], place, ports[reader])
        edges.append(Edge(channel, reader, (*points, (x - ARROW, y), (x, y))))
    return tuple(edges)


def _port_y(box: Box, place: int, count: int) -> float:
    step = min(12.0, (box.height - 16.0) / max(count - 1, 1))
    return box.y + box.height / 2 + (place - (count - 1) / 2) * step


def _trunk_y(trunk: Trunk, frame: _Frame, lines: Mapping[str, Trunk]) -> float:
    top, height = frame.strips[trunk.strip]
    tracks = 1 + max(other.track for other in lines.values() if other.strip == trunk.strip)
    return top + height / 2 + trunk.offset + (trunk.track - (tracks - 1) / 2) * TRACK


def _loops(plan: Plan, grid: Grid, frame: _Frame, boxes: Mapping[str, Box]) -> tuple[LoopLine, ...]:
    """Route the feedback edges: down from the writer, along below all lanes, up to the reader."""
    lines = []
    ports, beside = _ports(plan, grid), Counter[str]()
    for index, loop in enumerate(plan.loops):
        y = frame.bottom + LOOP_STEP * index + 18.0
        for reader in loop.readers:
            writer, target = boxes[loop.writer], boxes[reader]
            down = (
                _below(writer, index, 1) if grid.is_free_below(grid.cells[loop.writer]) else _beside(writer, index, writer.bottom - 6.0, 1)
            )
            if grid.is_free_below(grid.cells[reader]):
                up = _below(target, index, -1)
            else:
                beside[reader] += 1
                up = _beside(target, index, _port_y(target, ports[reader] - beside[reader], ports[reader]), -1)
            lines.append(LoopLine(loop, reader, (*down, (down[-1][0], y), (up[-1][0], y), *reversed(up))))
    return tuple(lines)


def _below(box: Box, index: int, side: int) -> list[Point]:
    """The point where a feedback edge leaves (`side` 1) or enters (-1) a box that has nothing under it."""
    spread = 0.18 * box.width + min(14.0, 0.25 * box.width / max(index, 1)) * index
    return [(box.x + box.width / 2 + side * spread, box.bottom)]


def _beside(box: Box, index: int, y: float, side: int) -> list[Point]:
    """Route from a box at height `y` into the space right (`side` 1) or left (-1) of its column."""
    if side > 0:
        return [(box.right, y), (box.right + 12.0 + 6.0 * index, y)]
    return [(box.x, y), (box.x - ARROW - 8.0 - 6.0 * index, y)]


def _loop_labels(plan: Plan, red: Critical, loops: Sequence[LoopLine], frame: _Frame) -> list[TextLine]:
    """Place the label of each feedback edge under its line, so that no line of a lower edge crosses it."""
    written: list[TextLine] = []
    for index, loop in enumerate(plan.loops):
        own = [line for line in loops if line.loop.name == loop.name]
        lower = [x for other in plan.loops[index + 1 :] for line in loops if line.loop.name == other.name for x in _falls(line)]
        ends = [x for line in own for x in _falls(line)]
        y = frame.bottom + LOOP_STEP * index + 18.0
        tone: plan_labels.Tone = "red" if loop.name in red.loops else "weights"
        written.append(plan_labels.loop_label(loop, y + 15.0, (min(ends) + max(ends)) / 2, lower, (EDGE, frame.right), tone))
    return written


def _falls(line: LoopLine) -> list[float]:
    """The x positions at which a feedback edge runs up or down."""
    return [a[0] for a, b in zip(line.points, line.points[1:], strict=False) if a[0] == b[0]]
