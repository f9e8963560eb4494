"""What a job remembers of its steps: numbers in arrays and each name once, so that the memory of a long run is small and bounded."""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlgraph.plan.schedule import Span

_ROW = np.dtype(
    [
        ("name", "i4"),
        ("kind", "i4"),
        ("step", "i8"),
        ("worker", "i4"),
        ("start_s", "f8"),
        ("end_s", "f8"),
        ("version", "i8"),
        ("bytes", "i8"),
    ]
)
_NONE = -1  # where a span has no version, or no bytes


class Spans:
    """The last `kept` spans. The memory for them is taken at the start."""

    def __init__(self, kept: int) -> None:
        self._rows = np.zeros(kept, _ROW)
        self._rows["version"] = _NONE  # which touches every page of it
        self._added = 0
        self._codes: dict[str, int] = {}

    def __len__(self) -> int:
        return min(self._added, len(self._rows))

    @property
    def full(self) -> bool:
        """Whether the next span takes the place of the first."""
        return len(self) == len(self._rows)

    def add(self, spans: Iterable[Span]) -> None:
        for span in spans:
            version, size = (_NONE if value is None else value for value in (span.version, span.bytes))
            name, kind, worker = self._code(span.name), self._code(span.kind), self._code(span.worker)
            self._rows[self._added % len(self._rows)] = (name, kind, span.step, worker, span.start_s, span.end_s, version, size)
            self._added += 1

    def since(self, start_s: float) -> list[Span]:
        """List the spans, oldest first, in seconds from `start_s`."""
        names: list[Any] = list(self._codes)
        first = self._added if self.full else 0
        return [
            Span(
                names[name], names[kind], step, names[worker], start - start_s, end - start_s, _value_or_none(version), _value_or_none(size)
            )
            for name, kind, step, worker, start, end, version, size in np.roll(self._rows, -first)[: len(self)].tolist()
        ]

    def _code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))


def _value_or_none(value: int) -> int | None:
    return None if value == _NONE else value


class Metrics:
    """The metrics of the last steps: at least `kept` of them, and fewer than twice as many."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._columns: dict[str, array[float]] = {}
        self._steps = 0

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, float]]:
        for step in range(self._steps):
            found = {name: column[step] for name, column in self._columns.items()}
            yield {name: value for name, value in found.items() if value == value}  # NaN: that step did not tell it

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a step. NaN marks a metric that the step does not have, since a node that reports NaN is refused before."""
        for name in metrics.keys() - self._columns.keys():
            self._columns[name] = array("d", [np.nan]) * self._steps
        for name, column in self._columns.items():
            column.append(metrics.get(name, np.nan))
        self._steps += 1
        if self._steps == 2 * self._kept:
            self._steps = self._kept
            for column in self._columns.values():
                del column[: self._kept]
