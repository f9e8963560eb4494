"""Examples and pairs: data to learn from as it is, in the columns of a rollout, so that what reads responses reads them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch

from rlgraph import notices
from rlgraph.columns import Column, padded
from rlgraph.data.mixtures import Mix
from rlgraph.data.rows import Dataset, digest, place_of, rows
from rlgraph.engines.hf_models.pretrained import check_model
from rlgraph.engines.hf_models.supervised import Encoded, Example, Learns, encoded
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Model, Node, Output, declare
from rlgraph.graph.operation import NodeTraits, Operation, Preferences
from rlgraph.nodes.base import Context, Stage, tensor_of
from rlgraph.nodes.conversations import Chat
from rlgraph.nodes.data_order import Mixed, Order, Shuffled
from rlgraph.nodes.example_rows import example_of, number_of, pair_of
from rlgraph.nodes.items import check_data, read, say_repeated
from rlgraph.nodes.prompts import RowsPerStep, is_stream
from rlgraph.settings import Count, Name, Natural, checked

TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
Overlong: TypeAlias = Literal["error", "cut"]
Each: TypeAlias = Literal["example", "pair", "mismatched"]  # what a row of the data set becomes: one row of the batch, or two


@dataclass(frozen=True, eq=False)
class Examples(Operation):
    """Draw the examples of a step, or its pairs, and tokenise them as `model` does. The choice depends on the seed and the step alone."""

    data: Dataset
    count: int
    model: Model
    seed: int
    chat: Chat
    learns: Learns
    each: Each
    numbers: tuple[tuple[str, str], ...]  # a field and its column
    sources: bool  # whether rows have a `data_source`
    max_tokens: int | None
    overlong: Overlong

    @property
    def traits(self) -> NodeTraits:
        dims = {} if self.max_tokens is None else {"P": self.max_tokens, "T": self.max_tokens}
        return NodeTraits(given=(), dims=dims, preferences=self.preferences)

    @property
    def preferences(self) -> Preferences | None:
        """What the column of that name holds."""
        if self.each != "example":
            return "pairs" if self.each == "pair" else "mismatched"
        return "labels" if self.numbers else None

    @cached_property
    def order(self) -> Order:
        """The order in which rows are drawn."""
        if not isinstance(self.data, Mix):
            return Shuffled(self.seed, len(self.data))
        ends = self.data.ends
        parts = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        return Mixed(self.seed, self.count, parts, partial(self.data.at, self.seed))

    @property
    def prompt_characters(self) -> float | None:
        """Mean characters of the first 8 examples, for an estimate of their tokens."""
        texts = [_characters(example) for index in range(min(len(self.data), 8)) for example in self._of(index, read(self.data, index))]
        return sum(texts) / len(texts)

    def cursor(self, step: int) -> dict[str, Any]:
        """Describe the data order for a checkpoint."""
        return {"items": len(self.data), "digest": self.digest, "seed": self.seed, "next": step * self.count}

    @cached_property
    def digest(self) -> str:
        """A digest of the rows."""
        return digest(self.data)

    def check(self, node: Node) -> None:
        """Tokenise every row before anything starts. Raises DataError for one that cannot be learnt."""
        say_repeated(node, self.count, len(self.data))
        context = Context()
        for index in range(len(self.data)):
            self._encoded(context, index)
        tokenizer, ends = context.tokenizer(self.model.path), check_model(self.model.path).eos_token_ids
        text = isinstance(self._of(0, read(self.data, 0))[0].prompt, str)  # what ends a turn of messages is the template's matter
        if text and ends and tokenizer.eos_token_id not in ends:
            notices.here.say(
                f"node '{node.name}': texts end with {tokenizer.eos_token!r} (token {tokenizer.eos_token_id}), but responses of model "
                f"'{self.model.path}' end at {list(ends)}, so that it does not learn to end them; set eos_token in its "
                "tokenizer_config.json, or eos_token_id in its generation_config.json"
            )

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.model.path)
        return lambda step, columns: self.batch(context, step)

    def batch(self, context: Context, step: int) -> dict[str, Column]:
        """Make the columns of step `step`: one row an example, or two a pair, the chosen one first."""
        places = [self.order.row(place) for place in range(step * self.count, (step + 1) * self.count)]
        made = [example for place in places for example in self._encoded(context, place)]
        if self.each == "mismatched":
            made = [row for number, own in enumerate(made) for row in (own, own.answered_by(made[number - 1]))]
        columns: dict[str, Column] = dict(zip(TOKENS, _padded(made), strict=True))
        found = [read(self.data, place) for place in places for _ in range(len(made) // len(places))]
        if self.each == "pair":
            columns["preferences"] = torch.tensor([1.0, -1.0] * len(places))
        for field, column in self.numbers:
            values = torch.tensor([number_of("an item", row, field) for row in found])
            columns[column] = values.sub(0.5).sign() if column == "preferences" else values
        if self.each == "mismatched":
            columns["preferences"] = tensor_of(columns, "preferences") * torch.tensor([1.0, 0.0] * len(places))
        return columns | ({"data_sources": [str(row["data_source"]) for row in found]} if self.sources else {})

    def _encoded(self, context: Context, index: int) -> Sequence[Encoded]:
        where, tokenizer = place_of(self.data, index), context.tokenizer(self.model.path)
        row = read(self.data, index)
        for field, _ in self.numbers:
            number_of(where, row, field)
        if self.sources and not isinstance(row.get("data_source"), str):
            raise DataError(f"{where} has no data_source, which the first item has; name it in each")
        made = []
        for example in self._of(index, row):
            found = encoded(tokenizer, example, where, self.max_tokens)
            if found.whole > len(found.tokens) and self.overlong == "error":
                raise DataError(
                    f"{where} has {found.whole} tokens, more than max_tokens={self.max_tokens}: leave it out, or give overlong='cut', "
                    "which learns its first ones"
                )
            made.append(found)
        return made

    def _of(self, index: int, row: Mapping[str, Any]) -> Sequence[Example]:
        where = place_of(self.data, index)
        return pair_of(where, row, self.chat, self.learns) if self.each == "pair" else (example_of(where, row, self.chat, self.learns),)


def _padded(rows: Sequence[Encoded]) -> Iterator[torch.Tensor]:
    yield from padded([row.prompt for row in rows], torch.int64, left=True)
    yield padded([row.response for row in rows], torch.int64, left=False)[0]
    yield padded([row.mask for row in rows], torch.bool, left=False)[0]


def _characters(example: Example) -> int:
    return sum(
        len(part) if isinstance(part, str) else sum(len(str(message.get("content") or "")) for message in part)
        for part in (example.prompt, example.completion)
    )


@checked(DataError)
def examples(
    data: Dataset,
    count: RowsPerStep,
    model: Model,
    *,
    chat: Chat | None = None,
    learns: Learns = "all",
    label: Name | None = None,
    mismatched: bool = False,
    max_tokens: Count | None = None,
    overlong: Overlong = "error",
    seed: Natural = 0,
    name: Name = "examples",
) -> Output:
    """Declare a source of examples to imitate: `count` rows of `data` a step, tokenised as `model` reads them.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> sums = rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 8, policy)
    >>> sums.columns
    ('prompts', 'prompt_mask', 'responses', 'response_mask')
    >>> step = policy.update(sums, loss=rg.SFTLoss())  # supervised fine-tuning

    A row has `messages`; or a `prompt` with its `completion` (or `answer`), each text or messages; or `text`. Of messages, which the
    model's own chat template renders, the model learns what the assistant says and the token that ends its turn, in all turns or with
    `learns="last"` in the last one; messages of `weight` 0 are not learnt. Of `prompt` and `completion` it learns the completion, of
    `text` all, and of both the token that ends a text. `chat` adds a system prompt, tools and arguments of the template, and makes
    messages of text.

    `label` names a field that says whether a row is good (True, or a number above 0.5) or bad: the column `preferences`, for `rg.KTO`.
    With `mismatched` a second row follows each, its prompt with the response of the step's row before, and the preference 0.

    A `data_source` becomes `data_sources`. Rows of more than `max_tokens` tokens are an error, or are cut at their end.

    Sequences are packed by the trainer, as those of a rollout: see `micro_batch_tokens`. The launch tokenises every row. Raises DataError
    for a row of another form or without a token to learn, and where its template leaves out something, or renders a turn differently
    once others follow.
    """
    if mismatched and (label is None or count < 2):
        raise DataError(f"{name}: mismatched=True is for rows with a label, and at least 2 a step; give label= and count=2 or more")
    numbers = () if label is None else ((label, "preferences"),)
    each: Each = "mismatched" if mismatched else "example"
    return _declared(name, data, count, model, seed, chat, learns, each, numbers, max_tokens, overlong)


@checked(DataError)
def pairs(
    data: Dataset,
    count: RowsPerStep,
    model: Model,
    *,
    chat: Chat | None = None,
    learns: Learns = "all",
    margin: Name | None = None,
    max_tokens: Count | None = None,
    overlong: Overlong = "error",
    seed: Natural = 0,
    name: Name = "pairs",
) -> Output:
    """Declare a source of preference pairs: `count` rows of `data` a step, each with a `chosen` and a `rejected` answer.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> two = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, policy)
    >>> two.columns, two.node.rows
    (('prompts', 'prompt_mask', 'responses', 'response_mask', 'preferences'), 16)

    `chosen` and `rejected` are text or messages, and follow the `prompt`; or they are conversations that begin alike. A pair is two rows
    of the batch, the chosen one first: `preferences` is 1 and -1. `margin` names a field with the number by which the chosen one is
    better: the column `margins`. The other parameters and the errors are those of `rg.examples`.
    """
    numbers = () if margin is None else ((margin, "margins"),)
    return _declared(name, data, count, model, seed, chat, learns, "pair", numbers, max_tokens, overlong)


def _declared(
    name: str,
    data: Any,
    count: int,
    model: Model,
    seed: int,
    chat: Chat | None,
    learns: Learns,
    each: Each,
    numbers: tuple[tuple[str, str], ...],
    max_tokens: int | None,
    overlong: Overlong,
) -> Output:
    if is_stream(data):
        raise DataError(f"{name}: the data set is a stream, which has no order to draw from; read it into rows: rg.data.rows(list(…))")
    if max_tokens is None and overlong != "error":
        raise DataError(f"{name}: overlong={overlong!r} has no effect without max_tokens; give it, or leave this out")
    data = rows(data) if type(data).__module__.partition(".")[0] == "datasets" else data
    first = check_data(name, data, None)
    operation = Examples(
        data, count, model, seed, chat or Chat(), learns, each, numbers, isinstance(first.get("data_source"), str), max_tokens, overlong
    )
    operation._of(0, first)
    for field, _ in numbers:
        number_of("item 0 of the data set", first, field)
    writes = (*TOKENS, *(("preferences",) if each == "pair" else ()), *(column for _, column in numbers))
    writes = (*writes, "data_sources") if operation.sources else writes
    return Output(declare(name, operation, (), reads=(), writes=writes, rows=count * (1 if each == "example" else 2)))
