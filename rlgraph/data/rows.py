"""Rows of a data set, which files, data sets of the hub and lists all become: read by number, converted and checked when they are read."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias

from rlgraph import settings
from rlgraph.errors import NOT_JSON, DataError, choices, show_value
from rlgraph.settings import Count

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
        own = getattr(self.source, "place", None)
        return str(own(place)) if own is not None else f"{'item' if self.name == LIST else 'row'} {place} of {self.name}"

    def _convert_row(self, place: int, row: Row) -> Row:
        for function in self.convert:
            try:
                row = function(row)
            except DataError as error:
                raise DataError(f"{self._place(place)} {error}") from None
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
        """Keep the first row of those with the same prompt."""
        seen: set[str] = set()

        def new(row: Row) -> bool:
            key = json.dumps(row["prompt"], sort_keys=True, default=str)
            return key not in seen and not seen.add(key)  # type: ignore[func-returns-value]

        return self.filter(new)


def place_of(data: Any, index: int) -> str:
    """Name a row of a data set for an error: as its file has it, if it is of one.

    >>> place_of([{"prompt": "1"}], 0)
    'item 0 of the data set'
    """
    own = getattr(data, "place", None)
    return str(own(index)) if own is not None else f"item {index} of the data set"


def digest(data: Dataset) -> str:
    """Compute a digest of the rows and their order, by which a resume finds other ones; of many rows, some that are evenly spread.

    >>> digest([{"a": 1}, {"a": 2}]) == digest([{"a": 2}, {"a": 1}])
    False
    """
    made, size = hashlib.sha256(), len(data)
    for place in range(0, size, -(-size // DIGESTED) or 1):
        made.update(json.dumps(data[place], default=_plain_json, ensure_ascii=False).encode(errors="replace") + b"\n")
    return made.hexdigest()[:16]


def _plain_json(value: Any) -> Any:
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
            raise DataError(f"has no '{path}': {what}; name its field by its path, as answer='reward_model.ground_truth'")
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
                f"{name}: {field_name}={show_value(path)} is no path of a field; give text, as answer='reward_model.ground_truth'"
            )
    functions: tuple[Convert, ...] = (*convert, Fields({"prompt": "prompt", **fields})) if fields else convert
    return Rows(source, name, functions, overlong=Overlong(overlong, max_prompt_tokens))


@settings.checked(DataError)
def rows(data: Dataset, *, overlong: Policy = "error", max_prompt_tokens: Count | None = None, **fields: str) -> Rows:
    """Take a list, a Hugging Face `Dataset` or another data set as rows, with fields by their paths.

    >>> import rlgraph as rg
    >>> rg.data.rows([{"question": "1 + 1 =", "reward": {"answer": "2"}}], prompt="question", answer="reward.answer")[0]
    {'prompt': '1 + 1 =', 'answer': '2'}

    A row has the `prompt` and the fields that are named; without names it stays as it is. `overlong` says what becomes of prompts of
    more than `max_prompt_tokens` tokens, or than the rollout has room for: "error" stops the launch, "drop" leaves them out, and
    "truncate_left" cuts off their beginning. Both are counted in `data/overlong_prompts`.

    Raises DataError for what is no data set.
    """
    if isinstance(data, Rows):
        own = build_rows(data, data.name, fields, overlong, max_prompt_tokens)
        return replace(data, convert=(*data.convert, *own.convert), overlong=own.overlong)
    if isinstance(data, Mapping | str | bytes) or not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"rows({show_value(data)}): a data set has a length and rows, as a list of dicts has; read a file by rg.data.jsonl(path)"
        )
    arrow = (present_row,) if type(data).__module__.partition(".")[0] == "datasets" else ()
    return build_rows(data, LIST, fields, overlong, max_prompt_tokens, *arrow)
