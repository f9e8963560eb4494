"""Examples, pairs and labelled steps: data to imitate, in the columns of a rollout."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from rlgraph import notices
from rlgraph.algorithms.advantages import LABELS
from rlgraph.columns import Column, pad_rows
from rlgraph.data.images import FIELDS, data_url, images_of
from rlgraph.data.rows import Dataset, Mix, digest, folder_of, place_of, rows
from rlgraph.engines.hf.chat_template import Encoded, Example, Learns, encode_example, prompt_tokens
from rlgraph.engines.hf.images import open_images
from rlgraph.engines.hf.pretrained import check_model
from rlgraph.errors import DataError, show_value
from rlgraph.graph.nodes import Model, Node, Operation, Output, declare
from rlgraph.graph.traits import ImageSizes, NodeTraits, Preferences
from rlgraph.nodes.base import Context, Stage, tensor_of
from rlgraph.nodes.conversations import TEMPLATE_KWARGS, TOOLS, Chat, check_prompt, check_text, checked_messages, is_conversation
from rlgraph.nodes.items import Mixed, Order, Shuffled, check_data, notify_repeats, read
from rlgraph.nodes.prompts import RowsPerStep, is_stream
from rlgraph.settings import Count, Name, Natural, check_arguments

# The content of a row of a data set: one example, or two of which one is better.

SAYS = ("completion", "answer")  # the fields of a row whose text follows its prompt
Row = Mapping[str, Any]


def example_of(where: str, row: Any, chat: Chat, learns: Learns) -> Example:
    """Make the example of a row in one of TRL's formats: `messages`, `prompt` with `completion` or `answer`, or `text`.

    Raises DataError, which begins with `where`, for any other row.
    """
    row = _mapping(where, row)
    says = next((name for name in SAYS if name in row), None)
    if "messages" in row:
        return _conversation(where, row, "messages", row["messages"], (), chat, learns)
    if "prompt" in row and says is not None:
        return _build_example(where, row, row["prompt"], says, chat, learns)
    if isinstance(row.get("text"), str):
        return _text(where, row, chat, Example("", row["text"]))
    raise DataError(
        f"{where} has the fields {show_value(list(row))}; an example has 'messages', 'prompt' and 'completion' (or 'answer'), or 'text'"
    )


def pair_of(where: str, row: Any, chat: Chat, learns: Learns) -> tuple[Example, Example]:
    """Make the chosen and the rejected example of a row with `prompt`, `chosen` and `rejected`, or with two conversations of equal
    beginning.

    Raises DataError, which begins with `where`, for any other row.
    """
    row = _mapping(where, row)
    if not {"chosen", "rejected"} <= set(row):
        raise DataError(f"{where} has the fields {show_value(list(row))}; a pair has 'chosen' and 'rejected', and usually 'prompt'")
    if row["chosen"] == row["rejected"]:
        raise DataError(
            f"{where} has chosen and rejected {show_value(row['chosen'])}; they are equal, so there is nothing to learn: leave the pair out"
        )
    if "prompt" in row:
        first, second = (_build_example(where, row, row["prompt"], name, chat, learns) for name in ("chosen", "rejected"))
        return first, second
    if not is_conversation(row["chosen"]) or not is_conversation(row["rejected"]):
        raise DataError(f"{where} has no 'prompt', and 'chosen' and 'rejected' that are not conversations; add the prompt")
    both = [checked_messages(where, name, row[name]) for name in ("chosen", "rejected")]
    alike = next((n for n, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
    if any(len(messages) == alike for messages in both):
        raise DataError(f"{where}: one of 'chosen' and 'rejected' begins the other, so they cannot be distinguished; leave it out")
    first, second = (
        _conversation(where, row, name, messages[:alike], messages[alike:], chat, learns)
        for name, messages in zip(("chosen", "rejected"), both, strict=True)
    )
    return first, second


def _build_example(where: str, row: Row, prompt: Any, says: str, chat: Chat, learns: Learns) -> Example:
    said = row[says]
    if isinstance(prompt, str) and isinstance(said, str) and chat == Chat() and images_of(where, row, says) is None:
        return _text(where, row, chat, Example(prompt, said))
    completion = [{"role": "assistant", "content": said}] if isinstance(said, str) else said
    return _conversation(where, row, says, prompt, checked_messages(where, says, completion), chat, learns)


def _text(where: str, row: Row, chat: Chat, example: Example) -> Example:
    """Refuse fields that only a conversation has, in a row of text, which no template renders."""
    given = [name for name in (TOOLS, TEMPLATE_KWARGS, *FIELDS) if row.get(name)] or ([] if chat == Chat() else ["chat"])
    if given:
        raise DataError(f"{where} is text, which no chat template renders, and has {given[0]}=; leave that out, or pass messages")
    for name, text in (("its prompt", example.prompt), ("its text to learn", example.completion)):
        check_prompt(where, name, str(text))
    return example


def _conversation(where: str, row: Row, name: str, prompt: Any, completion: Sequence[Any], chat: Chat, learns: Learns) -> Example:
    continued, images = Chat(**{**vars(chat), "continue_final": True}), list[Any]()  # the assistant's text is in it
    made = continued.conversation(where, {**row, name: prompt}, name, images)
    urls = [data_url(f"{where}: image {number}", image, folder_of(row, Path.cwd())) for number, image in enumerate(images)]
    return Example(made.messages, completion, made.tools, made.template_kwargs, learns, json.dumps(urls))


def number_of(where: str, row: Any, name: str) -> float:
    """Read a number of a row, or a boolean as 1 or 0. Raises DataError for anything else."""
    value = _mapping(where, row).get(name)
    if not isinstance(value, int | float):
        raise DataError(f"{where} has {name}={show_value(value)}; it must be a number, or True or False, in each row")
    if not math.isfinite(value):
        raise DataError(f"{where} has {name}={value}; it must be a finite number: leave the row out")
    return float(value)


def _mapping(where: str, row: Any) -> Row:
    if not isinstance(row, Mapping):
        raise DataError(f"{where} is {show_value(row)}; each item is a mapping of fields")
    return row


# Examples and pairs: data to imitate, in the columns of a rollout, so that all readers of responses accept them.

TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
Overlong: TypeAlias = Literal["error", "cut"]
Each: TypeAlias = Literal["example", "pair", "mismatched"]  # the rows of the batch per row of the data set: one or two


@dataclass(frozen=True, eq=False)
class DrawnRows(Operation):
    """`count` rows of a data set per step, in an order that depends only on the seed, tokenised as by `model`."""

    data: Dataset
    count: int
    model: Model
    seed: int

    def cursor(self, step: int) -> dict[str, Any]:
        """Describe the data order for a checkpoint."""
        return {"items": len(self.data), "digest": self.digest, "seed": self.seed, "next": step * self.count}

    @cached_property
    def digest(self) -> str:
        """A digest of the rows."""
        return digest(self.data)


@dataclass(frozen=True, eq=False)
class Examples(DrawnRows):
    """Draw the examples or pairs of a step, and tokenise them as `model` does. The choice depends only on the seed and the step."""

    chat: Chat
    learns: Learns
    each: Each
    numbers: tuple[tuple[str, str], ...]  # a field and its column
    sources: bool  # whether rows have a `data_source`
    images: bool  # whether rows have images
    max_tokens: int | None
    overlong: Overlong

    @property
    def traits(self) -> NodeTraits:
        dims = {} if self.max_tokens is None else {"P": self.max_tokens, "T": self.max_tokens}
        return NodeTraits(given=(), dims=dims, preferences=self.preferences)

    @property
    def preferences(self) -> Preferences | None:
        """The content of the column of that name."""
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

    @cached_property
    def image_sizes(self) -> ImageSizes:
        """The sizes of the images of the first 8 examples."""
        made = [example for index in range(min(len(self.data), 8)) for example in self._of(index, read(self.data, index))]
        return tuple(tuple(image.size for image in open_images(example.images)) for example in made) if self.images else ()

    def check(self, node: Node) -> None:
        """Tokenise every row before anything starts. Raises DataError for a row that cannot be learnt."""
        notify_repeats(node, self.count, len(self.data))
        context = Context()
        for index in range(len(self.data)):
            self._encode_row(context, index)
        tokenizer, ends = context.tokenizer(self.model.path), check_model(self.model.path).eos_token_ids
        text = isinstance(self._of(0, read(self.data, 0))[0].prompt, str)  # the template decides how a turn of messages ends
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
        """Make the columns of step `step`: one row per example, or two per pair, the chosen one first."""
        places = [self.order.row(place) for place in range(step * self.count, (step + 1) * self.count)]
        made = [example for place in places for example in self._encode_row(context, place)]
        if self.each == "mismatched":
            made = [row for number, own in enumerate(made) for row in (own, own.answered_by(made[number - 1]))]
        columns: dict[str, Column] = dict(zip(TOKENS, _pad_rows(made), strict=True))
        found = [read(self.data, place) for place in places for _ in range(len(made) // len(places))]
        if self.each == "pair":
            columns["preferences"] = torch.tensor([1.0, -1.0] * len(places))
        for field, column in self.numbers:
            values = torch.tensor([number_of("an item", row, field) for row in found])
            columns[column] = values.sub(0.5).sign() if column == "preferences" else values
        if self.each == "mismatched":
            columns["preferences"] = tensor_of(columns, "preferences") * torch.tensor([1.0, 0.0] * len(places))
        columns |= {"images": [example.images for example in made]} if self.images else {}
        return columns | ({"data_sources": [str(row["data_source"]) for row in found]} if self.sources else {})

    def _encode_row(self, context: Context, index: int) -> Sequence[Encoded]:
        where, tokenizer = place_of(self.data, index), context.tokenizer(self.model.path)
        row = read(self.data, index)
        for field, _ in self.numbers:
            number_of(where, row, field)
        if self.sources and not isinstance(row.get("data_source"), str):
            raise DataError(f"{where} has no data_source, which the first item has; name it in each")
        made = []
        for example in self._of(index, row):
            if example.images != "[]" and not self.images:
                raise DataError(
                    f"{where} has an image, and the first item has none; put an item with an image first, so that all may have them"
                )
            found = encode_example(self.model.path, tokenizer, example, where, self.max_tokens)
            if found.whole > len(found.tokens) and self.overlong == "error":
                raise DataError(
                    f"{where} has {found.whole} tokens, more than max_tokens={self.max_tokens}: leave it out, or pass overlong='cut', "
                    "which trains on its first tokens"
                )
            made.append(found)
        return made

    def _of(self, index: int, row: Mapping[str, Any]) -> Sequence[Example]:
        where = place_of(self.data, index)
        return pair_of(where, row, self.chat, self.learns) if self.each == "pair" else (example_of(where, row, self.chat, self.learns),)


def _pad_rows(rows: Sequence[Encoded]) -> Iterator[torch.Tensor]:
    yield from pad_rows([row.prompt for row in rows], torch.int64, left=True)
    yield pad_rows([row.response for row in rows], torch.int64, left=False)[0]
    yield pad_rows([row.mask for row in rows], torch.bool, left=False)[0]


def _characters(example: Example) -> int:
    return sum(
        len(part) if isinstance(part, str) else sum(len(str(message.get("content") or "")) for message in part)
        for part in (example.prompt, example.completion)
    )


@check_arguments(DataError)
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
    """Declare a source of examples to imitate: `count` rows of `data` per step, tokenised as `model` reads them.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> sums = rg.examples([{"prompt": "1 + 1 =", "completion": " 2"}], 8, policy)
    >>> sums.columns
    ('prompts', 'prompt_mask', 'responses', 'response_mask')
    >>> step = policy.update(sums, loss=rg.SFTLoss())  # supervised fine-tuning

    A row has `messages`; or a `prompt` with its `completion` (or `answer`), each text or messages; or `text`. The model's own chat template
    renders messages, and the model learns the assistant's turns with the token that ends each; messages of `weight` 0 are not learnt. It
    learns the `completion` of a prompt, or the whole `text`, with the token that ends the text.

    * `data`: rows of `rg.data`, a list, or another data set with a length. A field `data_source` becomes the column `data_sources`.
    * `count`: the rows per step.
    * `model`: the model whose tokenizer and chat template are used.
    * `chat`: `rg.options.Chat(…)` adds a system prompt, tools and arguments of the template, and makes messages of text.
    * `learns`: "all" turns of the assistant, or only the "last".
    * `label`: a field that marks a row as good (True, or a number above 0.5) or bad: the column `preferences`, for `rg.losses.KTO`.
    * `mismatched`: adds a second row to each: its prompt with the response of the previous row of the step, and preference 0.
    * `max_tokens`: the most tokens of a row. None: no limit.
    * `overlong`: for longer rows, "error", or "cut" at their end.
    * `seed`: the seed of the order.
    * `name`: the node's name in plans and errors.

    The trainer packs sequences, as it packs rollouts: see `micro_batch_tokens`. The launch tokenises every row. Raises DataError
    for a row in another format or without a token to learn, and if the chat template leaves out a part of a row, or renders a turn
    differently once other turns follow.
    """
    if mismatched and (label is None or count < 2):
        raise DataError(f"{name}: mismatched=True requires a label and at least 2 rows per step; set label= and count= to 2 or more")
    numbers = () if label is None else ((label, "preferences"),)
    each: Each = "mismatched" if mismatched else "example"
    return _declare_examples(name, data, count, model, seed, chat, learns, each, numbers, max_tokens, overlong)


@check_arguments(DataError)
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
    """Declare a source of preference pairs: `count` rows of `data` per step, each with a `chosen` and a `rejected` answer.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> two = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, policy)
    >>> two.columns, two.node.rows
    (('prompts', 'prompt_mask', 'responses', 'response_mask', 'preferences'), 16)

    `chosen` and `rejected` are text or messages, and follow the `prompt`; or they are conversations with the same beginning. A pair is two
    rows of the batch, the chosen one first: `preferences` is 1 and -1. `margin` names a field with the number by which the chosen one is
    better: the column `margins`. The other parameters and the errors are the same as for `rg.examples`.
    """
    numbers = () if margin is None else ((margin, "margins"),)
    return _declare_examples(name, data, count, model, seed, chat, learns, "pair", numbers, max_tokens, overlong)


def _declare_examples(
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
        raise DataError(f"{name}: overlong={overlong!r} has no effect without max_tokens; pass it, or leave this out")
    data = rows(data) if type(data).__module__.partition(".")[0] == "datasets" else data
    first = check_data(name, data, None)
    operation = Examples(
        data,
        count,
        model,
        seed,
        chat or Chat(),
        learns,
        each,
        numbers,
        isinstance(first.get("data_source"), str),
        False,
        max_tokens,
        overlong,
    )
    operation = replace(operation, images=operation._of(0, first)[0].images != "[]")
    for field, _ in numbers:
        number_of("item 0 of the data set", first, field)
    writes = (*TOKENS, *(("preferences",) if each == "pair" else ()), *(column for _, column in numbers))
    writes = (*writes, *(("images",) if operation.images else ()), *(("data_sources",) if operation.sources else ()))
    return Output(declare(name, operation, (), reads=(), writes=writes, rows=count * (1 if each == "example" else 2)))


# Solutions with a label for each step, to learn process rewards from.

Solution = tuple[str, Sequence[str], Sequence[bool]]  # prompt, steps, and whether each is good


@dataclass(frozen=True, eq=False)
class Stepwise(DrawnRows):
    """Draw the solutions of a step and tokenise them as `model` does. The choice depends only on the seed and the step."""

    separator: str

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=())

    @cached_property
    def order(self) -> Shuffled:
        """The order in which rows are drawn."""
        return Shuffled(self.seed, len(self.data))

    @property
    def prompt_characters(self) -> float | None:
        """Mean characters of the first 8 solutions, for an estimate of their tokens."""
        found = [self.solution(index) for index in range(min(len(self.data), 8))]
        return sum(len(prompt) + sum(map(len, steps)) for prompt, steps, _ in found) / len(found)

    def check(self, node: Node) -> None:
        """Read every row before anything starts. Raises DataError for a row that is not a solution with labels."""
        notify_repeats(node, self.count, len(self.data))
        for index in range(len(self.data)):
            self.solution(index)

    def solution(self, index: int) -> Solution:
        """Read a row. Raises DataError for a row that is not a solution with labels."""
        return solution_of(place_of(self.data, index), read(self.data, index), self.separator)

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.model.path)
        return lambda step, columns: self.batch(context, step)

    def batch(self, context: Context, step: int) -> dict[str, Column]:
        """Make the columns of step `step`: `step_labels` is 1 or -1 at the last token of each step, and 0 elsewhere."""
        tokenizer = context.tokenizer(self.model.path)
        places = [self.order.row(place) for place in range(step * self.count, (step + 1) * self.count)]
        made = [self._encode_steps(tokenizer, self.solution(place)) for place in places]
        prompts, prompt_mask = pad_rows([prompt for prompt, _, _ in made], torch.int64, left=True)
        responses, mask = pad_rows([tokens for _, tokens, _ in made], torch.int64, left=False)
        labels = pad_rows([labels for _, _, labels in made], torch.float32, left=False)[0]
        return dict(zip((*TOKENS, LABELS), (prompts, prompt_mask, responses, mask, labels), strict=True))

    def _encode_steps(self, tokenizer: Any, solution: Solution) -> tuple[list[int], list[int], list[float]]:
        """Tokenise as TRL does: prompt, each step and each separator separately; a label belongs to its step's last token."""
        prompt, steps, good = solution
        separator = tokenizer(self.separator, add_special_tokens=False)["input_ids"]
        tokens: list[int] = []
        labels: list[float] = []
        for step, label in zip(steps, good, strict=True):
            added = [*tokenizer(step, add_special_tokens=False)["input_ids"], *separator]
            tokens += added
            labels += [0.0] * (len(added) - 1) + [1.0 if label else -1.0]
        return prompt_tokens(tokenizer, [prompt])[0], tokens, labels


def solution_of(where: str, row: Any, separator: str) -> Solution:
    """Read a row in TRL's stepwise format. Raises DataError for any other format."""
    if not isinstance(row, Mapping) or not {"prompt", "completions", "labels"} <= set(row):
        fields = show_value(list(row)) if isinstance(row, Mapping) else show_value(row)
        raise DataError(f"{where} has the fields {fields}; a solution has 'prompt', 'completions' (its steps) and 'labels'")
    prompt, steps, good = row["prompt"], row["completions"], row["labels"]
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where} has prompt={show_value(prompt)}; it must be a non-empty text")
    if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise DataError(
            f"{where} has completions={show_value(steps)}; it must be the texts of its steps, at least one, and none of them empty"
        )
    if not isinstance(good, list | tuple) or len(good) != len(steps) or not all(label in (True, False) for label in good):
        raise DataError(f"{where} has labels={show_value(good)}; it must be True or False for each of its {len(steps)} steps")
    for text in (prompt, *steps):
        check_text(where, "a text", text)
    split = next((step for step in steps if separator in step), None)
    if split is not None:
        raise DataError(
            f"{where} has the step {show_value(split)}, within which the separator {separator!r} would end a step of a response: strip it, "
            "split the step, or pass another separator"
        )
    return prompt, steps, good


@check_arguments(DataError)
def stepwise(
    data: Dataset, count: RowsPerStep, model: Model, *, separator: Name = "\n", seed: Natural = 0, name: Name = "stepwise"
) -> Output:
    r"""Declare a source of solutions with a label for each step: `count` rows of `data` per step, to learn process rewards from.

    >>> import rlgraph as rg
    >>> judge = rg.LearnedReward("tiny", pool=rg.Pool("train"))
    >>> rows = [{"prompt": "1 + 2 + 3 =", "completions": ["1 + 2 = 3", "3 + 3 = 7"], "labels": [True, False]}]
    >>> solutions = rg.stages.stepwise(rows, 8, judge, separator="\n")
    >>> solutions.columns
    ('prompts', 'prompt_mask', 'responses', 'response_mask', 'step_labels')
    >>> step = judge.update(solutions, loss=rg.losses.StepwiseLoss())

    Rows are in TRL's stepwise format: `prompt`, the steps as `completions`, and `labels`, True for a good one. `separator` follows each
    step; pass the same one to `judge.step_rewards(rollout, separator=…)`. The launch reads every row. Raises DataError for another format.
    """
    if is_stream(data):
        raise DataError(f"{name}: the data set is a stream, which has no order to draw from; read it into rows: rg.data.rows(list(…))")
    data = rows(data) if type(data).__module__.partition(".")[0] == "datasets" else data
    solution_of("item 0 of the data set", check_data(name, data, None), separator)
    return Output(declare(name, Stepwise(data, count, model, seed, separator), (), reads=(), writes=(*TOKENS, LABELS), rows=count))
