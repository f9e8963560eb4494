"""Streams of rows: read once, in their order, from where a checkpoint says."""

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlgraph.data.rows import Convert, Fields, Overlong, Policy, Row, plain_json, present_row
from rlgraph.errors import DataError, show_value
from rlgraph.settings import Count, check_arguments, refuse_unknown

SHUFFLES = "BufferShuffledExamplesIterable"  # of datasets: its state lacks the rows in its buffer


@refuse_unknown
@dataclass(frozen=True, eq=False)
class Stream:
    """Rows that come one after another. `rg.data.stream` makes it.

    >>> import rlgraph as rg
    >>> odd = rg.data.stream(lambda: ({"prompt": f"{a} + 1 ="} for a in range(1000))).filter(lambda row: row["prompt"][0] in "13579")
    >>> next(StreamReader(odd))
    (1, {'prompt': '1 + 1 ='})

    `source` is a `datasets.IterableDataset`, or a function that gives the rows of an epoch. `convert` are the functions that each row
    goes through; one that gives None leaves the row out.

    * `overlong`: what becomes of prompts that are too long.
    """

    source: Any
    convert: tuple[Callable[[Row], Row | None], ...] = ()
    overlong: Overlong = field(default_factory=Overlong)

    def filter(self, keep: Callable[[Row], bool]) -> "Stream":
        """Keep the rows for which `keep` is true, as they come. The function is sent to a worker."""
        return replace(self, convert=(*self.convert, Keep(keep)))

    def map(self, function: Convert) -> "Stream":
        """Convert each row by a function, as it comes. The function is sent to a worker."""
        return replace(self, convert=(*self.convert, function))

    def convert_row(self, number: int, row: Any) -> Row | None:
        """Convert a row; None for one that is left out. Raises DataError for a row that is none, or that cannot be converted."""
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} of the stream is {show_value(row)}; a row is a mapping, e.g. {{'prompt': …}}")
        found: Row | None = row
        for function in self.convert:
            if found is None:
                return None
            try:
                found = function(found)
            except DataError as error:
                raise DataError(f"row {number} of the stream {error}") from None
        return found

    def epoch(self, number: int) -> Iterable[Any]:
        """Open the rows of an epoch."""
        if callable(self.source) and not hasattr(self.source, "__iter__"):
            rows: Iterable[Any] = self.source(number) if _takes_epoch(self.source) else self.source()
            return rows
        if hasattr(self.source, "load_state_dict"):
            self.source.load_state_dict(None)  # from its beginning, whatever it was read to before
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(number)
        source: Iterable[Any] = self.source
        return source


@dataclass(frozen=True)
class Keep:
    """Leaves out the rows for which a function is false."""

    keep: Callable[[Row], bool]

    def __call__(self, row: Row) -> Row | None:
        return row if self.keep(row) else None


@check_arguments(DataError)
def stream(source: Any, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None, **fields: str) -> Stream:
    """Take rows from a stream: a `datasets.IterableDataset`, or a function without arguments that yields rows.

    >>> import rlgraph as rg
    >>> def sums():
    ...     for a in range(1000):
    ...         yield {"prompt": f"{a} + 1 =", "answer": str(a + 1)}
    >>> rg.prompts(rg.data.stream(sums), count=8).columns
    ('prompt_texts', 'prompt_ids', 'answers')

    Rows are drawn in their order, and checked as they come. At the end the stream begins again; a function with a parameter `epoch` is
    told the number of the epoch. The function gives the same rows each time: a job that resumes from a checkpoint goes on after the
    last row that was drawn. The state of an IterableDataset is part of the checkpoint; other streams are read again up to that row.

    `fields`, `overlong` and `max_prompt_tokens` are those of `rg.data.rows`. Raises DataError for anything but a stream.
    """
    if isinstance(source, Iterator):
        raise DataError(
            f"stream({show_value(source)}): a generator can be read only once; pass the function that makes it, without calling it"
        )
    iterates = hasattr(source, "__iter__") and not isinstance(source, str | bytes | Mapping)
    if not iterates and not callable(source):
        raise DataError(f"stream({show_value(source)}): a stream is a datasets.IterableDataset, or a function that yields rows")
    arrow: tuple[Convert, ...] = (present_row,) if type(source).__module__.partition(".")[0] == "datasets" else ()
    taken: tuple[Convert, ...] = (Fields({"prompt": "prompt", **fields}),) if fields else ()
    return Stream(source, (*arrow, *taken), Overlong(overlong, max_prompt_tokens))


def _takes_epoch(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `epoch`."""
    try:
        return "epoch" in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


class StreamReader:
    """Reads a stream row by row, epoch after epoch, and saves where it is."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.epoch, self.taken, self.kept = 0, 0, 0  # rows of this epoch that were taken, and those that were not left out
        self.number = 0  # rows taken in all epochs
        self._rows: Iterator[Any] | None = None
        self._before = ""  # the state of the source before its last row
        self._last = ""  # a digest of that row

    def __next__(self) -> tuple[int, Row]:
        """Take the next row that is not left out, with its number in the stream. Raises DataError for an epoch without any."""
        while True:
            row, ended = self._next()
            if ended:
                continue
            found = self.stream.convert_row(self.number - 1, row)
            if found is not None:
                self.kept += 1
                return self.number - 1, found

    def _next(self) -> tuple[Any, bool]:
        """Take the next row of the source; at the end of an epoch, begin the next one."""
        if self._rows is None:
            self._rows = iter(self.stream.epoch(self.epoch))
        before = self._source_state()
        try:
            row = next(self._rows)
        except StopIteration:
            if not self.kept:
                raise DataError(
                    f"epoch {self.epoch} of the stream has {self.taken} rows, none of which is used; an epoch has at least one"
                ) from None
            self.epoch, self.taken, self.kept, self._rows = self.epoch + 1, 0, 0, None
            return None, True
        self.taken, self.number = self.taken + 1, self.number + 1
        self._before, self._last = before, _digest(row)
        return row, False

    def _source_state(self) -> str:
        """Save the state of an IterableDataset, as JSON; empty for other sources, and for one with rows that its state lacks."""
        source = self.stream.source
        if not hasattr(source, "state_dict") or _shuffles(source):
            return ""
        state = source.state_dict()
        return json.dumps(state) if state else ""

    def state(self) -> dict[str, Any]:
        """Collect the state for a checkpoint."""
        return {
            "epoch": self.epoch,
            "taken": self.taken,
            "kept": self.kept,
            "number": self.number,
            "source": self._before,
            "last": self._last,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the row that the state was saved at.

        Raises DataError if the stream gives another row there than it gave then.
        """
        self.epoch, self.taken, self.kept, self.number = (state[name] for name in ("epoch", "taken", "kept", "number"))
        self._before, self._last, self._rows = state["source"], state["last"], None
        if not self.taken:
            return
        if self._before:
            self._rows = self._after(json.loads(self._before), 1)
        if self._rows is None:
            self._rows = self._after(None, self.taken)
        if self._rows is None:
            raise DataError(
                f"row {self.number - 1} of the stream has changed since the checkpoint; a stream must yield the same rows each time: make "
                "it deterministic, or launch with fresh=True"
            )

    def _after(self, state: Any, rows: int) -> Iterator[Any] | None:
        """Open the epoch at a state of the source and pass `rows` rows; None unless the last of these is the last one drawn."""
        source = self.stream.epoch(self.epoch)
        if state is not None:
            self.stream.source.load_state_dict(state)
        found = iter(source)
        passed = list(itertools.islice(found, rows - 1, rows))
        return found if passed and _digest(passed[0]) == self._last else None


def _digest(row: Any) -> str:
    return hashlib.sha256(json.dumps(row, default=plain_json, ensure_ascii=False).encode()).hexdigest()[:16]


def _shuffles(source: Any) -> bool:
    """Whether an IterableDataset shuffles rows in a buffer, in itself or in one of its sources."""
    left: list[Any] = [getattr(source, "_ex_iterable", None)]  # private names of the library, each of some of its classes
    while left:
        inner = left.pop()
        if type(inner).__name__ == SHUFFLES:
            return True
        left += [inner.ex_iterable] if hasattr(inner, "ex_iterable") else list(getattr(inner, "ex_iterables", ()))
    return False
