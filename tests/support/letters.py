"""Prompts and responses of letters for dynamic sampling: a tokenizer, an engine whose responses end in any order, and a reward."""

import random
from dataclasses import dataclass, field

import torch

from rlgraph.columns import Columns
from rlgraph.engines.api import Request, Response

CONSTANT = "c"  # what the prompts begin with whose responses are all the same


class Letters:
    """A tokenizer whose tokens are characters."""

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(map(chr, row)) for row in rows]


@dataclass
class Engine:
    """An engine whose responses end in any order: each says its prompt and its place in the group, or only its prompt."""

    draw: random.Random
    takes: dict[str, int] = field(default_factory=dict)  # decode steps, by what the prompt begins with
    steps: int = 0
    left: dict[str, tuple[int, Response]] = field(default_factory=dict)  # decode steps to go
    begun: list[str] = field(default_factory=list)
    most: int = 0

    def submit(self, request: Request) -> None:
        assert request.id not in self.begun, "a prompt is sampled twice"
        text = "".join(map(chr, request.prompt))
        said = text if text.startswith(CONSTANT) else text + request.id.rpartition(".")[2]
        tokens = [ord(letter) for letter in said]
        self.begun.append(request.id)
        self.left[request.id] = (
            self.takes.get(text[0], self.draw.randint(1, 6)),
            Response(tokens, [-1.0] * len(tokens), [0] * len(tokens)),
        )
        self.most = max(self.most, len(self.left))

    def step(self, prefix: str) -> dict[str, Response]:
        self.steps += 1
        self.left = {name: (steps - 1, response) for name, (steps, response) in self.left.items()}
        ended = {name: response for name, (steps, response) in self.left.items() if steps == 0}
        self.left = {name: entry for name, entry in self.left.items() if name not in ended}
        return ended


def last_letter(responses: list[str]) -> list[float]:
    return [float(ord(response[-1])) for response in responses]


def data(kinds: str) -> list[dict[str, str]]:
    return [{"prompt": f"{kind}{i}", "answer": str(i)} for i, kind in enumerate(kinds)]


def prompts_of(columns: Columns) -> list[int]:
    ids = columns["group_ids"]
    assert isinstance(ids, torch.Tensor)
    return list(dict.fromkeys(ids.tolist()))
