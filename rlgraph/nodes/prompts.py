"""Prompts: iterate over a data set in a seeded order, `count` per step, epoch after epoch; or read a stream, or draw by results."""

import bisect
import itertools
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch

from rlgraph.columns import Column, Columns
from rlgraph.data.images import data_url, images_of
from rlgraph.data.rows import Dataset, Mix, Overlong, Results, Rows, digest, folder_of, place_of, rows
from rlgraph.data.streams import Stream, StreamReader, stream
from rlgraph.engines.hf.chat_template import check_conversations, encoded_prompts
from rlgraph.engines.hf.images import open_images
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Feedback, Node, Operation, Output, declare
from rlgraph.graph.traits import ImageSizes, NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage, tensor_of
from rlgraph.nodes.conversations import Chat, is_conversation, last_question, starts_with_system, text_of
from rlgraph.nodes.items import (
    Mixed,
    Order,
    Shuffled,
    check_data,
    check_first,
    check_item,
    check_names,
    column_of,
    drawn_parts,
    fields_of,
    notify_repeats,
    read,
)
from rlgraph.nodes.trial import PROMPTS
from rlgraph.settings import Name, Natural, Range, check_arguments

# A source of prompts: the common part of sources that draw from a data set or read a stream.


class PromptSource(Operation):
    """Draws `count` prompts per step, and builds their columns."""

    count: int
    prompt_field: str
    fields: tuple[str, ...]  # of an item, besides the prompt
    chat: Chat | None  # of prompts that are conversations
    overlong: Overlong
    images_in: Path | None  # the folder in which relative paths of images begin; None: the first item has no image

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=())

    @property
    @abstractmethod
    def first(self) -> Mapping[str, Any]:
        """The first item, which defines the fields and their kinds."""

    @property
    def first_rows(self) -> list[Mapping[str, Any]]:
        """Two items, for a made-up batch."""
        return [self.first] * PROMPTS

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        """Build the columns of the first rows."""
        return {"prompt_ids": torch.arange(PROMPTS), **self.columns(self.first_rows)}

    def check_row(self, where: str, item: Any) -> None:
        """Raise DataError, which begins with `where`, for an unusable item."""
        check_item(where, item, self.prompt_field, self.first, self.chat, self.images_in)

    @property
    @abstractmethod
    def overlong_prompts(self) -> int:
        """Count the prompts that were dropped or cut off."""

    @property
    def metrics(self) -> dict[str, float]:
        """Count the prompts that are dropped or cut off, if there is a policy for them."""
        return {} if self.overlong.policy == "error" else {"data/overlong_prompts": float(self.overlong_prompts)}

    def columns(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
        """Build `prompt_texts`, `prompt_messages` of conversations, their `prompt_images`, and one column for each further field.

        Each has one row per item. Images are read here.
        """
        first = self.first
        columns: dict[str, Column] = {}
        if self.chat is None:
            columns["prompt_texts"] = [item[self.prompt_field] for item in items]
        else:
            images: list[list[Any]] = [[] for _ in items]
            chats = [self.chat.conversation("an item", item, self.prompt_field, own) for item, own in zip(items, images, strict=True)]
            asked = [item[self.prompt_field] for item in items]
            columns["prompt_texts"] = [
                text if isinstance(text, str) else last_question(chat.messages) for text, chat in zip(asked, chats, strict=True)
            ]
            columns["prompt_messages"] = [chat.to_json() for chat in chats]
            if (folder := self.images_in) is not None:
                columns["prompt_images"] = [
                    json.dumps([data_url("an image", image, folder_of(item, folder)) for image in own])
                    for item, own in zip(items, images, strict=True)
                ]
        return columns | {plural(f): column_of(plural(f), [item[f] for item in items], first[f]) for f in self.fields}

    @property
    def sample(self) -> Sequence[Mapping[str, Any]]:
        """The first items, from which the work with prompts is estimated."""
        return [self.first]

    @property
    def prompt_characters(self) -> float | None:
        """Mean characters of the first prompts, for an estimate of their tokens; None if one of them is not a prompt."""
        try:
            sizes = [sum(len(text) for text in self._texts(item)) for item in self.sample]
        except (DataError, KeyError):
            return None
        return sum(sizes) / len(sizes)

    @cached_property
    def image_sizes(self) -> ImageSizes:
        """The sizes of the images of the first prompts; empty if one of them cannot be read."""
        try:
            rows = self.columns(self.sample).get("prompt_images", ())
        except (DataError, KeyError):
            return ()
        return tuple(tuple(image.size for image in open_images(str(urls))) for urls in rows)

    def _texts(self, item: Mapping[str, Any]) -> list[str]:
        """Collect the texts of a prompt, one per message."""
        if self.chat is None:
            return [item[self.prompt_field]]
        return [text_of(message) for message in self.chat.conversation("", item, self.prompt_field, []).messages]


def plural(field: str) -> str:
    """Name the column of an item's field: `answer` becomes `answers`."""
    return field if field.endswith("s") else field + "s"


# Prompts of a mixture whose shares depend on the results so far, which return over an edge of columns.

REWARDS = "rewards"


def check_results(name: str, data: Any, results: Feedback | None) -> None:
    """Refuse results without a curriculum that reads them, and the reverse."""
    reads = isinstance(data, Mix) and data.by_results
    if reads and results is None:
        raise DataError(
            f"{name}: the curriculum of the mixture reads results: pass results=rg.feedback('results', depth=1, "
            "columns='rewards'), and close it with the rewards"
        )
    if results is not None and not reads:
        raise DataError(f"{name}: results='{results.name}' has no effect without a mixture whose weights are a function of three arguments")
    if results is not None and results.columns != (REWARDS,):
        raise DataError(f"{name}: results='{results.name}' carries {list(results.columns) or 'weights'}; give it columns='rewards'")


class PromptsByResults:
    """Draws the prompts of each step by the rewards of prompts up to `depth` + 1 steps before. Its state is part of each checkpoint.

    Step k knows the results of the steps before max(0, k - depth), whatever the clock says, so that a run depends only on its seed and
    depth. Each data set is drawn in its own seeded order, as in other mixtures.
    """

    def __init__(self, source: "Prompts") -> None:
        assert isinstance(source.data, Mix)
        assert isinstance(source.order, Mixed)
        self.source, self.data, self.order = source, source.data, source.order
        self.names = list(self.data.sources)
        self.results = Results({name: len(rows) for name, rows in self.data.sources.items()})
        self.drawn = [0] * len(self.names)  # rows of each data set, before the next step
        self.waiting: list[tuple[list[int], list[int]]] = []  # parts and rows of the steps whose rewards are still unknown

    def __call__(self, step: int, columns: Columns) -> Fired:
        if REWARDS in columns:
            self._learn(tensor_of(columns, REWARDS))
        shares = self.data.at(self.source.seed, step, self.results)
        parts = list(drawn_parts(self.source.seed, step, self.source.count, shares))
        rows = []
        for part in parts:
            rows.append(self.order.row_of(part, self.drawn[part]))
            self.drawn[part] += 1
        self.waiting.append((parts, rows))
        first = step * self.source.count
        ids = torch.arange(first, first + self.source.count)
        counts = {f"data/mix/{name}": float(parts.count(number)) for number, name in enumerate(self.names)}
        written = {"prompt_ids": ids, **self.source.columns([self.source.checked_row(row) for row in rows])}
        return written, self.source.metrics | counts

    def _learn(self, rewards: torch.Tensor) -> None:
        """Record the rewards of the oldest step without rewards: the responses to each prompt, one prompt after another."""
        parts, rows = self.waiting.pop(0)
        if len(rewards) % len(parts):
            raise DataError(
                f"results: {len(rewards)} rewards came back for {len(parts)} prompts; close the edge with the rewards of the rollout"
            )
        means = rewards.double().view(len(parts), -1).mean(-1).tolist()
        begins = [0, *self.data.ends]
        own = [self.source.index(row) - begins[part] for part, row in zip(parts, rows, strict=True)]
        self.results.learn([self.names[part] for part in parts], own, means)

    def state(self) -> dict[str, Any]:
        return {"drawn": list(self.drawn), "waiting": [list(each) for each in self.waiting], "results": self.results.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn = list(state["drawn"])
        self.waiting = [(list(parts), list(rows)) for parts, rows in state["waiting"]]
        self.results.load_state(state["results"])


# Prompts of a stream: rows are drawn in their order, checked as they arrive, and the place in the stream is part of each checkpoint.


@dataclass(frozen=True)
class Room:
    """The room that a rollout has for a prompt: the context minus its response."""

    node: str
    path: str  # of the model, whose tokenizer counts
    context: int
    response: int

    @property
    def most(self) -> int:
        return self.context - self.response


@dataclass(frozen=True, eq=False)
class StreamedPrompts(PromptSource):
    """Draw the prompts of a step from a stream, each row once."""

    stream: Stream
    count: int
    prompt_field: str
    fields: tuple[str, ...]
    chat: Chat | None
    start_row: Mapping[str, Any]
    overlong: Overlong = field(default_factory=Overlong)
    images_in: Path | None = None
    rooms: list[Room] = field(default_factory=list)  # of the rollouts, which report it at the launch

    @property
    def first(self) -> Mapping[str, Any]:
        return self.start_row

    @property
    def overlong_prompts(self) -> int:
        return 0

    def check(self, node: Node) -> None:
        self.rooms.clear()  # the rollouts that read it report theirs again

    def cursor(self, step: int) -> dict[str, int]:
        """Describe the data order for a checkpoint; the place in the stream is in the node's state."""
        return {"streamed": 1, "next": step * self.count}

    def start(self, context: Context) -> Stage:
        for room in self.rooms:
            context.tokenizer(room.path)  # loaded here, so that the first step does not wait for it
        return Streaming(self, context)


class Streaming:
    """Draws the prompts of each step. Its state is the place in the stream."""

    def __init__(self, source: StreamedPrompts, context: Context) -> None:
        self.source, self.context = source, context
        self.reader = StreamReader(source.stream)
        self.drawn, self.overlong = 0, 0

    def __call__(self, step: int, columns: Any) -> Fired:
        rows = [self._draw() for _ in range(self.source.count)]
        ids = torch.arange(self.drawn - self.source.count, self.drawn)
        counted = self.source.overlong.policy != "error"
        metrics = {"data/rows": float(self.reader.number)} | ({"data/overlong_prompts": float(self.overlong)} if counted else {})
        return {"prompt_ids": ids, **self.source.columns(rows)}, metrics

    def _draw(self) -> Mapping[str, Any]:
        """Draw the next row that is short enough. Raises DataError with the number of an unusable row."""
        began = self.reader.epoch
        while True:
            number, row = next(self.reader)
            if self.reader.epoch > began + 1:
                raise DataError(
                    f"no prompt of epoch {began + 1} of the stream is short enough: raise max_prompt_tokens or max_context, or lower "
                    "max_tokens"
                )
            self.source.check_row(f"item {number} of the data set", row)
            if self._fits(number, row):
                self.drawn += 1
                return row

    def _fits(self, number: int, row: Mapping[str, Any]) -> bool:
        """Whether a prompt is short enough for each rollout, or is cut off there."""
        policy, fits = self.source.overlong.policy, True
        columns = self.source.columns([row])
        for room in self.source.rooms:
            tokenizer, most = self.context.tokenizer(room.path), self.source.overlong.limit(room.most)
            if self.source.chat is None or "prompt_images" in columns:
                [tokens] = encoded_prompts(room.path, tokenizer, columns)
            else:
                [tokens] = check_conversations(room.path, tokenizer, [str(columns["prompt_messages"][0])], first=number)
            if not tokens or (policy == "error" and len(tokens) > most):
                raise DataError(
                    f"row {number} of the stream has a prompt of {len(tokens)} tokens, but node '{room.node}' has room for 1 to {most}: "
                    "lower max_tokens, or drop such prompts, e.g. rg.data.stream(rows, overlong='drop')"
                )
            fits = fits and len(tokens) <= most
        self.overlong += not fits
        return fits or policy == "truncate_left"

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "overlong": self.overlong, "reader": self.reader.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.overlong = state["drawn"], state["overlong"]
        self.reader.load_state(state["reader"])


# Prompts: iterate over a data set in a seeded order, `count` per step, epoch after epoch.

PerStep: TypeAlias = Annotated[int, Range(least=1, rule="the number of prompts per step, a whole number of at least 1")]
RowsPerStep: TypeAlias = Annotated[int, Range(least=1, rule="how many rows of the data a step takes, a whole number of at least 1")]


@dataclass
class Kept:
    """The rows that prompts are drawn from, once a launch has counted their tokens; all rows until then."""

    rows: list[int] | None = None
    overlong: int = 0  # the prompts that are dropped, or cut off
    order: Order | None = None  # the order of these rows, made when first needed

    def keep(self, rows: list[int] | None, overlong: int) -> None:
        """Draw from these rows, in a new order."""
        self.rows, self.overlong, self.order = rows, overlong, None


@dataclass(frozen=True, eq=False)
class Prompts(PromptSource):
    """Draw the prompts of a step. The choice depends only on the seed and the step."""

    data: Dataset
    count: int
    seed: int
    prompt_field: str
    fields: tuple[str, ...]  # of an item, besides the prompt
    chat: Chat | None = None  # of prompts that are conversations
    overlong: Overlong = field(default_factory=Overlong)
    images_in: Path | None = None
    by_results: bool = False  # of a mixture whose shares depend on the rewards of earlier steps
    kept: Kept = field(default_factory=Kept)

    @property
    def first(self) -> Mapping[str, Any]:
        return self.data[0]

    @property
    def first_rows(self) -> list[Mapping[str, Any]]:
        return [self.row(index % self.size) for index in range(PROMPTS)]

    @property
    def sample(self) -> Sequence[Mapping[str, Any]]:
        return [self.data[index] for index in range(min(len(self.data), 8))]

    def start(self, context: Context) -> Stage:
        return PromptsByResults(self) if self.by_results else lambda step, columns: self.fire(step, context.set_aside)

    def fire(self, step: int, set_aside: Sequence[int]) -> Fired:
        """Draw a step, and count the prompts of each data set of a mixture."""
        columns = self.batch(step, set_aside)
        if not isinstance(self.data, Mix) or not isinstance(self.order, Mixed):
            return columns, self.metrics
        ids = columns["prompt_ids"]
        assert isinstance(ids, torch.Tensor)
        parts = [self.order.part(place) for place in ids.tolist()]
        counts = {f"data/mix/{name}": float(parts.count(number)) for number, name in enumerate(self.data.sources)}
        return columns, self.metrics | counts

    @property
    def order(self) -> Order:
        """The order of the rows that prompts are drawn from."""
        if self.kept.order is None:
            self.kept.order = self._mix_order(self.data) if isinstance(self.data, Mix) else Shuffled(self.seed, self.size)
        return self.kept.order

    def _mix_order(self, data: Mix) -> Mixed:
        """Make the order of a mixture. Raises DataError for a data set without a row left."""
        ends = data.ends if self.kept.rows is None else [bisect.bisect_left(self.kept.rows, end) for end in data.ends]
        parts = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        for name, part in zip(data.sources, parts, strict=True):
            if not part:
                raise DataError(f"all prompts of data set '{name}' of the mixture are too long: raise max_prompt_tokens, or leave it out")
        return Mixed(self.seed, self.count, parts, partial(data.at, self.seed))

    @property
    def overlong_prompts(self) -> int:
        return self.kept.overlong

    @property
    def size(self) -> int:
        """The number of rows that prompts are drawn from."""
        return len(self.data) if self.kept.rows is None else len(self.kept.rows)

    def row(self, index: int) -> Mapping[str, Any]:
        """Read one of the rows that prompts are drawn from."""
        found: Mapping[str, Any] = read(self.data, self.index(index))
        return found

    def index(self, index: int) -> int:
        """Find the number, among all rows of the data, of a row that prompts are drawn from."""
        return index if self.kept.rows is None else self.kept.rows[index]

    def batch(self, step: int, set_aside: Sequence[int] = ()) -> dict[str, Column]:
        """Draw the columns of step `step`: `prompt_texts` [N], `prompt_ids` [N] and one column for each further field.

        Conversations add `prompt_messages` [N], and with images `prompt_images` [N].
        """
        positions = self.positions(step, set_aside)
        ids = torch.tensor(positions, dtype=torch.int64)
        return {"prompt_ids": ids, **self.columns([self.item(position) for position in positions])}

    def positions(self, step: int, set_aside: Sequence[int] = ()) -> list[int]:
        """Choose the places of the data order that step `step` draws.

        Skips each place in `set_aside` and every later place of the same item. Steps before it draw the same places as without it.
        """
        start = step * self.count
        since: dict[int, int] = {}  # item -> the first place at which it is passed over
        for position in sorted(set_aside, reverse=True):
            since[self.order.row(position)] = position
        at = start
        while at != (further := start + sum(self.order.count_passes(index, first, at) for index, first in since.items())):
            at = further
        kept = (position for position in itertools.count(at) if position < since.get(self.order.row(position), position + 1))
        return list(itertools.islice(kept, self.count))

    @cached_property
    def digest(self) -> str:
        """A digest of the rows."""
        return digest(self.data)

    def cursor(self, step: int) -> dict[str, Any]:
        """Describe the data order for a checkpoint: the next place after `step` steps, and the rows, size and seed that make the order.

        For a mixture, also the sizes of its data sets and the shares of the next step.
        """
        here = {"items": self.size, "digest": self.digest, "seed": self.seed, "next": step * self.count}
        if not isinstance(self.data, Mix):
            return here
        sizes = {name: len(rows) for name, rows in self.data.sources.items()}
        return {**here, "mix": sizes} | ({} if self.by_results else {"shares": self.data.at(self.seed, step)})

    def item(self, position: int) -> Mapping[str, Any]:
        """Read and check the item at a place of the endless order: one seeded permutation of the data set after another."""
        return self.checked_row(self.order.row(position))

    def checked_row(self, index: int) -> Mapping[str, Any]:
        """Read and check one of the rows that prompts are drawn from."""
        item = self.row(index)
        self.check_row(place_of(self.data, self.index(index)), item)
        return item

    def check(self, node: Node) -> None:
        """Check every item before anything starts. Raises DataError for an unusable item."""
        notify_repeats(node, self.count, len(self.data))
        self.kept.keep(None, 0)  # the rollouts that read it count again
        first, started = self.data[0], 0
        for index in range(len(self.data)):
            item = read(self.data, index)
            check_item(place_of(self.data, index), item, self.prompt_field, first, self.chat, self.images_in)
            started += self.chat is not None and self.chat.system is not None and starts_with_system(item[self.prompt_field])
        if started == len(self.data):
            raise DataError(
                f"node '{node.name}': every item has its own system message, so rg.options.Chat(system=…) has no effect: leave it out"
            )


@check_arguments(DataError)
def prompts(
    data: Dataset | Stream,
    count: PerStep,
    *,
    chat: Chat | None = None,
    seed: Natural = 0,
    results: Feedback | None = None,
    prompt: Name = "prompt",
    name: Name = "prompts",
) -> Output:
    """Declare the source of prompts: `count` items of `data` per step, in an order that depends only on `seed`.

    >>> import rlgraph as rg
    >>> question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    >>> rg.prompts([{"prompt": question, "answer": "2"}], count=1).columns
    ('prompt_texts', 'prompt_messages', 'prompt_ids', 'answers')

    Each item is a mapping with the prompt under `prompt`. Every other field becomes a column with its name in the plural: a reward
    reads `answer` as `answers`. `prompt_texts` holds the last message of the user, `prompt_messages` the conversation as JSON.

    A prompt is text or a list of messages. The model reads text exactly as written; special tokens that it begins with are not added
    again. The chat template of the rollout's model renders messages, with the item's own `tools` and `chat_template_kwargs` if it has
    these fields. Images are parts of messages, e.g. `{"type": "image", "image": "a.png"}`, or in the field `images` or `image`; the
    column `prompt_images` holds them as data URLs if the first item has one.

    * `data`: a list, rows of `rg.data` (files, data sets of the hub, published schemas), or another data set with a length. A stream
      (`rg.data.stream` or an IterableDataset) is drawn in its own order, and its rows are checked as they arrive.
    * `count`: the items per step. A step may span epochs; if `data` has fewer items than `count`, a step draws items more than once.
    * `chat`: `rg.options.Chat(…)` adds a system prompt, tools and arguments of the template; text is then a message of the user.
    * `seed`: the seed of the order. A stream has its own order.
    * `results`: `rg.feedback("results", depth=1, columns="rewards")`, for a mixture with a curriculum of `(seed, step, results)`. Close
      it with the rewards of the responses: step k then knows the rewards of the steps before max(0, k - depth). Use the depth of the
      weights; with a smaller depth, rollouts wait for rewards.
    * `prompt`: the field that holds the prompt.
    * `name`: the node's name in plans and errors.

    The launch checks all items, and the run checks each again when it is drawn. Raises DataError for an empty data set, an item without
    a prompt or without a field that the first item has, fields that are neither text nor numbers, or an image that cannot be read.
    """
    check_results(name, data, results)
    if is_stream(data):
        return _declare_stream(data, count, chat, seed, prompt, name)
    assert not isinstance(data, Stream)
    data = rows(data) if type(data).__module__.partition(".")[0] == "datasets" else data
    first = check_data(name, data, prompt)
    chat, fields, writes, images_in = _columns(name, first, prompt, chat)
    overlong = data.overlong if isinstance(data, Rows | Mix) else Overlong()
    source = Prompts(data, count, seed, prompt, fields, chat, overlong, images_in, by_results=results is not None)
    return Output(declare(name, source, (), reads=(), writes=writes, rows=count, earlier=results))


def is_stream(data: Any) -> bool:
    """Whether data is a stream: `rg.data.stream`, an IterableDataset of datasets, or a function that yields rows."""
    endless = type(data).__module__.partition(".")[0] == "datasets" and not hasattr(data, "__len__")
    return isinstance(data, Stream) or endless or (callable(data) and not hasattr(data, "__getitem__"))


def _declare_stream(data: Any, count: int, chat: Chat | None, seed: int, prompt: str, name: str) -> Output:
    """Declare the source that reads a stream."""
    if seed:
        raise DataError(f"{name}: seed={seed} has no effect on a stream, which has a fixed order; shuffle the stream where you create it")
    rows_of = data if isinstance(data, Stream) else stream(data)
    _, first = next(StreamReader(rows_of))
    check_first(name, first, prompt)
    chat, fields, writes, images_in = _columns(name, first, prompt, chat)
    source = StreamedPrompts(rows_of, count, prompt, fields, chat, first, rows_of.overlong, images_in)
    return Output(declare(name, source, (), reads=(), writes=writes, rows=count))


def _columns(
    name: str, first: Mapping[str, Any], prompt: str, chat: Chat | None
) -> tuple[Chat | None, tuple[str, ...], tuple[str, ...], Path | None]:
    """Choose the chat, fields, columns and folder of images of a source by its first item. Raises DataError for an unusable item."""
    where, images = "item 0 of the data set", list[Any]()
    chat = chat or (Chat() if is_conversation(first[prompt]) or images_of(where, first, prompt) else None)
    fields = fields_of(first, prompt, chat)
    check_names(name, prompt, first, {f: plural(f) if isinstance(f, str) else "" for f in fields})
    if chat is not None:
        chat.conversation(where, first, prompt, images)
    images_in = Path.cwd() if images else None
    check_item(where, first, prompt, first, chat, images_in)
    has = {"prompt_messages": chat is not None, "prompt_images": images_in is not None}
    writes = ("prompt_texts", *(column for column in has if has[column]), "prompt_ids", *(plural(f) for f in fields))
    return chat, fields, writes, images_in
