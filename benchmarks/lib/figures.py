"""Figures of the tables: each is one number of a file in `benchmarks/results/`, by its place in it, with the format it is shown in."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"

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


def times(file: str, *path: Any, form: str = "{:.2f} times", reduce: str | None = None, of: Figure | None = None) -> Figure:
    return Figure(file, path, form, reduce=reduce, of=of)


def seconds(file: str, *path: Any, form: str = "{:.2f} s", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, reduce=reduce)


def ms(file: str, *path: Any, form: str = "{:.1f} ms", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, 1e3, reduce)


def gigabytes(file: str, *path: Any, form: str = "{:.1f} GB", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, 1e-9, reduce)


def percent(file: str, *path: Any, form: str = "{:.1f} %", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, 100, reduce)


def count(file: str, *path: Any, form: str = "{:,.0f}", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, reduce=reduce)


def share(file: str, *path: Any, form: str = "{:.2f}", reduce: str | None = None) -> Figure:
    return Figure(file, path, form, reduce=reduce)


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
