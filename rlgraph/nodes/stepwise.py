"""Solutions with a label for each step, to learn process rewards from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from rlgraph.algorithms.advantages import LABELS
from rlgraph.columns import Column, padded
from rlgraph.data.rows import Dataset, digest, place_of, rows
from rlgraph.engines.hf_models.chat_template import prompt_tokens
from rlgraph.errors import DataError, shown
from rlgraph.graph.nodes import Model, Node, Output, declare
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.nodes.base import Context, Stage
from rlgraph.nodes.conversations import check_text
from rlgraph.nodes.data_order import Shuffled
from rlgraph.nodes.items import check_data, read, say_repeated
from rlgraph.nodes.prompts import RowsPerStep, is_stream
from rlgraph.settings import Name, Natural, checked

TOKENS = ("prompts", "prompt_mask", "responses", "response_mask")
Solution = tuple[str, Sequence[str], Sequence[bool]]  # prompt, steps, and whether each is good


@dataclass(frozen=True, eq=False)
class Stepwise(Operation):
    """Draw the solutions of a step and tokenise them as `model` does. The choice depends on the seed and the step alone."""

    data: Dataset
    count: int
    model: Model
    seed: int
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

    def cursor(self, step: int) -> dict[str, Any]:
        """Describe the data order for a checkpoint."""
        return {"items": len(self.data), "digest": self.digest, "seed": self.seed, "next": step * self.count}

    @cached_property
    def digest(self) -> str:
        """A digest of the rows."""
        return digest(self.data)

    def check(self, node: Node) -> None:
        """Read every row before anything starts. Raises DataError for one that is no solution with labels."""
        say_repeated(node, self.count, len(self.data))
        for index in range(len(self.data)):
            self.solution(index)

    def solution(self, index: int) -> Solution:
        """Read a row. Raises DataError for one that is no solution with labels."""
        return solution_of(place_of(self.data, index), read(self.data, index), self.separator)

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.model.path)
        return lambda step, columns: self.batch(context, step)

    def batch(self, context: Context, step: int) -> dict[str, Column]:
        """Make the columns of step `step`: `step_labels` is 1 or -1 at the last token of each step, and 0 elsewhere."""
        tokenizer = context.tokenizer(self.model.path)
        places = [self.order.row(place) for place in range(step * self.count, (step + 1) * self.count)]
        made = [self._encoded(tokenizer, self.solution(place)) for place in places]
        prompts, prompt_mask = padded([prompt for prompt, _, _ in made], torch.int64, left=True)
        responses, mask = padded([tokens for _, tokens, _ in made], torch.int64, left=False)
        labels = padded([labels for _, _, labels in made], torch.float32, left=False)[0]
        return dict(zip((*TOKENS, LABELS), (prompts, prompt_mask, responses, mask, labels), strict=True))

    def _encoded(self, tokenizer: Any, solution: Solution) -> tuple[list[int], list[int], list[float]]:
        """Tokenise as TRL does: prompt, each step and each separator by themselves; a label is that of its step's last token."""
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
    """Read a row in TRL's stepwise format. Raises DataError for any other."""
    if not isinstance(row, Mapping) or not {"prompt", "completions", "labels"} <= set(row):
        fields = shown(list(row)) if isinstance(row, Mapping) else shown(row)
        raise DataError(f"{where} has the fields {fields}; a solution has 'prompt', 'completions' (its steps) and 'labels'")
    prompt, steps, good = row["prompt"], row["completions"], row["labels"]
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{where} has prompt={shown(prompt)}; it is a text that is not empty")
    if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) and step for step in steps):
        raise DataError(f"{where} has completions={shown(steps)}; they are the texts of its steps, at least one and none of them empty")
    if not isinstance(good, list | tuple) or len(good) != len(steps) or not all(label in (True, False) for label in good):
        raise DataError(f"{where} has labels={shown(good)}; they are True or False for each of its {len(steps)} steps")
    for text in (prompt, *steps):
        check_text(where, "a text", text)
    split = next((step for step in steps if separator in step), None)
    if split is not None:
        raise DataError(
            f"{where} has the step {shown(split)}, within which the separator {separator!r} would end a step of a response: strip it, "
            "split the step, or give another separator"
        )
    return prompt, steps, good


@checked(DataError)
def stepwise(
    data: Dataset, count: RowsPerStep, model: Model, *, separator: Name = "\n", seed: Natural = 0, name: Name = "stepwise"
) -> Output:
    r"""Declare a source of solutions with a label for each step: `count` rows of `data` a step, to learn process rewards from.

    >>> import rlgraph as rg
    >>> judge = rg.LearnedReward("tiny", pool=rg.Pool("train"))
    >>> rows = [{"prompt": "1 + 2 + 3 =", "completions": ["1 + 2 = 3", "3 + 3 = 7"], "labels": [True, False]}]
    >>> solutions = rg.stepwise(rows, 8, judge, separator="\n")
    >>> solutions.columns
    ('prompts', 'prompt_mask', 'responses', 'response_mask', 'step_labels')
    >>> step = judge.update(solutions, loss=rg.algorithms.StepwiseLoss())

    Rows are in TRL's stepwise format: `prompt`, the steps as `completions`, and `labels`, True for a good one. `separator` follows each
    step; give the same one to `judge.step_rewards(rollout, separator=…)`. The launch reads every row. Raises DataError for another form.
    """
    if is_stream(data):
        raise DataError(f"{name}: the data set is a stream, which has no order to draw from; read it into rows: rg.data.rows(list(…))")
    data = rows(data) if type(data).__module__.partition(".")[0] == "datasets" else data
    solution_of("item 0 of the data set", check_data(name, data, None), separator)
    return Output(declare(name, Stepwise(data, count, model, seed, separator), (), reads=(), writes=(*TOKENS, LABELS), rows=count))
