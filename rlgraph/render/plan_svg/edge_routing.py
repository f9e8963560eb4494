"""Route the edges that pass over columns: one horizontal trunk for each channel, in a strip without boxes.

All readers of a channel branch off its trunk, so a batch that many nodes read is a single line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlgraph.plan.plan import Plan, PlannedChannel
from rlgraph.render.plan_svg.grid import Grid, drawn_channels

PORT_STEP = 12.0  # between two channels that leave one box
_CLEAR = 7.0  # pixels between two trunks in a row of boxes
_ROW, _GAP = 50.0, 16.0  # nominal heights, to compare detours before the true ones are known
_GAP_COST = 4.0  # prefers a straight line beside boxes to an equally short one between rows

_MISLEADS = 20.0  # a line that ends beside a box looks as if it belonged to that box


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
