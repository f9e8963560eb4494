"""Ring attention: the ranks of a ring keep the queries of their tokens, and pass keys and values round (Liu et al. 2023, arXiv:2310.01889).

It serves where heads run out: of `context_parallel` ranks as many exchange tokens for heads as the heads divide, and a ring of such groups
shares the row (Fang and Zhao 2024, arXiv:2405.07719, "USP"). Each rank of the ring has pieces `i` and `2 * ranks - 1 - i` of the row, so a
sequence as long as the row costs all ranks the same: by consecutive pieces the last of two ranks would have three times the first's work.
Sequences much shorter than a piece see little beyond it, and cost the same either way.

`schedule` says which rank's queries meet which keys at which hop. The next keys are on their way while these are attended to. In the
backward pass keys and values go round again, and their gradients follow them in float32, one hop behind, until they are home.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from rlgraph.batching.packing import MicroBatch, ring_pieces
from rlgraph.engines.forward import flash
from rlgraph.engines.forward.collectives import passed_on, rank_in, ranks_in

SCORES_AT_ONCE = 1 << 24  # of the plain implementation, which takes some queries at a time


@dataclass(frozen=True)
class Visit:
    """Queries of a rank that see keys of a rank, both by their places there; segment j is `queries[j]` up to the next, and `keys[j]`.

    In a `causal` visit each query sees the keys up to itself, the last query of a segment the last key; else it sees all of them.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool

    @property
    def pairs(self) -> int:
        """Count the pairs of a query and a key that it sees."""
        sizes = [
            (end - start, last - first) for (start, end), (first, last) in zip(pairwise(self.queries), pairwise(self.keys), strict=True)
        ]
        return sum(n * (n + 1) // 2 if self.causal else n * m for n, m in sizes)


@dataclass(frozen=True)
class RingSchedule:
    """The visits of a ring: `visits[rank][hop]`, where the keys of rank `(rank - hop) % ranks` are at `rank`.

    Example:
        >>> print(schedule([0, 5, 8], 2))
        rank 0, hop 0, keys of rank 0: 0-2-4 causal
        rank 0, hop 1, keys of rank 1: 2-4 on 3-4
        rank 1, hop 0, keys of rank 1: 0-2-3-4 causal, 2-3 on 0-2
        rank 1, hop 1, keys of rank 0: 0-2 on 0-2, 2-3 on 0-2
    """

    visits: tuple[tuple[tuple[Visit, ...], ...], ...]

    def pairs(self) -> list[list[int]]:
        """Count the pairs of a query and a key by rank and hop: the work of attention."""
        return [[sum(visit.pairs for visit in visits) for visits in hops] for hops in self.visits]

    def __str__(self) -> str:
        lines = []
        for rank, hops in enumerate(self.visits):
            for hop, visits in enumerate(hops):
                said = ", ".join(_show_visit(visit) for visit in visits) or "nothing"
                lines.append(f"rank {rank}, hop {hop}, keys of rank {(rank - hop) % len(self.visits)}: {said}")
        return "\n".join(lines)


def _show_visit(visit: Visit) -> str:
    queries, keys = ("-".join(map(str, places)) for places in (visit.queries, visit.keys))
    return f"{queries} causal" if visit.causal else f"{queries} on {keys}"


def schedule(starts: Sequence[int], ranks: int, prompts: Sequence[tuple[range, range]] = ()) -> RingSchedule:
    """Plan the visits of a row: segment i is at `starts[i]` up to the next, and of `prompts` each is seen by the tokens of its responses.

    The length of the row is a multiple of `2 * ranks`.
    """
    every = range(ranks)
    return RingSchedule(tuple(tuple(_visits(starts, ranks, prompts, rank, (rank - hop) % ranks) for hop in every) for rank in every))


def _visits(starts: Sequence[int], ranks: int, prompts: Sequence[tuple[range, range]], rank: int, other: int) -> tuple[Visit, ...]:
    own, seen = (ring_pieces(starts[-1], one, ranks) for one in (rank, other))
    found = []
    if rank == other:
        size = len(own[0])
        cuts = [index * size + place - piece.start for index, piece in enumerate(own) for place in (piece.start, *starts) if place in piece]
        places = (*sorted(set(cuts)), 2 * size)
        found.append(Visit(places, places, True))
    for index, piece in enumerate(own):
        for place, keys in enumerate(seen):
            moved = index * len(piece) - piece.start, place * len(keys) - keys.start
            if keys.stop <= piece.start:
                start, end = next(span for span in pairwise(starts) if piece.start in range(*span))
                found += _find_visits([(range(start, end), range(start, end))], piece, keys, moved)
            found += _find_visits([(behind, prompt) for prompt, behind in prompts], piece, keys, moved)
    return tuple(found)


def _find_visits(pairs: Sequence[tuple[range, range]], piece: range, keys: range, moved: tuple[int, int]) -> list[Visit]:
    """Cut queries and the keys that they see to the pieces; those of several pairs lie one behind another."""
    cut = [[range(max(one.start, to.start), min(one.stop, to.stop)) for one, to in zip(pair, (piece, keys), strict=True)] for pair in pairs]
    here = [pair for pair in cut if all(pair)]
    if not here:
        return []
    first, second = (tuple(x + by for x in (here[0][side].start, *(p[side].stop for p in here))) for side, by in enumerate(moved))
    return [Visit(first, second, False)]


@dataclass(frozen=True)
class _Placed:
    """A visit with its starts on the device of the row, counted from its first query and its first key."""

    visit: Visit
    queries: slice
    keys: slice
    of_queries: torch.Tensor
    of_keys: torch.Tensor
    longest: tuple[int, int]

    @classmethod
    def of(cls, visit: Visit, device: torch.device) -> "_Placed":
        sides = visit.queries, visit.keys
        tensors = [torch.tensor(side, dtype=torch.int32, device=device) - side[0] for side in sides]
        # A kernel that is told of single queries takes them for a decode step, and reorders heads.
        longest = [max(2, *(end - start for start, end in pairwise(side))) for side in sides]
        slices = [slice(side[0], side[-1]) for side in sides]
        return cls(visit, slices[0], slices[1], tensors[0], tensors[1], (longest[0], longest[1]))


class RingPass:
    """The ring of one row for one rank: its visits by hop, the `ring` that keys go round, and the `heads` group, None if of one rank."""

    def __init__(self, row: MicroBatch, ring: Any, heads: Any, device: torch.device) -> None:
        assert row.starts is not None
        prompts, shared = [], row.shared
        if shared is not None:
            behind = [shared.tokens[0] + place for place in shared.responses.tolist()]
            spans = zip(pairwise(shared.prompts.tolist()), pairwise(behind), strict=True)
            prompts = [(range(*prompt), range(*responses)) for prompt, responses in spans]
        self.ring, self.heads = ring, heads
        rank, ranks, starts = rank_in(ring), ranks_in(ring), row.starts.tolist()
        planned = [_visits(starts, ranks, prompts, rank, (rank - hop) % ranks) for hop in range(ranks)]
        self.hops = [[_Placed.of(visit, device) for visit in visits] for visits in planned]

    def pass_on(self, block: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to send a block to the next rank and to take that of the rank before; call the result to wait for it."""
        return passed_on(block, self.ring)


def ring_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: RingPass, scaling: float | None) -> torch.Tensor:
    """Attend `[1, l, H, D]` from `query [1, H, l, D]`, the tokens of this rank of the ring, to the tokens of all its ranks."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    width = v.shape[-1]
    v = pad(v, (0, k.shape[-1] - width)) if width < k.shape[-1] else v
    out: torch.Tensor = _untraced(q, k, v, row, q.shape[-1] ** -0.5 if scaling is None else scaling)
    return out[None, ..., :width]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: RingPass, scale: float) -> torch.Tensor:
        out = q.new_zeros(q.shape, dtype=torch.float32)
        sums = q.new_full((q.shape[1], len(q)), -torch.inf, dtype=torch.float32)
        block, state = torch.stack((k, v)), None
        for hop, visits in enumerate(row.hops):
            arriving = row.pass_on(block) if hop + 1 < len(row.hops) else None
            for placed in visits:
                at = placed.queries
                part, of_part, *state = _forward(q[at], block[0, placed.keys], block[1, placed.keys], placed, scale)
                out[at], sums[:, at] = flash.merge_attention(out[at], sums[:, at], part, of_part)
            block = block if arriving is None else arriving()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums, *(state or ()))
        ctx.row, ctx.scale = row, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, sums, *state = ctx.saved_tensors
        row, grad = ctx.row, grads[0].contiguous()
        of_q = torch.zeros_like(q, dtype=torch.float32)
        block, following = torch.stack((k, v)), None
        for hop, visits in enumerate(row.hops):
            arriving = row.pass_on(block) if hop + 1 < len(row.hops) else None
            of_block = torch.zeros_like(block, dtype=torch.float32)
            for placed in visits:
                at = placed.queries
                given = q[at], block[0, placed.keys], block[1, placed.keys], out[at], sums[:, at].contiguous(), *state
                found = _backward(grad[at], given, placed, ctx.scale)
                of_q[at] += found[0]
                of_block[0, placed.keys] += found[1]
                of_block[1, placed.keys] += found[2]
            if following is not None:  # what the ranks before found for this block
                of_block += following()
            following = row.pass_on(of_block)
            block = block if arriving is None else arriving()
        assert following is not None
        of_k, of_v = following()
        return of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), None, None


# A compiled layer does not know the plan of a row, which is another in each pass.
_untraced: Any = torch.compiler.disable(_Ring.apply)


def _by_kernel(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and flash.takes(q.shape[-1])


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, placed: _Placed, scale: float) -> tuple[torch.Tensor, ...]:
    """Give the output `[L, H, D]` and the logarithmic sums `[H, L]` of a visit, and what the kernel's backward pass wants besides."""
    if _by_kernel(q):
        return flash.forward(q, k, v, placed.of_queries, placed.of_keys, *placed.longest, placed.visit.causal, scale)
    out, sums = torch.empty_like(q, dtype=torch.float32), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)
    for at, seen, mask in _spans(placed, q.shape[1]):
        scores, values = _scores(q[at], k[seen], mask, scale), _repeat_heads(v[seen], q)
        sums[:, at] = scores.logsumexp(-1)
        out[at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, sums


def _backward(grad: torch.Tensor, given: tuple[torch.Tensor, ...], placed: _Placed, scale: float) -> tuple[torch.Tensor, ...]:
    """Compute a visit's share of the gradients, `given` queries, keys, values, and output and sums over the keys of all visits."""
    q, k, v, out, sums = given[:5]
    if _by_kernel(q):
        return flash.backward(grad, given, placed.of_queries, placed.of_keys, *placed.longest, placed.visit.causal, scale)
    of_q, of_k, of_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    for at, seen, mask in _spans(placed, q.shape[1]):
        keys, values, own = _repeat_heads(k[seen], q), _repeat_heads(v[seen], q), grad[at].float()
        shares = (_scores(q[at], k[seen], mask, scale) - sums[:, at, None]).exp()
        inner = torch.einsum("qhd,khd->hqk", own, values) - (own * out[at].float()).sum(-1).t()[..., None]
        of_scores = shares * inner * scale
        of_q[at] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_k[seen] += torch.einsum("hqk,qhd->khd", of_scores, q[at].float()).unflatten(1, (-1, repeats)).sum(2)
        of_v[seen] += torch.einsum("hqk,qhd->khd", shares, own).unflatten(1, (-1, repeats)).sum(2)
    return of_q, of_k, of_v


def _spans(placed: _Placed, heads: int) -> list[tuple[slice, slice, torch.Tensor | None]]:
    """Cut a visit into queries of one segment, so many at a time, the keys that they see, and a mask of these; None: all."""
    visit, found = placed.visit, []
    for (start, end), (first, last) in zip(pairwise(visit.queries), pairwise(visit.keys), strict=True):
        at_once = max(1, SCORES_AT_ONCE // (heads * (last - first)))
        for begin in range(start, end, at_once):
            stop, mask = min(end, begin + at_once), None
            seen = last - end + stop if visit.causal else last
            if visit.causal:
                rows, columns = (
                    torch.arange(*span, device=placed.of_keys.device) for span in ((begin - start, stop - start), (seen - first,))
                )
                mask = columns[None] <= rows[:, None] + (last - first) - (end - start)
            found.append(
                (slice(begin - visit.queries[0], stop - visit.queries[0]), slice(first - visit.keys[0], seen - visit.keys[0]), mask)
            )
    return found


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", q.float(), _repeat_heads(k, q)) * scale
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _repeat_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    repeats = q.shape[1] // x.shape[1]
    return x.float().repeat_interleave(repeats, 1) if repeats > 1 else x.float()
