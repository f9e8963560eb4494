"""Prompts of a stream: rows are drawn in their order, checked as they come, and where the stream stands is part of each checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlgraph.data.rows import Overlong
from rlgraph.data.streams import Stream, StreamReader
from rlgraph.engines.hf_models.chat_template import check_conversations, encoded_prompts
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Node
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.nodes.conversations import Chat
from rlgraph.nodes.items import check_item
from rlgraph.nodes.prompt_source import PromptSource


@dataclass(frozen=True)
class Room:
    """The room that a rollout has for a prompt: a context less its response."""

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
    rooms: list[Room] = field(default_factory=list)  # of the rollouts, which say so at the launch

    @property
    def first(self) -> Mapping[str, Any]:
        return self.start_row

    @property
    def overlong_prompts(self) -> int:
        return 0

    @property
    def prompt_characters(self) -> float | None:
        """The characters of the first prompt, for an estimate of their tokens."""
        return self.mean_characters([self.start_row])

    def check(self, node: Node) -> None:
        self.rooms.clear()  # the rollouts that read it say theirs anew

    def cursor(self, step: int) -> dict[str, int]:
        """Describe the data order for a checkpoint; the place in the stream is in the node's state."""
        return {"streamed": 1, "next": step * self.count}

    def start(self, context: Context) -> Stage:
        for room in self.rooms:
            context.tokenizer(room.path)  # here, so that the first step does not load it
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
        """Draw the next row that is short enough. Raises DataError with the number of a row that cannot be trained on."""
        began = self.reader.epoch
        while True:
            number, row = next(self.reader)
            if self.reader.epoch > began + 1:
                raise DataError(
                    f"no prompt of epoch {began + 1} of the stream is short enough: raise max_prompt_tokens or max_context, or lower "
                    "max_tokens"
                )
            check_item(f"item {number} of the data set", row, self.source.prompt_field, self.source.first, self.source.chat)
            if self._fits(number, row):
                self.drawn += 1
                return row

    def _fits(self, number: int, row: Mapping[str, Any]) -> bool:
        """Whether a prompt is short enough for each rollout, or is cut off there."""
        policy, fits = self.source.overlong.policy, True
        columns = self.source.columns([row])
        for room in self.source.rooms:
            tokenizer, most = self.context.tokenizer(room.path), self.source.overlong.limit(room.most)
            if self.source.chat is None:
                [tokens] = encoded_prompts(tokenizer, columns)
            else:
                [tokens] = check_conversations(room.path, tokenizer, [str(columns["prompt_messages"][0])], first=number)
            if not tokens or (policy == "error" and len(tokens) > most):
                raise DataError(
                    f"row {number} of the stream has a prompt of {len(tokens)} tokens, but node '{room.node}' has room for 1 to {most}: "
                    "lower max_tokens, or drop such prompts, as rg.data.stream(rows, overlong='drop')"
                )
            fits = fits and len(tokens) <= most
        self.overlong += not fits
        return fits or policy == "truncate_left"

    def state(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "overlong": self.overlong, "reader": self.reader.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.overlong = state["drawn"], state["overlong"]
        self.reader.load_state(state["reader"])
