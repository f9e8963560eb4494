"""Pack sequences one behind another in one row without padding: shared prompts, then their responses, then sequences that share none."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from rlgraph.batching.packing import MicroBatch, PackedSequence, Routes, SharedPrompts, read
from rlgraph.columns import Columns


@dataclass
class _FlatRow:
    """A row that grows by segments: the pieces of its tokens, their positions, and the places of what each segment sees."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    repeats: list[torch.Tensor] = field(default_factory=list)
    sees: list[tuple[range, range]] = field(default_factory=list)  # a prompt before it, and itself
    routes: list[torch.Tensor] = field(default_factory=list)

    def add(self, tokens: torch.Tensor, repeats: int = 1, *, prompt: range = range(0), routes: torch.Tensor | None = None) -> int:
        """Add a segment of so many sequences, behind a prompt that lies elsewhere in the row; give the place of its first token.

        Nothing is no segment.
        """
        start, size = self.starts[-1], len(tokens)
        if size:
            self.tokens.append(tokens)
            self.positions.append(torch.arange(len(prompt), len(prompt) + size))
            self.starts.append(start + size)
            self.repeats.append(torch.full((size,), repeats))
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
    for first, count in ((s.rows[0], len(s.rows)) for s in sharing):
        start = row.add(prompts[first][prompt_mask[first]], count, routes=None if told is None else told.prompt(first))
        places.append(range(start, row.starts[-1]))
    lasts, firsts = [], []  # of each response: the place of its prompt's last token, and of its own first one
    for sequence, place in zip(sharing, places, strict=True):
        lasts += [place.stop - 1] * len(sequence.rows)
        for r, n in zip(sequence.rows, sequence.responses, strict=True):
            firsts.append(row.add(responses[r, : n - 1], prompt=place, routes=None if told is None else told.response(r, n - 1)))
    for sequence in sequences[len(sharing) :]:
        first, behind = sequence.rows[0], max(sequence.responses) - 1  # of several responses each has one token
        routes = None if told is None else torch.cat([told.prompt(first), told.response(first, behind)])
        start = row.add(torch.cat([prompts[first][prompt_mask[first]], responses[first, :behind]]), len(sequence.rows), routes=routes)
        lasts += [start + sequence.prompt - 1] * len(sequence.rows)
        firsts += [start + sequence.prompt] * len(sequence.rows)
    spare = -row.starts[-1] % multiple if sequences else multiple
    row.add(torch.zeros(spare, dtype=torch.long), 0, routes=None if told is None else told.unknown(spare))
    rows = [r for s in sequences for r in s.rows]
    sizes = [size for s in sequences for size in s.responses]
    trained = [response_mask[r, :size].nonzero()[:, 0] for r, size in zip(rows, sizes, strict=True)]
    predicts = [torch.where(t == 0, last, first + t - 1) for t, last, first in zip(trained, lasts, firsts, strict=True)]
    none = torch.zeros(0, dtype=torch.long)
    own = [*(s.prompt for s in sequences), *([spare] if spare else [])]
    return MicroBatch(
        rows=torch.tensor(rows, dtype=torch.long),
        tokens=torch.cat(row.tokens)[None],
        positions=torch.cat(row.positions)[None],
        mask=None,
        predicts=torch.cat([none, *predicts]),
        targets=torch.cat([none, *(responses[r, t] for r, t in zip(rows, trained, strict=True))]),
        row=torch.cat([none, *(torch.full_like(t, index) for index, t in enumerate(trained))]),
        column=torch.cat([none, *trained]),
        starts=torch.tensor(row.starts, dtype=torch.int32),
        prompts=None if sharing else torch.tensor(own, dtype=torch.int32),
        longest=row.longest,
        shared=_shared(row, sharing) if sharing else None,
        repeats=torch.cat(row.repeats),
        routes=None if told is None else torch.cat(row.routes),
    )


def _shared(row: _FlatRow, sharing: Sequence[PackedSequence]) -> SharedPrompts:
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
