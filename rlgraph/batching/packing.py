"""Cut a batch for ranks and passes, and pack the rows of a pass into its input. Pure, and the same on every rank.

`cutting` has the rules by which sequences are dealt.

Responses of one prompt lie behind one copy of it and do not see each other, so the prompt is computed once
(Liu et al. 2025, arXiv:2506.05433, "Prefix Grouper"); the last token of a response predicts nothing and is left out.
On a GPU sequences lie one behind the other without padding: first the prompts that are shared, then their responses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from rlgraph.batching.cutting import Array, best, cut_batches, micro_batches
from rlgraph.columns import Columns

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

    @property
    def shares(self) -> bool:
        """Whether several responses see the prompt from behind it; those of one token are predicted from the prompt alone."""
        return len(self.rows) > 1 and self.tokens > self.prompt


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts at the beginning of a flat row, and behind all of them their responses, those of one prompt together.

    Prompt i begins at `prompts[i]`, and its responses at `prompts[-1] + responses[i]`: [G + 1] each, int32. `tokens` count those of all
    prompts and of all responses, `longest` bound those of a prompt, and of the responses to one.

    By segment of the row, which are prompts, responses and sequences: `keys[key_starts[i]:key_starts[i + 1]]` are the places of all tokens
    that segment i sees, the prompt of a response included; no segment sees more than `most_keys`.
    """

    prompts: torch.Tensor
    responses: torch.Tensor
    tokens: tuple[int, int]
    longest: tuple[int, int]
    keys: torch.Tensor
    key_starts: torch.Tensor
    most_keys: int

    def to(self, device: torch.device) -> "SharedPrompts":
        moved: dict[str, Any] = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in vars(self).items()}
        return SharedPrompts(**moved)


@dataclass(frozen=True)
class InputImages:
    """The images of an input `[S, L]`, in the order of its tokens, as in the column `images`.

    `row` [S, L] is the index in `rows` of the prompt that a token is of, or is written behind. `given` [S, L] is true on prompts, and on
    the images behind them: a token of an image elsewhere was written by the model, and is of none.
    """

    rows: tuple[str, ...]
    given: torch.Tensor
    row: torch.Tensor

    def to(self, device: torch.device) -> "InputImages":
        return replace(self, given=self.given.to(device), row=self.row.to(device))


@dataclass(frozen=True)
class MicroBatch:
    """The input of one pass: `tokens`, `positions` [S, L], `mask` [S, 1, L, L] (None: plain causal), for `rows` of the batch.
    Packed flat they are [1, L]: sequence i begins at `starts[i]` with a prompt of `prompts[i]` tokens, and none is longer than
    `longest`. Where prompts are `shared`, these are segments: a prompt, a response, or a whole sequence that shares none. With a
    `group`, its ranks have shards of the row, and this is the shard of one: see `shard_places`. `ring` is what attention needs to know
    where these pass keys round.

    Entry i of `predicts` says which position of the flattened input gives the distribution of `targets[i]`, and
    `(row[i], column[i])` is where that token lies in a [len(rows), T] column. `repeats` counts the sequences that a position of
    the flattened input is of: several for a shared prompt, and none for padding. `routes` [S x L, layers, k] are the experts of each
    token of the flattened input, -1 where none are known; None without the columns. `images` are those that it shows.
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
    shared: SharedPrompts | None = None
    group: Any = None
    ring: Any = None
    repeats: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    images: InputImages | None = None

    def shard(self, group: Any, rank: int, ranks: int, *, ring: int = 1) -> "MicroBatch":
        """Take the shard of a row for one of the ranks of a group, some of them a `ring`: its tokens, and what they predict."""
        length = self.tokens.shape[1]
        own = shard_places(length, rank, ranks, ring)
        predicts = torch.full((length,), IGNORED).index_copy(0, own, torch.arange(len(own)))[self.predicts]
        here = predicts != IGNORED
        return replace(
            self,
            tokens=self.tokens[:, own],
            positions=self.positions[:, own],
            predicts=predicts[here],
            targets=self.targets[here],
            row=self.row[here],
            column=self.column[here],
            group=group,
        )

    def to(self, device: torch.device) -> "MicroBatch":
        parts = torch.Tensor | SharedPrompts | InputImages
        moved: dict[str, Any] = {name: value.to(device) if isinstance(value, parts) else value for name, value in vars(self).items()}
        return MicroBatch(**moved)


def shard_places(length: int, rank: int, ranks: int, ring: int = 1) -> torch.Tensor:
    """Find the places in a row of a rank's tokens: consecutive ones, or, of a `ring`, those of its part of two pieces of the row.

    Neighbours of `ranks // ring` have consecutive tokens of the pieces of one place of the ring.

    Example:
        >>> [shard_places(8, rank, 2, ring=2).tolist() for rank in range(2)], shard_places(8, 1, 2).tolist()
        ([[0, 1, 6, 7], [2, 3, 4, 5]], [4, 5, 6, 7])
    """
    if ring == 1:
        return torch.arange(length).chunk(ranks)[rank]
    neighbours = ranks // ring
    both = [place for piece in ring_pieces(length, rank // neighbours, ring) for place in piece]
    return torch.tensor(both).chunk(neighbours)[rank % neighbours]


def ring_pieces(length: int, rank: int, ranks: int) -> tuple[range, range]:
    """Give the two pieces of a row at a place of a ring: of causal attention all places then have equal parts, if one sequence fills it."""
    size = length // (2 * ranks)
    first, second = (range(piece * size, (piece + 1) * size) for piece in (rank, 2 * ranks - 1 - rank))
    return first, second


def plan_micro_batches(
    batch: Columns, world: int, micro_batch_tokens: int, *, flat: bool = False, shared: bool = True
) -> list[list[list[PackedSequence]]]:
    """Plan the micro-batches of each rank, the same number for each; an empty one still has to run.

    `micro_batches` deals the sequences, the longest first, and `cut` those of `flat` packing, which has no padding. Without `shared` each
    response has its own copy of its prompt.
    """
    if flat:
        sequences, ranks, passes = _flat_sequences(batch, world, micro_batch_tokens, shared=shared)
    else:
        sequences = sorted(_sequences(batch, shared=shared), key=lambda s: (-s.tokens, s.rows))
        sizes = np.array([[sequence.tokens for sequence in sequences]], dtype=np.int64)
        ranks, passes = (each[0] for each in micro_batches(sizes, world, micro_batch_tokens, padded=True))
    count = int(passes.max(initial=-1)) + 1
    plans: list[list[list[PackedSequence]]] = [[[] for _ in range(count)] for _ in range(world)]
    for sequence, rank, index in zip(sequences, ranks.tolist(), passes.tolist(), strict=True):
        plans[rank][index].append(sequence)
    return plans


def read(batch: Columns) -> list[torch.Tensor]:
    """Give prompts, their mask, responses and theirs, in host memory."""
    columns = [batch[name] for name in ("prompts", "prompt_mask", "responses", "response_mask")]
    return [column.cpu() for column in columns if isinstance(column, torch.Tensor)]


def _repeats(batch: Columns) -> torch.Tensor:
    """Tell whether each row `[B]` has the prompt and the images of the row before, all in the prompt; the first, of the last row."""
    prompts, prompt_mask, *_ = read(batch)
    same = ((prompts == prompts.roll(1, 0)) | ~prompt_mask).all(-1) & (prompt_mask == prompt_mask.roll(1, 0)).all(-1)
    images, behind = list(batch.get("images", ())), batch.get("image_mask")
    if isinstance(behind, torch.Tensor):
        own = behind.cpu().any(-1)
        same &= ~(own | own.roll(1, 0))
    return same & torch.tensor([here == before for here, before in zip(images, [*images[-1:], *images], strict=False)]) if images else same


def _sequences(batch: Columns, *, shared: bool) -> list[PackedSequence]:
    _, prompt_mask, _, response_mask = read(batch)
    prompt_lengths = prompt_mask.sum(-1).tolist()
    lengths = response_lengths(response_mask).tolist()
    sequences: list[PackedSequence] = []
    for row, (prompt, length, repeated) in enumerate(zip(prompt_lengths, lengths, _repeats(batch).tolist(), strict=True)):
        if length == 0:
            continue
        last = sequences[-1] if sequences else None
        if shared and repeated and last is not None and last.rows[-1] == row - 1 and _saves(last, length):
            sequences[-1] = PackedSequence((*last.rows, row), prompt, (*last.responses, length))
        else:
            sequences.append(PackedSequence((row,), prompt, (length,)))
    return sequences


def _flat_sequences(batch: Columns, world: int, limit: int, *, shared: bool) -> tuple[list[PackedSequence], Array, Array]:
    """Cut a batch for flat passes: its sequences, the longest first, and the rank and the pass of each."""
    _, prompt_mask, _, response_mask = read(batch)
    prompts, lengths = prompt_mask.sum(-1).numpy(), response_lengths(response_mask).numpy()
    groups = np.cumsum(~_repeats(batch).numpy())
    cuts = cut_batches(prompts[None], lengths[None], groups, world, limit, shared=shared)
    chosen = cuts[int(best(cuts, world)[0])]
    rows: list[list[int]] = [[] for _ in chosen.tokens[0]]
    for row in np.flatnonzero(lengths).tolist():
        rows[chosen.piece[0, row]].append(row)
    order = [index for index in np.argsort(-chosen.tokens[0], kind="stable").tolist() if rows[index]]
    sequences = [PackedSequence(tuple(rows[i]), int(prompts[rows[i][0]]), tuple(lengths[rows[i]].tolist())) for i in order]
    return sequences, chosen.rank[0, order], chosen.index[0, order]


def _saves(sequence: PackedSequence, length: int) -> bool:
    """Attention costs the square of a sequence: behind a shared prompt long responses would cost more than they save."""
    return (sequence.tokens + length - 1) ** 2 <= sequence.tokens**2 + (sequence.prompt + length - 1) ** 2


def response_lengths(response_mask: torch.Tensor) -> torch.Tensor:
    """Count the tokens up to the last true position of each row, `[B]`, including tool tokens in between."""
    position = torch.arange(1, response_mask.shape[1] + 1, device=response_mask.device)
    return (response_mask * position).amax(-1)


def pack(batch: Columns, sequences: Sequence[PackedSequence]) -> MicroBatch:
    """Pack some sequences of a batch into a padded input. Without sequences it is one token that predicts nothing."""
    prompts, prompt_mask, responses, response_mask = read(batch)
    length = max((s.tokens for s in sequences), default=1)
    shape = (max(len(sequences), 1), length)
    tokens, positions, segments, repeats = torch.zeros(4, *shape, dtype=torch.long).unbind()
    predicts, targets, rows, columns = [], [], [], []
    told = Routes.of(batch)
    routes = None if told is None else told.all_missing(*shape)
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
        repeats[index, :start] = 1
        repeats[index, :prompt] = len(sequence.rows)
    shared = any(len(s.rows) > 1 for s in sequences)
    if shared:  # padding is at no position that no row has: a model may compute otherwise from some position on
        positions[segments == IGNORED] = 0
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
        repeats=repeats.flatten(),
        routes=None if routes is None else routes.flatten(0, 1),
        images=_images(batch, sequences, torch.arange(shape[0])[:, None].masked_fill(segments == IGNORED, IGNORED), positions),
    )


def _images(batch: Columns, sequences: Sequence[PackedSequence], of: torch.Tensor, positions: torch.Tensor) -> InputImages | None:
    """Find the images of an input whose tokens are of the sequences `of` [S, L], at these `positions` [S, L] in them."""
    if "images" not in batch or not sequences:
        return None
    firsts = [sequence.rows[0] for sequence in sequences]
    place = positions - torch.tensor([*(sequence.prompt for sequence in sequences), 0])[of]  # behind the sequences, of none, lies padding
    given, mask = place < 0, batch.get("image_mask")
    if isinstance(mask, torch.Tensor):
        given |= torch.nn.functional.pad(mask.cpu()[firsts], (0, 0, 0, 1))[of, place.clamp(0, mask.shape[1] - 1)]
    return InputImages(tuple(str(batch["images"][row]) for row in firsts), given, of)


@dataclass(frozen=True)
class Routes:
    """The experts that the engine took for the tokens of a batch: the columns `prompt_routes` and `routes`."""

    prompts: torch.Tensor
    responses: torch.Tensor
    mask: torch.Tensor

    @classmethod
    def of(cls, batch: Columns) -> "Routes | None":
        found = [batch.get(name) for name in ("prompt_routes", "routes", "prompt_mask")]
        tensors = [column.cpu() for column in found if isinstance(column, torch.Tensor)]
        return cls(*tensors) if len(tensors) == len(found) else None

    def prompt(self, row: int) -> torch.Tensor:
        return self.prompts[row][self.mask[row].bool()]

    def response(self, row: int, count: int) -> torch.Tensor:
        return self.responses[row, :count]

    def all_missing(self, *shape: int) -> torch.Tensor:
        return self.responses.new_full((*shape, *self.responses.shape[2:]), IGNORED)


def _mask(segments: torch.Tensor) -> torch.Tensor:
    """Build the mask `[S, 1, L, L]`: a token sees the earlier tokens of its own segment, and the prompt, which is segment 0."""
    length = segments.shape[1]
    seen = (segments[:, :, None] == segments[:, None, :]) | (segments[:, None, :] == 0)
    return (seen & torch.ones(length, length, dtype=torch.bool).tril())[:, None]


# Pack sequences one behind another in one row without padding: shared prompts, then their responses, then sequences that share none.


@dataclass
class _FlatRow:
    """A row that grows by segments: the pieces of its tokens, their positions, and the places of what each segment sees."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    repeats: list[torch.Tensor] = field(default_factory=list)
    sees: list[tuple[range, range]] = field(default_factory=list)  # a prompt before it, and itself
    routes: list[torch.Tensor] = field(default_factory=list)
    of: list[torch.Tensor] = field(default_factory=list)

    def add(self, tokens: torch.Tensor, of: int, repeats: int = 1, *, prompt: range = range(0), routes: torch.Tensor | None = None) -> int:
        """Add a segment of a sequence, or of several, behind a prompt that lies elsewhere in the row; give the place of its first token.

        `of` is its place among the sequences, those that share a prompt counted once. An empty tensor adds no segment.
        """
        start, size = self.starts[-1], len(tokens)
        if size:
            self.tokens.append(tokens)
            self.positions.append(torch.arange(len(prompt), len(prompt) + size))
            self.starts.append(start + size)
            self.repeats.append(torch.full((size,), repeats))
            self.of.append(torch.full((size,), of))
            self.sees.append((prompt, range(start, start + size)))
            if routes is not None:
                self.routes.append(routes)
        return start

    @property
    def longest(self) -> int:
        return max(end - start for start, end in pairwise(self.starts))


def pack_flat(batch: Columns, sequences: Sequence[PackedSequence], *, multiple: int = 1) -> MicroBatch:
    """Pack some sequences of a batch into one row. Without sequences it is one token.

    The length of the row is a `multiple`: behind the sequences lies one of tokens that predict nothing.
    """
    prompts, prompt_mask, responses, response_mask = read(batch)
    sequences = sorted(sequences, key=lambda s: not s.shares)
    sharing = [sequence for sequence in sequences if sequence.shares]
    row, told = _FlatRow(), Routes.of(batch)
    places = []
    for of, (first, count) in enumerate((s.rows[0], len(s.rows)) for s in sharing):
        start = row.add(prompts[first][prompt_mask[first]], of, count, routes=None if told is None else told.prompt(first))
        places.append(range(start, row.starts[-1]))
    lasts, firsts = [], []  # of each response: the place of its prompt's last token, and of its own first one
    for of, (sequence, place) in enumerate(zip(sharing, places, strict=True)):
        lasts += [place.stop - 1] * len(sequence.rows)
        for r, n in zip(sequence.rows, sequence.responses, strict=True):
            firsts.append(row.add(responses[r, : n - 1], of, prompt=place, routes=None if told is None else told.response(r, n - 1)))
    for of, sequence in enumerate(sequences[len(sharing) :], len(sharing)):
        first, behind = sequence.rows[0], max(sequence.responses) - 1  # of several responses each has one token
        routes = None if told is None else torch.cat([told.prompt(first), told.response(first, behind)])
        tokens = torch.cat([prompts[first][prompt_mask[first]], responses[first, :behind]])
        start = row.add(tokens, of, len(sequence.rows), routes=routes)
        lasts += [start + sequence.prompt - 1] * len(sequence.rows)
        firsts += [start + sequence.prompt] * len(sequence.rows)
    spare = -row.starts[-1] % multiple if sequences else multiple
    row.add(torch.zeros(spare, dtype=torch.long), IGNORED, 0, routes=None if told is None else told.all_missing(spare))
    rows = [r for s in sequences for r in s.rows]
    sizes = [size for s in sequences for size in s.responses]
    trained = [response_mask[r, :size].nonzero()[:, 0] for r, size in zip(rows, sizes, strict=True)]
    predicts = [torch.where(t == 0, last, first + t - 1) for t, last, first in zip(trained, lasts, firsts, strict=True)]
    none = torch.zeros(0, dtype=torch.long)
    own = [*(s.prompt for s in sequences), *([spare] if spare else [])]
    positions = torch.cat(row.positions)[None]
    return MicroBatch(
        rows=torch.tensor(rows, dtype=torch.long),
        tokens=torch.cat(row.tokens)[None],
        positions=positions,
        mask=None,
        predicts=torch.cat([none, *predicts]),
        targets=torch.cat([none, *(responses[r, t] for r, t in zip(rows, trained, strict=True))]),
        row=torch.cat([none, *(torch.full_like(t, index) for index, t in enumerate(trained))]),
        column=torch.cat([none, *trained]),
        starts=torch.tensor(row.starts, dtype=torch.int32),
        prompts=None if sharing else torch.tensor(own, dtype=torch.int32),
        longest=row.longest,
        shared=_shared_prompts_of(row, sharing) if sharing else None,
        repeats=torch.cat(row.repeats),
        routes=None if told is None else torch.cat(row.routes),
        images=_images(batch, sequences, torch.cat(row.of)[None], positions),
    )


def _shared_prompts_of(row: _FlatRow, sharing: Sequence[PackedSequence]) -> SharedPrompts:
    prompts = [sequence.prompt for sequence in sharing]
    responses = [sequence.tokens - sequence.prompt for sequence in sharing]
    sizes = [len(prompt) + len(own) for prompt, own in row.sees]
    return SharedPrompts(
        prompts=torch.tensor([0, *accumulate(prompts)], dtype=torch.int32),
        responses=torch.tensor([0, *accumulate(responses)], dtype=torch.int32),
        tokens=(sum(prompts), sum(responses)),
        longest=(
            max(prompts),
            max(2, *responses),
        ),  # a kernel that is told of single queries takes them for a decode step, and reorders heads
        keys=torch.cat([torch.arange(part.start, part.stop) for both in row.sees for part in both]),
        key_starts=torch.tensor([0, *accumulate(sizes)], dtype=torch.int32),
        most_keys=max(sizes),
    )
