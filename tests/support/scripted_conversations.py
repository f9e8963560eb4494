"""Conversations without a model: an engine that writes what a script says, and rollouts on it by the templates of published models."""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import rlgraph as rg
from rlgraph.columns import concat_rows
from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.nodes.base import ChunkedStage, Context
from rlgraph.values.sampling import Running

Script = Callable[[str], str]


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until it holds. Raises AssertionError where it does not."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Scripted(GenerateEngine):
    """Writes, one token a step, what the script says to the text that it is given, and then `close`, the end of a turn."""

    def __init__(self, tokenizer: Any, script: Script, close: str, context: int = 4000) -> None:
        super().__init__()
        self.tokenizer, self.script, self.close_text, self.context = tokenizer, script, close, context
        self.asked: list[Request] = []
        self.ended: list[str] = []  # conversations
        self.open: dict[str, tuple[list[int], int]] = {}
        self.most: dict[str, int] = {}
        self.held = 0

    def submit(self, request: Request) -> None:
        assert 1 <= len(request.prompt) < self.context_length()
        self.asked.append(request)
        self.most[request.id] = request.sampling.max_tokens
        text = self.script(self.tokenizer.decode(request.prompt))
        self.open[request.id] = (self.tokenizer(text + self.close_text)["input_ids"], 0)
        self.held = max(self.held, len(self.open))

    def decode(self) -> dict[str, Response]:
        done = {}
        for name, (tokens, count) in list(self.open.items()):
            self.open[name] = (tokens, count + 1)
            if count + 1 == min(len(tokens), self.most[name]):
                del self.open[name]
                wrote = tokens[: count + 1]
                done[name] = Response(wrote, [-0.5] * len(wrote), finish="stop" if len(wrote) == len(tokens) else "length")
        return done

    def end_conversations(self, conversations: Iterable[str]) -> None:
        self.ended += conversations

    def count_requests(self) -> int:
        return len(self.open)

    def count_tokens(self) -> dict[str, int]:
        return {name: count for name, (_, count) in self.open.items()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        gone = {name: self.open.pop(name) for name in ids if name in self.open}
        return {name: Response(tokens[:count], [-0.5] * count) for name, (tokens, count) in gone.items()}

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None: ...

    def context_length(self) -> int:
        return self.context

    def close(self) -> None: ...


class Rolled:
    """One rollout on a scripted engine: its columns, metrics and requests. `turns` splits a response at the edges of its mask."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        prompts: list[dict[str, Any]],
        *,
        max_tokens: int = 600,
        max_context: int = 3000,
        close: str = "<|im_end|>",
        chat: rg.options.Chat | None = None,
        images: int | None = None,
        **options: Any,
    ) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        sampling = rg.Sampling(max_tokens=max_tokens)
        generator = rg.Generator(str(folder), pool=rg.Pool("rollout"), sampling=sampling, max_context=max_context, images=images)
        source = rg.prompts(prompts, count=len(prompts), chat=chat)
        node = generator.rollout(source, **options).node
        self.engine = Scripted(self.tokenizer, script, close, max_context + 1000)
        self.stage = node.operation.start(Context(engine=self.engine, cache={str(folder): self.tokenizer}))
        batch = source.node.operation.batch(0)  # type: ignore[attr-defined]
        parts = list(self.stage.chunks(0, batch)) if isinstance(self.stage, ChunkedStage) else [self.stage(0, batch)]
        self.columns: dict[str, Any] = concat_rows([columns for columns, _ in parts])
        self.metrics: dict[str, float] = {name: sum(m[name] for _, m in parts) / len(parts) for name in parts[0][1]}
        assert set(self.columns) == set(node.writes)

    def turns(self, row: int = 0) -> list[tuple[bool, str]]:
        tokens, mask = self.columns["responses"][row].tolist(), self.columns["response_mask"][row].tolist()
        pairs = [(bool(own), token) for token, own in zip(tokens, mask, strict=True) if own or token]
        return [(own, self.tokenizer.decode([t for _, t in part])) for own, part in itertools.groupby(pairs, key=lambda pair: pair[0])]

    def written(self, row: int = 0) -> list[str]:
        return [text for own, text in self.turns(row) if own]

    def read(self, row: int = 0) -> list[str]:
        return [text for own, text in self.turns(row) if not own]
