"""Cut sequences for ranks and passes: by numbers alone, for many batches at once. Trainers run these rules, and predictions count by them.

Flat passes share prompts. The responses of a group lie behind one copy of their prompt, as many as fit a pass; more of them have
another copy. A response that is more than `LONGEST` times as long as its prompt has its own: attention behind a shared prompt costs more
time than such a prompt saves. Where that leaves ranks without work, fewer responses lie behind each copy: see `cut_batches`.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray
LONGEST = 8.0  # prompts: with 28 tokens and 1,024 of a response, an update of 1.7B lasts 6.4 s with shared prompts and 5.7 s without


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


@dataclass(frozen=True)
class FlatCut:
    """Batches cut into pieces, which are a prompt and some of its responses each, and dealt.

    `piece` [batches, rows] is the piece of each response; `rank` and `index` [batches, pieces] are the rank and the pass of each
    piece, and `tokens` [batches, pieces] its size, 0 where a batch has fewer.
    """

    piece: Array
    tokens: Array
    rank: Array
    index: Array

    def of_passes(self, ranks: int) -> Array:
        """Count the tokens `[batches, passes]` of each pass, on the rank that has the most: the others wait for it."""
        batches, passes = len(self.tokens), int(self.index.max(initial=0)) + 1
        place = (np.arange(batches)[:, None] * ranks + self.rank) * passes + self.index
        tokens = np.bincount(place.ravel(), weights=self.tokens.ravel(), minlength=batches * ranks * passes)
        found: Array = tokens.reshape(batches, ranks, passes).max(axis=1)
        return found


def cut_batches(prompts: Array, responses: Array, groups: Array, ranks: int, limit: int, *, shared: bool = True) -> list[FlatCut]:
    """Cut batches into flat passes, in each way that may be the best: `best` says which is.

    `prompts` and `responses` [batches, rows] count tokens, a response of 0 being none; neighbours with the same number in `groups` [rows]
    have the same prompt. Several ranks have different numbers of responses behind a copy of a prompt tried: all, half as many, and so on
    down to each with its own. Without `shared` each response has its own.

        >>> import numpy as np
        >>> prompts, responses, groups = np.full((1, 4), 100), np.full((1, 4), 11), np.zeros(4, dtype=int)
        >>> [each.of_passes(1).tolist() for each in cut_batches(prompts, responses, groups, ranks=1, limit=1000)]
        [[[140.0]]]
        >>> [each.of_passes(4).tolist() for each in cut_batches(prompts, responses, groups, ranks=4, limit=1000)]
        [[[140.0]], [[120.0]], [[110.0]]]
    """
    most = int(np.unique(groups, return_counts=True)[1].max(initial=1)) if shared else 1
    tried = [most]
    while ranks > 1 and tried[-1] > 1:
        tried.append(-(-tried[-1] // 2))
    return [_deal_piece(*_pieces(prompts, responses, groups, limit, most), ranks, limit) for most in tried]


def best(cuts: list[FlatCut], ranks: int) -> Array:
    """Find for each batch `[batches]` the cut whose passes take the fewest tokens, on a tie the first: never more than own prompts do."""
    found: Array = np.stack([each.of_passes(ranks).sum(axis=1) for each in cuts]).argmin(axis=0)
    return found


def _pieces(prompts: Array, responses: Array, groups: Array, limit: int, most: int) -> tuple[Array, Array]:
    """Give the piece of each response `[batches, rows]`, and the tokens `[batches, pieces]` of each piece.

    A piece has as many responses as its prompt has tokens at most. So a pass predicts no more tokens than it has, by which its memory
    is estimated. A response of more than `LONGEST` prompts is a piece of its own.
    """
    batches, rows = responses.shape
    first = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))  # row of each group
    group = np.repeat(np.arange(len(first)), np.diff(first, append=rows))
    member = np.arange(rows) - first[group]
    size = (batches, len(first))
    held, filled = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=prompts.dtype)  # responses and tokens of each group's open piece
    added = np.where(responses > 0, responses - 1, 0)  # the last token of a response predicts nothing
    alone = added > LONGEST * prompts
    opens = np.zeros((batches, rows), dtype=bool)
    for index in range(int(member.max(initial=-1)) + 1):
        at = np.flatnonzero(member == index)  # that row of each group
        of, there, more, own = group[at], responses[:, at] > 0, added[:, at], prompts[:, at]
        full = (held[:, of] >= np.minimum(most, own)) | (filled[:, of] + more > limit)
        opens[:, at] = there & (alone[:, at] | (held[:, of] == 0) | full)
        held[:, of] = np.where(alone[:, at], 0, np.where(opens[:, at], 1, held[:, of] + there))
        filled[:, of] = more + np.where(opens[:, at], own, filled[:, of])
    piece = opens.cumsum(axis=1) - 1
    pieces = max(int(piece.max(initial=0)) + 1, 1)
    place = np.arange(batches)[:, None] * pieces + piece.clip(min=0)
    tokens = np.bincount(place.ravel(), weights=(added + np.where(opens, prompts, 0)).ravel(), minlength=batches * pieces)
    return piece, tokens.reshape(batches, pieces).astype(prompts.dtype)


def _deal_piece(piece: Array, tokens: Array, ranks: int, limit: int) -> FlatCut:
    order = np.argsort(-tokens, axis=1, kind="stable")
    rank, index = np.empty_like(order), np.empty_like(order)
    for of_all, of_sorted in zip((rank, index), micro_batches(np.take_along_axis(tokens, order, axis=1), ranks, limit), strict=True):
        np.put_along_axis(of_all, order, of_sorted, axis=1)
    return FlatCut(piece, tokens, rank, index)
