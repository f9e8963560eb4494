"""Drafted tokens: a decode step reads several guesses of what a sequence writes next, and keeps those that sampling would have chosen.

The guess is the continuation of the last place at which the sequence's last tokens stood before (prompt look-up). Every token is drawn as
it is without guesses, by noise of its seed and position, and guesses are kept as long as they are what was drawn. So tokens and log-probs
are those without guesses, as far as kernels compute a token alike in steps of other sizes; and a guess of probability 0 is never kept.
The chance that a guess is kept is its probability, as in rejection sampling (arXiv:2211.17192).
"""

from dataclasses import dataclass
from os import PathLike

import torch

from rlgraph import settings
from rlgraph.errors import GraphError, show_value
from rlgraph.settings import Count

NO_MODEL = (
    "a draft model is not offered: the runner of vLLM 0.26 that draws noise by seed and position takes EAGLE heads and MTP but no "
    "'draft_model', and its older runner draws noise in an order that depends on what was guessed"
)


@settings.refuse_unknown
@dataclass(frozen=True)
class PromptLookup:
    """Guess tokens ahead by looking up the last tokens of a sequence in its earlier tokens (prompt look-up).

    Raises GraphError for a value out of its range.

    * `tokens`: the guesses per step.
    * `longest`, `shortest`: the lengths of the looked-up suffix, tried from the longest to the shortest.
    * `below`: guesses only while at most this many sequences decode. A decode step with few sequences is limited by memory traffic, so it
      reads more tokens at little cost.

    >>> PromptLookup(tokens=3).schedule(1024)
    [[1, 32, 3], [33, 1024, 0]]
    """

    tokens: Count = 4
    longest: Count = 4
    shortest: Count = 2
    below: Count = 32

    def __post_init__(self) -> None:
        settings.check(self)
        if self.shortest > self.longest:
            raise GraphError(f"PromptLookup(shortest={self.shortest}, longest={self.longest}): the shortest is at most the longest")

    def schedule(self, most: int) -> list[list[int]]:
        """List ranges of decoding sequences, up to `most`, each with its guesses per step: `[first, last, guesses]`."""
        return [[1, min(self.below, most), self.tokens], *([[self.below + 1, most, 0]] if self.below < most else [])]


def check_no_model(drafts: object) -> None:
    """Raise GraphError, which says why, for the folder of a model where a `PromptLookup` belongs."""
    if isinstance(drafts, str | PathLike):
        raise GraphError(
            f"Generator(drafts={show_value(str(drafts))}): {NO_MODEL}; write drafts=rg.options.PromptLookup(…), or leave it out"
        )


def guesses(tokens: torch.Tensor, lengths: torch.Tensor, count: int, *, longest: int, shortest: int) -> torch.Tensor:
    """Guess the next `count` tokens of each row of `tokens` `[rows, width]`, which has `lengths` `[rows]` of them; `[rows, count]`.

    The last tokens, the `longest` number of them that stood in the row before, are looked up at their latest place before. Where the row
    ends, it is taken to go on from that place once more. Where nothing is found, the guess is token 0.

    >>> guesses(torch.tensor([[7, 8, 9, 5, 7, 8, 0, 0]]), torch.tensor([6]), 3, longest=2, shortest=1)
    tensor([[9, 5, 7]])
    >>> guesses(torch.tensor([[7, 8, 7, 8]]), torch.tensor([4]), 3, longest=2, shortest=1)
    tensor([[7, 8, 7]])
    """
    rows, width = tokens.shape
    places = torch.arange(width, device=tokens.device)
    lengths = lengths.long()[:, None]
    best = torch.full((rows, 1), -1, device=tokens.device)  # the place behind the match
    alike = torch.ones(rows, width, dtype=torch.bool, device=tokens.device)  # at a place behind which the last n tokens stand too
    for n in range(1, longest + 1):
        last = tokens.gather(1, (lengths - n).clamp(min=0))
        alike = alike & (tokens.roll(n, 1) == last) & (places >= n) & (lengths > n)
        if n >= shortest:
            found = torch.where(alike & (places < lengths), places, -1).amax(1, keepdim=True)
            best = torch.where(found >= 0, found, best)
    at = best + torch.arange(count, device=tokens.device) % (lengths - best)
    return torch.where(best >= 0, tokens.gather(1, at.clamp(0, width - 1)), 0)


def accept_draft(drawn: torch.Tensor, read: torch.Tensor, begins: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drawn tokens up to the first behind which another one was guessed.

    `drawn` are the tokens drawn at each place that was read, `read` the tokens read there: the last one of a sequence, and its guesses.
    Sequence i has the places `begins[i]` up to `begins[i + 1]`, at most `count + 1`. Returns tokens `[sequences, count + 1]`, and
    how many of them count.

    >>> accept_draft(torch.tensor([5, 6, 9, 4]), torch.tensor([3, 5, 7, 8]), torch.tensor([0, 3, 4]), 2)
    (tensor([[5, 6, 9],
            [4, 4, 4]]), tensor([2, 1], dtype=torch.int32))
    """
    at = begins[:-1, None].long() + torch.arange(count + 1, device=drawn.device)
    after = (at + 1).clamp(max=len(drawn) - 1)
    tokens = drawn[at.clamp(max=len(drawn) - 1)]
    right = (tokens == read[after]) & (at + 1 < begins[1:, None])
    return tokens, 1 + right.int().cumprod(1).sum(1, dtype=torch.int32)
