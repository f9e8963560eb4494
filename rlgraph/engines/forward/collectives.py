"""What ranks that share a pass send each other, with gradients: each has some of its tokens, heads, words, or of a parameter."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# The first are the names from torch 2.13 on, where the old ones warn.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_sum_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Exchange: TypeAlias = Callable[[torch.Tensor, Any], torch.Tensor]


def ranks_in(group: Any) -> int:
    """Count the ranks of a group."""
    return dist.get_world_size(group)


def rank_in(group: Any) -> int:
    """This rank's place in a group."""
    return dist.get_rank(group)


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter that ranks share; a parameter of this rank alone is its own part.

    So are gradients: those of what all ranks hold alike, each for its own tokens, are still to be summed over them.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    found: torch.Tensor = parameter.to_local(grad_placements=parameter.placements)
    return found


def gathered_rows(part: torch.Tensor, group: Any, *, summed: bool = True) -> torch.Tensor:
    """Gather the rows `[1, l, H]` of all ranks, in their order, as `[1, L, H]`.

    What each rank does with them gives a gradient: these are `summed`, or, where every rank does the same, each rank takes its own.
    """
    found: torch.Tensor = _Exchange.apply(part, group, all_rows, sum_of_rows if summed else own_rows)
    return found


def scattered_sum(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows `[1, l, H]` of the sum."""
    found: torch.Tensor = _Exchange.apply(part, group, sum_of_rows, all_rows)
    return found


def whole_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchange tokens for heads: of `[1, H, l, D]`, all heads of this rank's tokens, make `[1, h, L, D]`, some heads of all tokens."""
    found: torch.Tensor = _Exchange.apply(part, group, _to_heads, _to_tokens)
    return found


def whole_tokens(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Exchange heads for tokens: the inverse of `whole_heads`."""
    found: torch.Tensor = _Exchange.apply(part, group, _to_tokens, _to_heads)
    return found


def sent_rows(rows: torch.Tensor, counts: list[int], taken: list[int], group: Any) -> torch.Tensor:
    """Send `counts[i]` of the rows `[n, H]`, in order, to rank i, and give the `taken[i]` rows of each rank i, `[m, H]`, in their order."""
    found: torch.Tensor = _Exchange.apply(rows, group, partial(_exchange_rows, counts, taken), partial(_exchange_rows, taken, counts))
    return found


def passed_on(block: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
    """Begin to send a block to the next rank of a ring and to take one like it from the rank before; call the result to wait."""
    ranks, rank, found = dist.get_world_size(group), dist.get_rank(group), torch.empty_like(block)
    following, before = (dist.get_global_rank(group, (rank + by) % ranks) for by in (1, -1))
    sent = dist.P2POp(dist.isend, block, following, group)  # which keeps the block until it has arrived
    under_way = dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, found, before, group)])

    def receive() -> torch.Tensor:
        for one in under_way:
            one.wait()
        assert sent.tensor is block
        return found

    return receive


def sum_filled(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Add up tensors of which each rank has filled some places, the others being 0; every rank then does the same with the whole."""
    found: torch.Tensor = _Exchange.apply(part, group, _sum, _same)
    return found


def own_rows(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """View this rank's rows `[1, l, ...]` of `[1, L, ...]`."""
    return whole.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)]


def stack_ranks(mine: torch.Tensor, group: Any) -> torch.Tensor:
    """Stack the tensors of all ranks, `[ranks, *shape]`; no gradient passes."""
    ranks = dist.get_world_size(group)
    found = mine.new_empty((ranks * mine.shape[0], *mine.shape[1:]))
    _gather(found, mine.contiguous(), group=group)
    return found.view(ranks, *mine.shape)


def all_rows(part: torch.Tensor, group: Any) -> torch.Tensor:
    """Gather the rows `[1, l, H]` of all ranks, as `[1, L, H]`; no gradient passes."""
    found = part.new_empty((1, dist.get_world_size(group) * part.shape[1], *part.shape[2:]))
    _gather(found[0], part[0].contiguous(), group=group)
    return found


def sum_of_rows(whole: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum the tensors `[1, L, H]` of all ranks, and keep this rank's rows `[1, l, H]`; no gradient passes."""
    rows = whole.shape[1] // dist.get_world_size(group)
    found = whole.new_empty((1, rows, *whole.shape[2:]))  # no view of a tensor of rows: compiled layers tell these apart
    _sum_scatter(found[0], whole[0].contiguous(), group=group)
    return found


class _Exchange(torch.autograd.Function):
    """An exchange between ranks, `send`, whose gradients come `back` by another."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any, send: Exchange, back: Exchange) -> torch.Tensor:
        ctx.group, ctx.back = group, back
        return send(part, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grads[0], ctx.group), None, None, None


def _to_heads(part: torch.Tensor, group: Any) -> torch.Tensor:
    ranks, (_, heads, tokens, width) = dist.get_world_size(group), part.shape
    found = exchange_parts(part.reshape(ranks, heads // ranks, tokens, width), group)
    return found.transpose(0, 1).reshape(1, heads // ranks, ranks * tokens, width)


def _to_tokens(part: torch.Tensor, group: Any) -> torch.Tensor:
    ranks, (_, heads, tokens, width) = dist.get_world_size(group), part.shape
    found = exchange_parts(part.reshape(heads, ranks, tokens // ranks, width).transpose(0, 1), group)
    return found.reshape(1, ranks * heads, tokens // ranks, width)


def exchange_parts(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Send part i to rank i, and take its part for this rank; no gradient passes."""
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


def _exchange_rows(counts: list[int], taken: list[int], rows: torch.Tensor, group: Any) -> torch.Tensor:
    found = rows.new_empty((sum(taken), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), taken, counts, group=group)
    return found


def _sum(part: torch.Tensor, group: Any) -> torch.Tensor:
    whole = part.clone()
    dist.all_reduce(whole, group=group)
    return whole


def _same(part: torch.Tensor, group: Any) -> torch.Tensor:
    return part


# A vocabulary that is cut between ranks: each has the logits of its words, and log-probs follow from few numbers a token of each rank.


@dataclass(frozen=True)
class VocabularyShard:
    """The words of this rank: `size` of them from `first` on. The ranks of `group` have the others; none has more than `most`."""

    group: Any
    first: int
    size: int
    most: int

    @classmethod
    def of(cls, group: Any, rank: int, ranks: int, vocab: int) -> "VocabularyShard":
        """Cut a vocabulary: all ranks have as many words, the last one fewer where they do not divide it.

        >>> VocabularyShard.of(None, 1, 2, vocab=5)
        VocabularyShard(group=None, first=3, size=2, most=3)
        """
        most = -(-vocab // ranks)
        return cls(group, rank * most, min(most, vocab - rank * most), most)

    def local_ids(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Number `tokens [N]` among the words of this rank, and tell which of them are here; those of other ranks count as word 0."""
        here = (tokens >= self.first) & (tokens < self.first + self.size)
        return torch.where(here, tokens - self.first, 0), here

    def scores(
        self, normalisers: torch.Tensor, log_probs: torch.Tensor, entropies: torch.Tensor, here: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Combine the normalisers `[2, N]`, log-probs and entropies `[N]` of each rank's words to those of the whole vocabulary.

        A log-prob counts where its token is `here [N]`.
        """
        whole, log_shares, (found, inner, is_here) = self.gather(normalisers, log_probs, entropies, here.float())
        # The entropy of the choice of a rank, and those within its words.
        return whole, (is_here * (found + log_shares)).sum(0), (log_shares.exp() * (inner - log_shares)).sum(0)

    def gather(self, normalisers: torch.Tensor, *of_shards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Gather what ranks know of `[N]` tokens: the normalisers `[2, N]` of each rank's words, and other numbers.

        A normaliser is the largest logit and the logarithm of the sum of `exp(logit - largest)`: added up, large logits would round it.
        Return the whole normalisers, the logarithm of each rank's share `[ranks, N]`, and the other numbers `[ranks, N]` each.
        """
        ranks = stack_ranks(torch.stack([*normalisers, *of_shards]), self.group)
        largest = ranks[:, 0].amax(0)
        sums = ranks[:, 1] + (ranks[:, 0] - largest)
        whole = sums.logsumexp(0)
        return torch.stack([largest, whole]), sums - whole, [*ranks[:, 2:].unbind(1)]
