"""Assign each sequence to a rank and to one of its passes. Trainers run this rule, and predictions count passes by it."""

from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray


def micro_batches(tokens: Array, ranks: int, limit: int, *, padded: bool = False) -> tuple[Array, Array]:
    """Deal sequences to ranks, and split the sequences of each rank into passes of at most `limit` tokens.

    `tokens` [batches, n] are the sizes of the sequences of independent batches, the longest first. Returns the rank and the pass of
    each sequence, both [batches, n]. A sequence goes to the rank with the fewest tokens so far, on a tie to the lowest; the rank
    starts another pass where this one would exceed the limit, so a longer sequence has a pass of its own. `padded` passes count each
    sequence as long as their first. A size of 0 stands for no sequence: it is dealt like the others, but changes nothing.

        >>> import numpy as np
        >>> rank, passes = micro_batches(np.array([[50, 30, 20, 20]]), ranks=2, limit=60)
        >>> rank.tolist(), passes.tolist()  # rank 0 has 50 and 20 in two passes, rank 1 has 30 and 20 in one
        ([[0, 1, 1, 0]], [[0, 0, 0, 1]])
    """
    batches, count = tokens.shape
    each = np.arange(batches)
    dealt, filled, longest = np.zeros((3, batches, ranks), dtype=tokens.dtype)  # tokens of a rank, of its pass, of the pass's first
    passes = np.zeros((batches, ranks), dtype=np.int64)
    rank_of, pass_of = np.zeros((2, batches, count), dtype=np.int64)
    for index in range(count):
        size = tokens[:, index]
        rank = dealt.argmin(axis=1)
        at = (each, rank)
        taken = np.where(size > 0, longest[at], 0) if padded else size
        opens = (size > 0) & (filled[at] > 0) & (filled[at] + taken > limit)
        passes[at] += opens
        first = opens | (filled[at] == 0)
        longest[at] = np.where(first, size, longest[at])
        filled[at] = np.where(first, size, filled[at] + taken)
        dealt[at] += size
        rank_of[:, index], pass_of[:, index] = rank, passes[at]
    return rank_of, pass_of
