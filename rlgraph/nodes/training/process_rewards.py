"""Where the steps of a response end, and what a reward model says of each."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlgraph.algorithms.advantages import LABELS
from rlgraph.columns import Column, Columns
from rlgraph.nodes.base import Context, Fired, Stage, tensor_of
from rlgraph.nodes.training.trained_model import ModelScores


@dataclass(frozen=True, eq=False)
class StepRewards(ModelScores):
    """Compute the reward of each step of a response, at the step's last token, and flag these tokens."""

    separator: str
    writes: str

    def start(self, context: Context) -> Stage:
        context.tokenizer(self.model.path)
        return lambda step, columns: self.fire(context, columns)

    def fire(self, context: Context, columns: Columns) -> Fired:
        mask = tensor_of(columns, "response_mask")
        ends = self.ends(context.tokenizer(self.model.path), tensor_of(columns, "responses"), mask)
        logits = context.engine.scores(behind_the_tokens(columns, ends))[:, 1:]
        found = torch.where(ends, logits.sigmoid(), 0.0)
        count = max(int(ends.sum()), 1)
        metrics = {f"{self.writes}/mean": float(found.sum()) / count, f"{self.writes}/steps": float(ends.sum()) / max(len(ends), 1)}
        return {self.writes: found, "step_mask": ends}, metrics

    def ends(self, tokenizer: Any, responses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Flag the last token of each step `[B, T]`. Tokens outside of the mask, as those of tools, belong to no step."""
        found = torch.zeros_like(mask)
        texts: dict[int, str] = {}
        for row, tokens in enumerate(responses):
            places = mask[row].nonzero()[:, 0]
            ids = tokens[places].tolist()
            texts |= {token: tokenizer.decode([token], skip_special_tokens=True) for token in ids if token not in texts}
            found[row, places[step_ends([texts[token] for token in ids], self.separator)]] = True
        return found


def step_ends(pieces: Sequence[str], separator: str) -> list[int]:
    """Find the last token of each step, given the text of each token: a step ends with its separators, the last one with the response.

    >>> step_ends(["a", " b", ".\\n", "\\n", "c", ""], "\\n")
    [3, 5]
    """
    text, token_of = "".join(pieces), [place for place, piece in enumerate(pieces) for _ in piece]
    ends, begin = [], 0
    for found in re.finditer(f"(?:{re.escape(separator)})+", text):
        if text[begin : found.start()].strip():
            ends.append(token_of[found.end() - 1])
        begin = found.end()
    return list(dict.fromkeys([*ends, len(pieces) - 1] if text[begin:].strip() else ends))


def behind_the_tokens(columns: Columns, places: torch.Tensor) -> Mapping[str, Column]:
    """Move a mask one place on, behind the tokens that it flags: a score there is read off these tokens."""
    longer = torch.nn.functional.pad(tensor_of(columns, "responses"), (0, 1))
    return {**columns, "responses": longer, "response_mask": torch.nn.functional.pad(places, (1, 0))}


def behind_the_steps(columns: Columns) -> Mapping[str, Column]:
    """Move the mask of each response behind the tokens whose step has a label, and the labels with it."""
    labels = tensor_of(columns, LABELS)
    return {**behind_the_tokens(columns, labels != 0), LABELS: torch.nn.functional.pad(labels, (1, 0))}
