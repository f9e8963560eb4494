"""How a batch is computed on a GPU: in passes of bounded tokens, each of which takes the host a time of its own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlgraph.planning.lengths import Array

if TYPE_CHECKING:
    from rlgraph.graph import Node


@dataclass(frozen=True)
class Passes:
    """A batch is cut into `parts` of equal rows (mini-batches), each part over the ranks, and what a rank has of it into passes of
    at most `tokens`, the longest sequences first: as the trainer does, which packs them one behind the other."""

    tokens: int
    parts: int = 1

    def of_a_rank(self, lengths: Array, prompt_tokens: float, ranks: int) -> Array:
        """Return the tokens `[steps, passes]` of each pass of a rank, 0 where a step has fewer, for responses `[steps, rows]`."""
        sequences = lengths + max(prompt_tokens - 1, 0.0)  # the last token of a response predicts nothing
        each = [self._cut(_dealt(part, ranks)) for part in np.array_split(sequences, self.parts, axis=1)]
        return np.concatenate(each, axis=1)

    def _cut(self, sequences: Array) -> Array:
        """Return the tokens of the passes of one rank's sequences `[steps, n]`: where a pass would be too large the next begins."""
        steps, count = sequences.shape
        ends = np.cumsum(sequences, axis=1)
        # All steps in one rising row, for one search: each step lies beyond the one before.
        apart = np.arange(steps) * (ends.max() + self.tokens + 1.0)
        row = (ends + apart[:, None]).ravel()
        begun, found = np.zeros(steps, dtype=int), []
        while (begun < count).any():
            before = np.where(begun > 0, np.take_along_axis(ends, np.maximum(begun - 1, 0)[:, None], axis=1)[:, 0], 0.0)
            fitting = np.searchsorted(row, before + self.tokens + apart, side="right") - np.arange(steps) * count
            begun = np.minimum(np.maximum(fitting, begun + 1), count)  # a longer sequence is alone
            found.append(np.take_along_axis(ends, begun[:, None] - 1, axis=1)[:, 0] - before)
        return np.stack(found, axis=1)


def _dealt(sequences: Array, ranks: int) -> Array:
    """Return the first rank's sequences of each step, the longest first, dealt there and back so that ranks have about as much."""
    longest_first = -np.sort(-sequences, axis=1)
    place = np.arange(longest_first.shape[1]) % (2 * ranks)
    own: Array = longest_first[:, (place == 0) | (place == 2 * ranks - 1)] if ranks > 1 else longest_first
    return own


def passes_of(node: "Node", gpus: int) -> Passes | None:
    """Return how a node computes its batch, or None where that is not in passes without padding, as on a CPU."""
    limit = getattr(node.model, "micro_batch_tokens", None)
    on_gpus = gpus > 0 and node.pool is not None and node.pool.cpus is None
    if limit is None or not (on_gpus or getattr(node.model, "recompute", False)):
        return None
    return Passes(limit, getattr(getattr(node.operation, "walks", None), "mini_batches", 1))
