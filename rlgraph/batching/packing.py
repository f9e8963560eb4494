"""Cut a batch for ranks and passes, and pack the rows of a pass into its input. Pure, and the same on every rank.

Trainers run the rule by which sequences are dealt, and predictions count passes by it.

Responses of one prompt lie behind one copy of it and do not see each other, so the prompt is computed once
(Liu et al. 2025, arXiv:2506.05433, "Prefix Grouper"); the last token of a response predicts nothing and is left out.
On a GPU sequences lie one behind the other without padding, each with its own prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from rlgraph.columns import Columns

Array: TypeAlias = np.ndarray
IGNORED = -1


@dataclass(frozen=True)
class PackedSequence:
    """A prompt of the length `prompt` and, behind it, the responses of `rows`, each without its last token."""

    rows: tuple[int, ...]
    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.responses) - len(self.responses)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass: `tokens`, `positions` [S, L], `mask` [S, 1, L, L] (None: plain causal), for `rows` of the batch.
    Packed flat they are [1, L]: sequence i begins at `starts[i]` with a prompt of `prompts[i]` tokens, and none is longer than
    `longest`. With a `group`, its ranks have consecutive shards of the row, and this is the shard of one.

    Entry i of `predicts` says which position of the flattened input gives the distribution of `targets[i]`, and
    `(row[i], column[i])` is where that token lies in a [len(rows), T] column. `real` is false on padding of the flattened input.
    `routes` [S x L, layers, k] are the experts of each token of the flattened input, -1 where none are known; None without the columns.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None
    predicts: torch.Tensor
    targets: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    starts: torch.Tensor | None = None
    prompts: torch.Tensor | None = None
    longest: int = 0
    group: Any = None
    real: torch.Tensor | None = None
    routes: torch.Tensor | None = None

    def shard(self, group: Any, rank: int, ranks: int) -> "MicroBatch":
        """Take the shard of a row for one of the ranks of a group: its tokens, and what they predict."""
        size = self.tokens.shape[1] // ranks
        own = slice(rank * size, (rank + 1) * size)
        here = (self.predicts >= own.start) & (self.predicts < own.stop)
        return replace(
            self,
            tokens=self.tokens[:, own],
            positions=self.positions[:, own],
            predicts=self.predicts[here] - own.start,
            targets=self.targets[here],
            row=self.row[here],
            column=self.column[here],
            group=group,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        moved: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in vars(self).items()}
        return MicroBatch(**moved)


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


def plan_micro_batches(
    batch: Columns, world: int, micro_batch_tokens: int, *, flat: bool = False, shared: bool = True
) -> list[list[list[PackedSequence]]]:
    """Plan the micro-batches of each rank, the same number for each; an empty one still has to run.

    `micro_batches` deals the sequences, the longest first. `flat` packing has no shared prompts and no padding; without `shared`
    each response has its own copy of its prompt.
    """
    sequences = sorted(_sequences(batch, shared=shared and not flat), key=lambda s: (-s.tokens, s.rows))
    sizes = np.array([[sequence.tokens for sequence in sequences]], dtype=np.int64)
    ranks, passes = micro_batches(sizes, world, micro_batch_tokens, padded=not flat)
    count = int(passes.max(initial=-1)) + 1
    plans: list[list[list[PackedSequence]]] = [[[] for _ in range(count)] for _ in range(world)]
    for sequence, rank, index in zip(sequences, ranks[0].tolist(), passes[0].tolist(), strict=True):
        plans[rank][index].append(sequence)
    return plans


def _read(batch: Columns) -> list[torch.Tensor]:
    columns = [batch[name] for name in ("prompts", "prompt_mask", "responses", "response_mask")]
    return [column.cpu() for column in columns if isinstance(column, torch.Tensor)]


def _sequences(batch: Columns, *, shared: bool) -> list[PackedSequence]:
    prompts, prompt_mask, _, response_mask = _read(batch)
    prompt_lengths = prompt_mask.sum(-1).tolist()
    lengths = response_lengths(response_mask).tolist()
    same = ((prompts == prompts.roll(1, 0)) | ~prompt_mask).all(-1) & (prompt_mask == prompt_mask.roll(1, 0)).all(-1)
    sequences: list[PackedSequence] = []
    for row, (prompt, length, repeated) in enumerate(zip(prompt_lengths, lengths, same.tolist(), strict=True)):
        if length == 0:
            continue
        last = sequences[-1] if sequences else None
        if shared and repeated and last is not None and last.rows[-1] == row - 1 and _saves(last, length):
            sequences[-1] = PackedSequence((*last.rows, row), prompt, (*last.responses, length))
        else:
            sequences.append(PackedSequence((row,), prompt, (length,)))
    return sequences


def _saves(sequence: PackedSequence, length: int) -> bool:
    """Attention costs the square of a sequence: behind a shared prompt long responses would cost more than they save."""
    return (sequence.tokens + length - 1) ** 2 <= sequence.tokens**2 + (sequence.prompt + length - 1) ** 2


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """Count the tokens up to the last true position of each row, `[B]`, including tool tokens in between."""
    position = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    return (response_mask * position).amax(-1)


def pack(batch: Columns, sequences: Sequence[PackedSequence]) -> MicroBatch:
    """Pack some sequences of a batch into a padded input. Without sequences it is one token that predicts nothing."""
    prompts, prompt_mask, responses, response_mask = _read(batch)
    length = max((s.tokens for s in sequences), default=1)
    shape = (max(len(sequences), 1), length)
    tokens, positions, segments = torch.zeros(3, *shape, dtype=torch.long).unbind()
    predicts, targets, rows, columns = [], [], [], []
    told = _Routes.of(batch)
    routes = None if told is None else told.unknown(*shape)
    row_of_batch = 0
    for index, sequence in enumerate(sequences):
        prompt = sequence.prompt
        tokens[index, :prompt] = prompts[sequence.rows[0]][prompt_mask[sequence.rows[0]]]
        positions[index] = torch.arange(length)
        if told is not None and routes is not None:
            routes[index, :prompt] = told.prompt(sequence.rows[0])
        start = prompt
        for segment, (row, size) in enumerate(zip(sequence.rows, sequence.responses, strict=True), 1):
            span = slice(start, start + size - 1)
            tokens[index, span] = responses[row, : size - 1]
            positions[index, span] = torch.arange(prompt, prompt + size - 1)
            segments[index, span] = segment
            if told is not None and routes is not None:
                routes[index, span] = told.response(row, size - 1)
            trained = response_mask[row, :size].nonzero()[:, 0]
            predicts.append(index * length + torch.where(trained == 0, prompt - 1, start + trained - 1))
            targets.append(responses[row, trained])
            rows.append(torch.full_like(trained, row_of_batch))
            columns.append(trained)
            row_of_batch += 1
            start += size - 1
        segments[index, start:] = IGNORED
    shared = any(len(s.rows) > 1 for s in sequences)
    none = torch.zeros(0, dtype=torch.long)
    return MicroBatch(
        rows=torch.tensor([row for s in sequences for row in s.rows], dtype=torch.long),
        tokens=tokens,
        positions=positions,
        mask=_mask(segments) if shared else None,
        predicts=torch.cat([none, *predicts]),
        targets=torch.cat([none, *targets]),
        row=torch.cat([none, *rows]),
        column=torch.cat([none, *columns]),
        real=(segments != IGNORED).flatten() & bool(sequences),
        routes=None if routes is None else routes.flatten(0, 1),
    )


def pack_flat(batch: Columns, sequences: Sequence[PackedSequence], *, multiple: int = 1) -> MicroBatch:
    """Pack some sequences of a batch one behind another in one row. Without sequences it is one token.

    The length of the row is a `multiple`: behind the sequences lies one of tokens that predict nothing.
    """
    prompts, prompt_mask, responses, response_mask = _read(batch)
    pieces, routes = list[torch.Tensor](), list[torch.Tensor]()
    told = _Routes.of(batch)
    positions, predicts, targets, columns, rows = [], [], [], [], []
    starts = [0]
    for index, sequence in enumerate(sequences):
        (row,), (size,) = sequence.rows, sequence.responses
        trained = response_mask[row, :size].nonzero()[:, 0]
        pieces += [prompts[row][prompt_mask[row]], responses[row, : size - 1]]
        routes += [] if told is None else [told.prompt(row), told.response(row, size - 1)]
        positions.append(torch.arange(sequence.tokens))
        predicts.append(starts[-1] + sequence.prompt - 1 + trained)
        targets.append(responses[row, trained])
        rows.append(torch.full_like(trained, index))
        columns.append(trained)
        starts.append(starts[-1] + sequence.tokens)
    none = torch.zeros(0, dtype=torch.long)
    spare = -starts[-1] % multiple if sequences else multiple
    if spare:
        pieces.append(torch.zeros(spare, dtype=torch.long))
        routes += [] if told is None else [told.unknown(spare)]
        positions.append(torch.arange(spare))
        starts.append(starts[-1] + spare)
    return MicroBatch(
        rows=torch.tensor([s.rows[0] for s in sequences], dtype=torch.long),
        tokens=torch.cat(pieces)[None],
        positions=torch.cat(positions)[None],
        mask=None,
        predicts=torch.cat([none, *predicts]),
        targets=torch.cat([none, *targets]),
        row=torch.cat([none, *rows]),
        column=torch.cat([none, *columns]),
        starts=torch.tensor(starts, dtype=torch.int32),
        prompts=torch.tensor([*(s.prompt for s in sequences), *([spare] if spare else [])], dtype=torch.int32),
        longest=max([spare, *(s.tokens for s in sequences)]),
        real=torch.arange(starts[-1]) < sum(s.tokens for s in sequences),
        routes=None if told is None else torch.cat(routes),
    )


@dataclass(frozen=True)
class _Routes:
    """The experts that the engine took for the tokens of a batch: the columns `prompt_routes` and `routes`."""

    prompts: torch.Tensor
    responses: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, batch: Columns) -> "_Routes | None":
        found = [batch.get(name) for name in ("prompt_routes", "routes", "prompt_mask")]
        tensors = [column.cpu() for column in found if isinstance(column, torch.Tensor)]
        return cls(*tensors) if len(tensors) == len(found) else None

    def prompt(self, row: int) -> torch.Tensor:
        return self.prompts[row][self.mask[row].bool()]

    def response(self, row: int, count: int) -> torch.Tensor:
        return self.responses[row, :count]

    def unknown(self, *shape: int) -> torch.Tensor:
        return self.responses.new_full((*shape, *self.responses.shape[2:]), IGNORED)


def _mask(segments: torch.Tensor) -> torch.Tensor:
    """Build the mask `[S, 1, L, L]`: a token sees the earlier tokens of its own segment, and the prompt, which is segment 0."""
    length = segments.shape[1]
    seen = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    return (seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None]
