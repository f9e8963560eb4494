"""The items of a data set: their checks, and the order in which they are drawn."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch

from rlgraph import notices
from rlgraph.columns import COLUMNS, Column
from rlgraph.conversions import LEAST, MOST
from rlgraph.data.images import FIELDS, check_image, images_of
from rlgraph.data.rows import folder_of, place_of
from rlgraph.errors import DataError, show_value
from rlgraph.graph.nodes import Node
from rlgraph.nodes.conversations import TEMPLATE_KWARGS, TOOLS, Chat, check_prompt, check_text, is_conversation

# Checks of the items of a data set. Each error names the item's number, the rule and the fix.

OWN = ("prompt_texts", "prompt_messages", "prompt_images", "prompt_ids")  # columns of sources of prompts


def check_data(name: str, data: Any, prompt: str | None) -> Mapping[str, Any]:
    """Check that `data` is a data set and return its first item. Raises DataError if it is not, or if the item has no field `prompt`.

    With `prompt` None the item is a mapping of any fields.
    """
    if isinstance(data, Mapping):
        raise DataError(
            f"{name}: the data set is a mapping of {show_value(list(data))}; it must be a list of items: "
            "[dict(zip(data, row)) for row in zip(*data.values())]"
        )
    if isinstance(data, str | bytes | PurePath):
        raise DataError(
            f"{name}: the data set is {show_value(data)}; it must be a list of items: read the file first, e.g. with rg.data.jsonl(path)"
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise DataError(
            f"{name}: the data set is {show_value(data)}; it needs __len__ and __getitem__, like a list of dicts: pass list(...) "
            "of it, or "
            "the function that makes it"
        )
    if len(data) == 0:
        raise DataError(f"{name}: the data set is empty; it needs at least one item")
    first = read(data, 0)
    check_first(name, first, prompt)
    return first


def check_first(name: str, first: Any, prompt: str | None) -> None:
    """Raise DataError unless the first item is a mapping with a field `prompt`, if one is asked for."""
    if prompt is None and not isinstance(first, Mapping):
        raise DataError(f"{name}: the first item is {show_value(first)}; each item is a mapping of fields: pass a list of dicts")
    if not isinstance(first, Mapping):
        fix = f"give [{{'{prompt}': text}} for text in data]" if isinstance(first, str) else "give a list of dicts"
        raise DataError(f"{name}: the first item is {show_value(first)}; each item is a mapping with the prompt under '{prompt}': {fix}")
    if prompt is not None and prompt not in first:
        raise DataError(
            f"{name}: the first item has {show_value(sorted(map(str, first)))}; each item is a mapping with the prompt under '{prompt}': "
            "pass the name of that field as prompt="
        )


def read(data: Any, index: int) -> Any:
    """Read an item. If the data set raises, raises DataError with the item's number."""
    try:
        return data[index]
    except DataError:
        raise
    except Exception as error:
        fix = "; a table of pandas is given as table.to_dict('records')" if hasattr(data, "to_dict") and hasattr(data, "iloc") else ""
        raise DataError(f"{place_of(data, index)} cannot be read: {type(error).__name__}: {error}{fix}") from error


def fields_of(first: Mapping[str, Any], prompt: str, chat: Chat | None) -> tuple[str, ...]:
    """Name the fields of an item that become columns: all except the prompt, its images and the fields of a conversation."""
    other = FIELDS if chat is None else (*FIELDS, TOOLS, TEMPLATE_KWARGS)
    return tuple(field for field in first if field != prompt and field not in other)


def check_item(
    where: str, item: Any, prompt: str, first: Mapping[str, Any], chat: Chat | None = None, images_in: Path | None = None
) -> None:
    """Raise DataError unless an item has a prompt and the same other fields as the first item, with values of the same kinds.

    The prompt is text, or a conversation if there is a `chat`. `where` names the item. `images_in` is the folder of relative paths of
    images; None: no item has an image.
    """
    if not isinstance(item, Mapping):
        raise DataError(f"{where} is {show_value(item)}; each item is a mapping with the prompt under '{prompt}'")
    fields = fields_of(first, prompt, chat)
    for field in (prompt, *fields):
        if field not in item:
            raise DataError(
                f"{where} lacks the field '{field}', which the first item has; each item has the same fields: {show_value(item)}"
            )
    images: list[Any] = [] if chat is not None else images_of(where, item, prompt) or []
    if chat is not None:
        chat.conversation(where, item, prompt, images)
    elif not isinstance(item[prompt], str):
        raise DataError(f"{where} has {prompt}={show_value(item[prompt])}; a prompt is text{_as_text(prompt, item[prompt])}")
    else:
        check_prompt(where, prompt, item[prompt])
    if images and images_in is None:
        raise DataError(f"{where} has an image, and the first item has none; put an item with an image first, so that all may have them")
    for number, image in enumerate(images):
        check_image(f"{where}: image {number}", image, folder_of(item, images_in or Path()))
    for field in fields:
        value, pattern = item[field], first[field]
        kind, wanted = kind_of(value), kind_of(pattern)
        if kind is None:
            raise DataError(f"{where} has {field}={show_value(value)}; a field is text or a number: {_field_fix(field, value)}")
        if kind != wanted and (kind, wanted) != ("a whole number", "a number with a fraction"):
            fix = "write both with a fraction" if "text" not in (kind, wanted) else "turn both into text"
            raise DataError(
                f"{where} has {field}={show_value(value)}, {kind}, where the first item has {wanted}, {show_value(pattern)}: {fix}"
            )
        _check_value(where, field, _plain(value), wanted == "a whole number")


def _check_value(where: str, field: str, value: Any, whole: bool) -> None:
    """Raise DataError for a value of the right kind that its column cannot hold."""
    if isinstance(value, str):
        check_text(where, field, value)
    elif value != value:
        keep = f"rows.filter(lambda row: row['{field}'] == row['{field}'])"
        raise DataError(f"{where} has {field}=nan, which pandas writes for missing values; write a number, or leave the item out: {keep}")
    elif isinstance(value, int) and not LEAST <= value <= MOST:
        raise DataError(
            f"{where} has {field}={show_value(value)}; whole numbers of a column have at most 64 bits: convert them to text, in each item"
        )
    elif isinstance(value, int) and not whole and int(float(value)) != value:
        raise DataError(f"{where} has {field}={value}, which a floating-point number cannot hold exactly: convert all values to text")


def notify_repeats(node: Node, count: int, rows: int) -> None:
    """Report that each step draws rows more than once."""
    if count > rows:
        notices.here.say(f"node '{node.name}' draws {count} rows per step from a data set of {rows}, so each step repeats rows")


def check_names(name: str, prompt: str, first: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Raise DataError if two fields would become one column; `columns` maps fields to columns."""
    taken = dict.fromkeys(OWN, f"'{prompt}'")
    for field, column in columns.items():
        if not isinstance(field, str):
            raise DataError(f"{name}: the first item has the field {show_value(field)}; a field is named by text")
        if column in taken:
            raise DataError(f"{name}: the fields {taken[column]} and '{field}' would both become the column '{column}'; rename one of them")
        taken[column] = f"'{field}'"


def kind_of(value: Any) -> str | None:
    """Name the kind of a field's value, in the words of the errors; None if no column can hold the value."""
    if isinstance(value, str):
        return "text"
    plain = _plain(value)
    if isinstance(plain, int):
        return "a whole number"
    return "a number with a fraction" if isinstance(plain, float) else None


def column_of(name: str, values: Sequence[Any], pattern: Any) -> Column:
    """Build the column `[N]` called `name`. `pattern`, the first item's value, decides whether its numbers are whole.

    Numbers with a fraction keep Python's precision, or get the dtype of a column that rlgraph defines.
    """
    if isinstance(pattern, str):
        return list(values)
    own = COLUMNS[name].dtype if name in COLUMNS else None
    fraction = own if isinstance(own, torch.dtype) else torch.float64
    whole = kind_of(pattern) == "a whole number"
    return torch.tensor([_plain(value) for value in values], dtype=torch.int64 if whole else fraction)


def _plain(value: Any) -> Any:
    """Convert a scalar of numpy or torch to a number of Python; pass other values through."""
    # An object with `item` but without dimensions is not a scalar.
    scalar = hasattr(value, "item") and not getattr(value, "ndim", 1) and not isinstance(value, int | float)
    return value.item() if scalar else value


def _as_text(prompt: str, value: Any) -> str:
    if isinstance(value, bytes):
        return ": decode it, as item['prompt'].decode()"
    if is_conversation(value):
        return ", and these are messages, where the first item has text: pass chat=rg.options.Chat(), which makes messages of all"
    if isinstance(value, list):
        return ", or a list of messages {'role': …, 'content': …}"
    return f": leave the item out, by {left_out(prompt)}" if value is None else ""


def left_out(field: str) -> str:
    """Suggest the call that leaves out items without a field."""
    return f"rows.filter(lambda row: row['{field}'] is not None) of rows = rg.data.rows(data)"


def _field_fix(field: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return "turn it into text, e.g. json.dumps(value), or name a field in it, e.g. rg.data.parquet(file, answer='extra.answer')"
    return f"write '', or leave the item out: {left_out(field)}" if value is None else "turn it into text, e.g. json.dumps(value)"


# The order in which rows are drawn, as a pure function of the seed: one permutation after another, or a mixture of several.

SPREAD = 7919  # between the seeds of a mixture's parts, so that their permutations differ


class Order(Protocol):
    """The endless order of a data set: a row for each place."""

    def row(self, place: int) -> int:
        """Find the row at a place."""

    def count_passes(self, row: int, first: int, before: int) -> int:
        """Count a row's places from `first`, which is one of them, to `before`, which is not counted."""


class Shuffled:
    """One seeded permutation of all rows after another."""

    def __init__(self, seed: int, size: int) -> None:
        self.seed, self.size = seed, size

    def row(self, place: int) -> int:
        epoch, at = divmod(place, self.size)
        return _permutation(self.seed, epoch, self.size)[at]

    def count_passes(self, row: int, first: int, before: int) -> int:
        if before <= first:
            return 0
        epoch, at = divmod(before, self.size)
        return epoch - first // self.size + int(_permutation(self.seed, epoch, self.size).index(row) < at)


def drawn_parts(seed: int, step: int, count: int, shares: Sequence[float]) -> "array[int]":
    """Draw the part of each of `count` places of a step by the shares of the parts."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step + 2**40)
    return array("H", torch.multinomial(torch.tensor(shares, dtype=torch.float64), count, replacement=True, generator=draw).tolist())


class Mixed:
    """Draws each place of a step from one of several parts by the shares of that step, and each part in its own seeded order.

    `shares(step)` returns the share of each part; `parts` are their rows.
    """

    def __init__(self, seed: int, count: int, parts: Sequence[range], shares: Callable[[int], Sequence[float]]) -> None:
        self.seed, self.count, self.parts, self.shares = seed, count, parts, shares
        self._orders = [Shuffled(seed + SPREAD * number, len(part)) for number, part in enumerate(parts)]
        self._chosen: list[array[int]] = []  # the part of each place, by step
        self._before: list[list[int]] = [[0] * len(parts)]  # how often each part was drawn before a step

    def row(self, place: int) -> int:
        step, at = divmod(place, self.count)
        part = self.choose_parts(step)[at]
        drawn = self._before[step][part] + self._chosen[step][:at].count(part)
        return self.row_of(part, drawn)

    def row_of(self, part: int, drawn: int) -> int:
        """Find the row of a part after `drawn` others of its rows."""
        return self.parts[part][self._orders[part].row(drawn)]

    def choose_parts(self, step: int) -> "array[int]":
        """Choose the part of each place of a step, and of the steps before it."""
        while len(self._chosen) <= step:
            at = len(self._chosen)
            parts = drawn_parts(self.seed, at, self.count, self.shares(at))
            self._chosen.append(parts)
            self._before.append([before + parts.count(part) for part, before in enumerate(self._before[at])])
        return self._chosen[step]

    def part(self, place: int) -> int:
        """Find the part from which a place is drawn."""
        return self.choose_parts(place // self.count)[place % self.count]

    def count_passes(self, row: int, first: int, before: int) -> int:
        return sum(self.row(place) == row for place in range(first, before))


@lru_cache(maxsize=64)  # a batch spans one epoch or two, of each part of a mixture
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    order: list[int] = torch.randperm(size, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)).tolist()
    return order
