"""Find the best ways to divide many devices among pools without trying every one.

A step takes no longer when each of its nodes has more devices. So the period with the most devices that each pool has in a box of
divisions bounds the period of every division in the box. Boxes are halved best first, and divisions come out in the order of their
periods (branch and bound; Land and Doig, 1960). If costs say that more devices take longer, a division may come out too late.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from rlgraph.compiler.placement import Counts, Divisions

FEW = 128  # divisions that are tried one by one


@dataclass(frozen=True)
class Division:
    """One way to divide the devices, and its period."""

    counts: Counts
    period_s: float


@dataclass(frozen=True)
class _Box:
    """For each free pool the fewest and the most groups of devices."""

    least: tuple[int, ...]
    most: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(most - least for least, most in zip(self.least, self.most, strict=True))

    def halves(self) -> "tuple[_Box, _Box]":
        """Cut the box in two along its longest side."""
        axis = max(range(len(self.least)), key=lambda i: self.most[i] - self.least[i])
        middle = (self.least[axis] + self.most[axis]) // 2
        return (
            _Box(self.least, (*self.most[:axis], middle, *self.most[axis + 1 :])),
            _Box((*self.least[:axis], middle + 1, *self.least[axis + 1 :]), self.most),
        )


def best_first(divisions: Divisions, period: Callable[[Counts], float]) -> Iterator[Division]:
    """Yield divisions by their period, the shortest first; divisions of infinite period are left out."""
    groups = [group for _, group in divisions.free]
    whole = _Box((1,) * len(groups), tuple(divisions.room // group for group in groups))
    tickets, bounds = count(), dict[tuple[int, ...], float]()

    def entry(box: _Box) -> Iterator[tuple[float, int, int, _Box]]:
        most = _within(divisions, groups, box)
        if most is not None:
            key = tuple(most.values())
            if key not in bounds:
                bounds[key] = period(most)
            if bounds[key] < float("inf"):
                yield bounds[key], box.size, next(tickets), box

    heap = list(entry(whole))
    while heap:
        bound, size, _, box = heapq.heappop(heap)
        if not size:
            yield Division(divisions.counts([n * group for n, group in zip(box.least, groups, strict=True)]), bound)
            continue
        for half in box.halves():
            for item in entry(half):
                heapq.heappush(heap, item)


def _within(divisions: Divisions, groups: Sequence[int], box: _Box) -> Counts | None:
    """Find the most devices that each pool has in a box; None for a box without a division."""
    fewest = [n * group for n, group in zip(box.least, groups, strict=True)]
    rest = sum(group for _, group in divisions.open[len(groups) :])
    spare = divisions.room - rest - sum(fewest)
    if spare < 0:
        return None
    found = dict(divisions.counts(fewest))
    for (name, group), least, most in zip(divisions.free, fewest, box.most, strict=True):
        found[name] = min(most * group, least + spare // group * group)
    return found
