"""Simulate each engine of a generator apart: one that is done goes on to the next step while another still decodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from rlgraph.compiler.schedule import Dependency
from rlgraph.costs.lengths import Array

Wait: TypeAlias = tuple[Dependency, Sequence[Any], int]  # its times, one or `[engines]` a step, and of how many steps before
Waited: TypeAlias = list[tuple[Dependency, float]]  # for what, and how long
NOTHING = -1  # was waited for


@dataclass
class Engines:
    """One event of a node that each engine has for itself. `seconds` and all times here are `[engines]` for each step."""

    seconds: Sequence[Array]
    starts: list[Array] = field(default_factory=list)
    worked: list[Array] = field(default_factory=list)
    ends: list[Array] = field(default_factory=list)
    puts: dict[int, list[Array]] = field(default_factory=dict)
    causes: list[Array] = field(default_factory=list)  # the number of what each start waited for last
    held: list[Waited] = field(default_factory=list)
    waits: dict[int, Sequence[Wait]] = field(default_factory=dict)  # of the start (0) and of each put
    others: Mapping[str, Sequence[float]] = field(default_factory=dict)  # when each event of the schedule ended, by step

    @property
    def count(self) -> int:
        return len(self.seconds[0])

    def fire(self, step: int) -> None:
        """Play the event of one step, after all that it waits for."""
        at, cause = self._latest(0, step, np.zeros(self.count))
        self.starts.append(at)
        self.causes.append(cause)
        at = at + self.seconds[step]
        self.worked.append(at)
        held: Waited = []
        for put, done in self.puts.items():
            before = at
            at, cause = self._latest(put, step, before)
            held += self._waited(put, cause, at - before)
            done.append(at)
        self.held.append(held)
        self.ends.append(at)

    def late(self, step: int, seconds: Array) -> Waited:
        """Sum the `seconds` `[engines]` of a step's starts by what each waited for last."""
        return self._waited(0, self.causes[step], seconds)

    def _latest(self, put: int, step: int, at: Array) -> tuple[Array, Array]:
        """Find when each engine has all that a put waits for, at `at` or later, and the number of the wait that ended last after `at`."""
        cause = np.full(self.count, NOTHING)
        for number, (_, done, credits) in enumerate(self.waits.get(put, ())):
            if step >= credits and (later := done[step - credits] > at).any():
                at, cause = np.where(later, done[step - credits], at), np.where(later, number, cause)
        return at, cause

    def _waited(self, put: int, causes: Array, seconds: Array) -> Waited:
        numbers = set(causes.tolist()) - {NOTHING}
        return [(self.waits[put][number][0], float(seconds[causes == number].sum())) for number in sorted(numbers)]
