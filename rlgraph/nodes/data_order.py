"""The order in which rows are drawn, as a pure function of the seed: one permutation after another, or a mixture of several."""

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

import torch

SPREAD = 7919  # between the seeds of the parts of a mixture, whose permutations differ


class Order(Protocol):
    """The endless order of a data set: a row for each place."""

    def row(self, place: int) -> int:
        """Find the row at a place."""

    def passed(self, row: int, first: int, before: int) -> int:
        """Count a row's places from `first`, which is one of them, to `before`, which is not counted."""


class Shuffled:
    """One seeded permutation of all rows after another."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def row(self, place: int) -> int:
        epoch, at = divmod(place, self.size)
        return _permutation(self.seed, epoch, self.size)[at]

    def passed(self, row: int, first: int, before: int) -> int:
        if before <= first:
            return 0
        epoch, at = divmod(before, self.size)
        return epoch - first // self.size + int(_permutation(self.seed, epoch, self.size).index(row) < at)


def drawn_parts(seed: int, step: int, count: int, shares: Sequence[float]) -> "array[int]":
    """Draw the part of each of `count` places of a step by the shares of the parts."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step + 2**40)
    return array("H", torch.multinomial(torch.tensor(shares, dtype=torch.float64), count, replacement=True, generator=draw).tolist())


class Mixed:
    """Draws each place of a step from one of several parts by the shares of that step, and each part in a seeded order of its own.

    `shares(step)` gives the share of each part; `parts` are their rows.
    """

    def __init__(self, seed: int, count: int, parts: Sequence[range], shares: Callable[[int], Sequence[float]]) -> None:
        self.seed, self.count, self.parts, self.shares = seed, count, parts, shares
        self._orders = [Shuffled(seed + SPREAD * number, len(part)) for number, part in enumerate(parts)]
        self._chosen: list[array[int]] = []  # the part of each place, by step
        self._before: list[list[int]] = [[0] * len(parts)]  # how often each part was drawn before a step

    def row(self, place: int) -> int:
        step, at = divmod(place, self.count)
        part = self.chosen(step)[at]
        drawn = self._before[step][part] + self._chosen[step][:at].count(part)
        return self.row_of(part, drawn)

    def row_of(self, part: int, drawn: int) -> int:
        """Find the row that a part gives after `drawn` others of its rows."""
        return self.parts[part][self._orders[part].row(drawn)]

    def chosen(self, step: int) -> "array[int]":
        """Choose the part of each place of a step, and of the steps before it."""
        while len(self._chosen) <= step:
            at = len(self._chosen)
            parts = drawn_parts(self.seed, at, self.count, self.shares(at))
            self._chosen.append(parts)
            self._before.append([before + parts.count(part) for part, before in enumerate(self._before[at])])
        return self._chosen[step]

    def part(self, place: int) -> int:
        """Find the part from which a place is drawn."""
        return self.chosen(place // self.count)[place % self.count]

    def passed(self, row: int, first: int, before: int) -> int:
        return sum(self.row(place) == row for place in range(first, before))


@lru_cache(maxsize=64)  # a batch spans one epoch or two, of each part of a mixture
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return order
