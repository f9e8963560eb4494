"""Rows of a data set, which files, data sets of the hub and lists all become: read by number, converted and checked when they are read.

A mixture draws from several data sets in proportion to their weights, which may change from step to step, also by results.
"""

import bisect
import hashlib
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from rlgraph import settings
from rlgraph.data.images import FIELDS as IMAGES
from rlgraph.errors import NOT_JSON, DataError, choices, show_value
from rlgraph.settings import Count, check_arguments, refuse_unknown

LIST = "the data set"  # what errors call rows that are of no file
DIGESTED = 4096  # rows of which a digest is made at most
Row: TypeAlias = Mapping[str, Any]
Convert: TypeAlias = Callable[[Row], Row]
Policy: TypeAlias = Literal["error", "drop", "truncate_left"]


class Dataset(Protocol):
    """Anything with a length and items: a list, a `reasoning_gym` data set, a Hugging Face `Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Overlong:
    """The treatment of a prompt of more than `most` tokens, or more than a rollout has room for."""

    policy: Policy = "error"
    most: Count | None = None

    def limit(self, room: int) -> int:
        """Compute the most tokens of a prompt where a rollout has room for `room`."""
        return room if self.most is None else min(room, self.most)


@settings.refuse_unknown
@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a data set, for `rg.prompts` and `rg.evaluate`. The functions of `rg.data` make them.

    >>> import rlgraph as rg
    >>> sums = [{"prompt": "1 + 1 =", "extra": {"answer": 2}}, {"prompt": "1 - 1 =", "extra": {"answer": 0}}]
    >>> rows = rg.data.rows(sums, answer="extra.answer")
    >>> rows[0], len(rows.filter(lambda row: row["answer"] > 0))
    ({'prompt': '1 + 1 =', 'answer': 2}, 1)

    `name` is what errors call them, `convert` are the functions that each row goes through, and `picked` the rows that are left.

    * `source`: the rows: a sequence of mappings, or a data set of `datasets`.
    * `overlong`: what becomes of prompts that are too long.
    """

    source: Dataset
    name: str = LIST
    convert: tuple[Convert, ...] = ()
    picked: Sequence[int] | None = None
    overlong: Overlong = field(default_factory=Overlong)

    def __len__(self) -> int:
        return len(self.source) if self.picked is None else len(self.picked)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = index if self.picked is None else self.picked[index]
        return self._convert_row(place, self.source[place])

    def place(self, index: int) -> str:
        """Name a row as its file has it, for errors."""
        place = index if self.picked is None else self.picked[index]
        return self._place(place)

    def _place(self, place: int) -> str:
        return _own_place(self.source, place) or f"{'item' if self.name == LIST else 'row'} {place} of {self.name}"

    def _convert_row(self, place: int, row: Row) -> Row:
        for function in self.convert:
            try:
                row = function(row)
            except DataError as error:
                raise DataError(f"{self._place(place)} {error}") from None
        if hasattr(self.source, "folder") and isinstance(row, Mapping):
            return FileRow(row, self.source.folder(place))
        return row

    def __iter__(self) -> Iterator[Row]:
        if self.picked is not None:
            return (self[index] for index in range(len(self)))
        return (self._convert_row(place, row) for place, row in enumerate(in_order(self.source)))

    def filter(self, keep: Callable[[Row], bool]) -> "Rows":
        """Keep the rows for which `keep` is true. It is asked once for each row, at once."""
        places = range(len(self.source)) if self.picked is None else self.picked
        return replace(self, picked=[place for place, row in zip(places, self, strict=True) if keep(row)])

    def map(self, function: Convert) -> "Rows":
        """Convert each row by a function when it is read. The function is sent to workers, and gives the same for the same row."""
        return replace(self, convert=(*self.convert, function))

    def distinct(self) -> "Rows":
        """Keep the first row of those with the same prompt and images."""
        seen: set[str] = set()

        def new(row: Row) -> bool:
            key = json.dumps([row["prompt"], *(row.get(name) for name in IMAGES)], sort_keys=True, default=str)
            if key in seen:
                return False
            seen.add(key)
            return True

        return self.filter(new)


class FileRow(dict[str, Any]):
    """A row of a file, with the folder of the file, in which relative paths of its images begin."""

    def __init__(self, row: Row, folder: Path) -> None:
        super().__init__(row)
        self.folder = folder


def folder_of(row: Row, working: Path) -> Path:
    """Find the folder in which relative paths of a row begin: its file's folder, or the working directory."""
    return working / row.folder if isinstance(row, FileRow) else working


def place_of(data: Any, index: int) -> str:
    """Name a row of a data set for an error: as its file has it, if it is of one.

    >>> place_of([{"prompt": "1"}], 0)
    'item 0 of the data set'
    """
    return _own_place(data, index) or f"item {index} of the data set"


def _own_place(data: Any, index: int) -> str:
    """Name a row as the data set itself does; empty if it does not."""
    own = getattr(data, "place", None)  # a data set of another library has none
    return "" if own is None else str(own(index))


def digest(data: Dataset) -> str:
    """Compute a digest of the rows and their order, by which a resume finds other ones; of many rows, some that are evenly spread.

    >>> digest([{"a": 1}, {"a": 2}]) == digest([{"a": 2}, {"a": 1}])
    False
    """
    made, size = hashlib.sha256(), len(data)
    for place in range(0, size, -(-size // DIGESTED) or 1):
        made.update(json.dumps(data[place], default=plain_json, ensure_ascii=False).encode(errors="replace") + b"\n")
    return made.hexdigest()[:16]


def plain_json(value: Any) -> Any:
    """Make JSON of an array; of anything else its type, since a text of it may hold an address."""
    return value.tolist() if hasattr(value, "tolist") else dict(value) if isinstance(value, Mapping) else type(value).__name__


def in_order(data: Dataset) -> Iterator[Row]:
    """Read all rows of a data set: as it iterates itself, which may be faster than by number."""
    return iter(data) if isinstance(data, Iterable) else (data[index] for index in range(len(data)))


@dataclass(frozen=True)
class Fields:
    """Takes fields of a row by their paths: `Fields({"answer": "reward_model.ground_truth"})`."""

    paths: Mapping[str, str]

    def __call__(self, row: Row) -> Row:
        return {name: at(row, path) for name, path in self.paths.items()}


def at(row: Row, path: str) -> Any:
    """Look up a value of a row by its path, as "reward_model.ground_truth". JSON on the way is parsed. Raises DataError if it is missing.

    >>> at({"extra_info": '{"turns": [{"answer": 2}]}'}, "extra_info.turns.0.answer")
    2
    """
    if path in row:
        return row[path]
    found: Any = row
    for number, key in enumerate(keys := path.split(".")):
        found = _parse_value(found)
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list | tuple) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            inside = f"under '{'.'.join(keys[:number])}'" if number else "in it"
            what = choices(key, found, f"{inside} are") if isinstance(found, Mapping) else f"{inside} is {show_value(found)}"
            raise DataError(f"has no '{path}': {what}; pass the path of its field, e.g. answer='reward_model.ground_truth'")
    return found


def _parse_value(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return json.loads(value)
        except NOT_JSON:
            return value
    return value


def present(value: Any) -> Any:
    """Leave out the keys of nested mappings that are None, which is how Arrow stores keys that only other rows have.

    `content` stays: a message of the assistant that only calls tools has none.
    """
    if isinstance(value, Mapping):
        return {key: present(item) for key, item in value.items() if item is not None or key == "content"}
    return [present(item) for item in value] if isinstance(value, list) else value


def present_row(row: Row) -> Row:
    """Leave out the absent keys inside the columns of a row of Arrow; the columns themselves stay."""
    return {name: present(value) for name, value in row.items()}


def build_rows(
    source: Dataset, name: str, fields: Mapping[str, str], overlong: Policy, max_prompt_tokens: int | None, *convert: Convert
) -> Rows:
    """Make the rows of a source: through the functions `convert`, then with the `fields` alone, if there are any."""
    for field_name, path in fields.items():
        if not isinstance(path, str) or not path:
            raise DataError(
                f"{name}: {field_name}={show_value(path)} is not a path of a field; pass text, e.g. answer='reward_model.ground_truth'"
            )
    functions: tuple[Convert, ...] = (*convert, Fields({"prompt": "prompt", **fields})) if fields else convert
    return Rows(source, name, functions, overlong=Overlong(overlong, max_prompt_tokens))


@settings.check_arguments(DataError)
def rows(data: Dataset, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None, **fields: str) -> Rows:
    """Take a list, a Hugging Face `Dataset` or another data set as rows, with fields by their paths.

    >>> import rlgraph as rg
    >>> rg.data.rows([{"question": "1 + 1 =", "reward": {"answer": "2"}}], prompt="question", answer="reward.answer")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    A row has the `prompt` and the fields that are named; without names it stays as it is. `overlong` says what becomes of prompts of
    more than `max_prompt_tokens` tokens, or than the rollout has room for: "error" stops the launch, "drop" leaves them out, and
    "truncate_left" cuts off their beginning. Both are counted in `data/overlong_prompts`.

    Raises DataError for anything but a data set.
    """
    if isinstance(data, Rows):
        own = build_rows(data, data.name, fields, overlong, max_prompt_tokens)
        return replace(data, convert=(*data.convert, *own.convert), overlong=own.overlong)
    if isinstance(data, Mapping | str | bytes) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"rows({show_value(data)}): a data set has a length and rows, e.g. a list of dicts; read a file with rg.data.jsonl(path)"
        )
    arrow = (present_row,) if type(data).__module__.partition(".")[0] == "datasets" else ()
    return build_rows(data, LIST, fields, overlong, max_prompt_tokens, *arrow)


# Results of a run so far, by which a curriculum chooses: mean rewards of each data set of a mixture, and of each of its rows.


class Results:
    """The results of the steps whose rewards are known, for a curriculum: exact means, the same in a run that was killed and resumed.

    >>> results = Results({"easy": 1, "hard": 2})
    >>> results.learn(["easy", "hard", "hard"], [0, 1, 0], [1.0, 0.0, 0.5])
    >>> results.steps, results.mean("easy"), results.mean("hard"), results.row("hard", 1)
    (1, 1.0, 0.25, 0.0)

    `learn` adds a step: the data set, the row and the mean reward of each of its prompts. `rg.prompts(results=…)` calls it.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._names = list(sizes)
        self._sums: list[list[float]] = []  # of each step, by data set
        self._counts: list[list[int]] = []
        self._row_sums = {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}
        self._row_counts = {name: torch.zeros(size, dtype=torch.int64) for name, size in sizes.items()}

    @property
    def steps(self) -> int:
        """The number of steps whose rewards are known."""
        return len(self._sums)

    def mean(self, source: str, last: int | None = None) -> float | None:
        """Compute the mean reward of a data set's prompts, of all steps or of the `last` ones; None where it had no prompt.

        Raises DataError for a data set that the mixture lacks.
        """
        at = self._index(source)
        steps = slice(None) if last is None else slice(max(len(self._sums) - last, 0), None)
        count = sum(counts[at] for counts in self._counts[steps])
        return sum(sums[at] for sums in self._sums[steps]) / count if count else None

    def row(self, source: str, row: int) -> float | None:
        """Compute the mean reward of a row of a data set over the times it was drawn; None if it was not. Raises DataError as `mean`."""
        self._index(source)
        count = int(self._row_counts[source][row])
        return float(self._row_sums[source][row]) / count if count else None

    def learn(self, sources: Sequence[str], rows: Sequence[int], rewards: Sequence[float]) -> None:
        """Add a step: data set, row and mean reward of each prompt."""
        sums, counts = [0.0] * len(self._names), [0] * len(self._names)
        for source, row, reward in zip(sources, rows, rewards, strict=True):
            sums[self._names.index(source)] += reward
            counts[self._names.index(source)] += 1
            self._row_sums[source][row] += reward
            self._row_counts[source][row] += 1
        self._sums.append(sums)
        self._counts.append(counts)

    def _index(self, source: str) -> int:
        if source not in self._names:
            raise DataError(f"results of data set {show_value(source)}: the mixture has {self._names}")
        return self._names.index(source)

    def state(self) -> dict[str, Any]:
        """Collect the results for a checkpoint."""
        by_step = {"sums": torch.tensor(self._sums, dtype=torch.float64), "counts": torch.tensor(self._counts, dtype=torch.int64)}
        return {**by_step, "row_sums": dict(self._row_sums), "row_counts": dict(self._row_counts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self._sums, self._counts = state["sums"].tolist(), state["counts"].tolist()
        self._row_sums, self._row_counts = dict(state["row_sums"]), dict(state["row_counts"])


# Mixtures: several data sets drawn in proportion to their weights, which may change from step to step.

Curriculum: TypeAlias = Callable[..., Mapping[str, float]]  # of the seed and the step, or of these and the results so far


@refuse_unknown
@dataclass(frozen=True, eq=False)
class Mix:
    """Data sets by name, with the weights by which prompts are drawn from them. `rg.data.mix` makes it.

    >>> import rlgraph as rg
    >>> mixed = rg.data.mix({"easy": [{"prompt": "1 + 1 ="}], "hard": [{"prompt": "17 * 23 ="}]}, weights={"easy": 3, "hard": 1})
    >>> mixed.at(seed=0, step=5)
    [0.75, 0.25]

    Its rows are those of all data sets, one after another.

    * `sources`: the data sets by name.
    * `overlong`: what becomes of prompts that are too long; `rg.data.mix` says more.
    """

    sources: Mapping[str, Dataset]
    weights: Mapping[str, float] | Curriculum
    overlong: Overlong = field(default_factory=Overlong)

    @property
    def ends(self) -> list[int]:
        """The row at which each data set ends."""
        return list(itertools.accumulate(len(rows) for rows in self.sources.values()))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> Row:
        ends = self.ends
        number = bisect.bisect_right(ends, index)
        name, rows = list(self.sources.items())[number]
        try:
            return rows[index - (ends[number - 1] if number else 0)]
        except DataError as error:
            raise DataError(f"data set '{name}' of the mixture: {error}") from None

    def place(self, index: int) -> str:
        """Name a row as its own data set does, for errors."""
        number = bisect.bisect_right(self.ends, index)
        name, rows = list(self.sources.items())[number]
        found = place_of(rows, index - (self.ends[number - 1] if number else 0))
        return found.replace(LIST, f"data set '{name}' of the mixture")

    @property
    def by_results(self) -> bool:
        """Whether the weights depend on the results so far: a curriculum of three arguments."""
        return callable(self.weights) and _takes_results(self.weights)

    def at(self, seed: int, step: int, results: Results | None = None) -> list[float]:
        """Compute the share of each data set at a step, by these results where the curriculum reads them.

        Raises DataError for weights that are none.
        """
        given = self._weights(seed, step, results)
        where = f"the weights of the mixture at step {step}"
        if not isinstance(given, Mapping) or set(given) != set(self.sources):
            raise DataError(f"{where} are {show_value(given)}; there must be a number for each of {list(self.sources)}")
        wrong = [name for name, weight in given.items() if not _is_weight(weight)]
        if wrong or not sum(given.values()):
            raise DataError(f"{where} are {show_value(dict(given))}; each is a finite number of at least 0, and one is above 0")
        total = sum(given.values())
        return [given[name] / total for name in self.sources]

    def _weights(self, seed: int, step: int, results: Results | None) -> Any:
        if not callable(self.weights):
            return self.weights
        if not self.by_results:
            return self.weights(seed, step)
        return self.weights(seed, step, results or Results({name: len(rows) for name, rows in self.sources.items()}))


def _takes_results(weights: Callable[..., Any]) -> bool:
    """Whether a curriculum has a third argument. Raises DataError where its arguments are neither two nor three."""
    try:
        wanted = inspect.signature(weights)
    except ValueError:  # a function of C
        return False
    for count in (2, 3):
        try:
            wanted.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise DataError(f"mix(weights={show_value(weights)}): a curriculum is a function of (seed, step), or of (seed, step, results)")


def _is_weight(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


@check_arguments(DataError)
def mix(sources: Mapping[str, Any], weights: Mapping[str, float] | Curriculum) -> Mix:
    """Mix data sets: each prompt is drawn from one of them by its weight, and each data set in a seeded order of its own.

    >>> import rlgraph as rg
    >>> easy, hard = [{"prompt": "1 + 1 ="}], [{"prompt": "17 * 23 ="}, {"prompt": "19 * 29 ="}]
    >>> len(rg.data.mix({"easy": easy, "hard": hard}, weights={"easy": 3, "hard": 1}))
    3
    >>> def harder(seed, step):
    ...     return {"easy": 1.0, "hard": min(step / 100, 4.0)}
    >>> rg.prompts(rg.data.mix({"easy": easy, "hard": hard}, weights=harder), count=8)
    the batch of 'prompts'

    A function of `(seed, step)` is a curriculum. It gives the same weights for the same step whenever it is called, so that a job that
    resumes draws what it would have drawn. One of `(seed, step, results)` also sees the rewards so far: `results.mean("hard")` of a
    data set, `results.row("hard", 7)` of a row, None before there are any; `rg.prompts(results=…)` brings them back.

    The metrics `data/mix/NAME` count the prompts of a step. All data sets have the same fields, and prompts that are too long are
    treated alike: the same `overlong` and `max_prompt_tokens`.

    Raises DataError for weights that are not one for each data set, and for data sets that treat long prompts differently.
    """
    if not sources:
        raise DataError("mix({}): a mixture has at least one data set")
    found = {name: source if isinstance(source, Rows) else rows(source) for name, source in sources.items()}
    first, *others = found.items()
    for name, other in others:
        if other.overlong != first[1].overlong:
            raise DataError(
                f"mix: the data sets '{first[0]}' and '{name}' treat long prompts differently: {first[1].overlong} and "
                f"{other.overlong}; set the same overlong and max_prompt_tokens for both"
            )
    made = Mix(found, weights, first[1].overlong)
    shares = made.at(0, 0)
    if not callable(weights) and 0 in shares:
        raise DataError(f"mix(weights={show_value(dict(weights))}): a data set of weight 0 is never drawn; leave it out")
    return replace(made, weights=weights if callable(weights) else dict(weights))
