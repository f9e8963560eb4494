"""A source of prompts: what those that draw from a data set and those that read a stream have in common."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rlgraph.columns import Column, Columns
from rlgraph.data.rows import Overlong
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Node
from rlgraph.graph.operation import NodeTraits, Operation
from rlgraph.nodes.conversations import Chat
from rlgraph.nodes.items import column_of
from rlgraph.nodes.trial import PROMPTS


class PromptSource(Operation):
    """Draws `count` prompts a step, and builds their columns."""

    count: int
    prompt_field: str
    fields: tuple[str, ...]  # of an item, beside the prompt
    chat: Chat | None  # of prompts that are conversations
    overlong: Overlong

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(given=())

    @property
    @abstractmethod
    def first(self) -> Mapping[str, Any]:
        """The first item, which says the fields and their kinds."""

    @property
    def first_rows(self) -> list[Mapping[str, Any]]:
        """Two items, for a made-up batch."""
        return [self.first] * PROMPTS

    def trial(self, node: Node, columns: Columns, rows: int) -> Columns:
        """Build the columns of the first rows."""
        return {"prompt_ids": torch.arange(PROMPTS), **self.columns(self.first_rows)}

    @property
    @abstractmethod
    def overlong_prompts(self) -> int:
        """Count the prompts that were dropped or cut off."""

    @property
    def metrics(self) -> dict[str, float]:
        """Count the prompts that are dropped or cut off, if there is a policy for them."""
        return {} if self.overlong.policy == "error" else {"data/overlong_prompts": float(self.overlong_prompts)}

    def columns(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
        """Build `prompt_texts`, `prompt_messages` of conversations, and one column for each further field, one row an item."""
        first = self.first
        columns: dict[str, Column] = {}
        if self.chat is None:
            columns["prompt_texts"] = [item[self.prompt_field] for item in items]
        else:
            columns["prompt_texts"] = [self.chat.text("an item", item, self.prompt_field) for item in items]
            columns["prompt_messages"] = [self.chat.conversation("an item", item, self.prompt_field).to_json() for item in items]
        return columns | {plural(f): column_of(plural(f), [item[f] for item in items], first[f]) for f in self.fields}

    def mean_characters(self, items: Iterable[Mapping[str, Any]]) -> float | None:
        """Compute the mean characters of prompts; None if one of them is no prompt."""
        try:
            sizes = [sum(len(text) for text in self._texts(item)) for item in items]
        except (DataError, KeyError):
            return None
        return sum(sizes) / len(sizes)

    def _texts(self, item: Mapping[str, Any]) -> list[str]:
        """Collect the texts of a prompt, of each of its messages."""
        if self.chat is None:
            return [item[self.prompt_field]]
        return [str(message.get("content") or "") for message in self.chat.conversation("", item, self.prompt_field).messages]


def plural(field: str) -> str:
    """Name the column of an item's field: `answer` becomes `answers`."""
    return field if field.endswith("s") else field + "s"
