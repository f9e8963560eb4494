"""A vocabulary that is cut between ranks: each has the logits of its words, and log-probs follow from few numbers a token of each rank."""

from dataclasses import dataclass
from typing import Any

import torch

from rlgraph.engines.forward.collectives import stacked


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

    def own(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Number `tokens [N]` among the words of this rank, and tell which of them are here; those of other ranks count as word 0."""
        here = (tokens >= self.first) & (tokens < self.first + self.size)
        return torch.where(here, tokens - self.first, 0), here

    def scores(
        self, normalisers: torch.Tensor, log_probs: torch.Tensor, entropies: torch.Tensor, here: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Combine the normalisers `[2, N]`, log-probs and entropies `[N]` of each rank's words to those of the whole vocabulary.

        A log-prob counts where its token is `here [N]`.
        """
        whole, log_shares, (found, inner, is_here) = self.joined(normalisers, log_probs, entropies, here.float())
        # The entropy of the choice of a rank, and those within its words.
        return whole, (is_here * (found + log_shares)).sum(0), (log_shares.exp() * (inner - log_shares)).sum(0)

    def joined(self, normalisers: torch.Tensor, *of_shards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Gather what ranks know of `[N]` tokens: the normalisers `[2, N]` of each rank's words, and other numbers.

        A normaliser is the largest logit and the logarithm of the sum of `exp(logit - largest)`: added up, large logits would round it.
        Return the whole normalisers, the logarithm of each rank's share `[ranks, N]`, and the other numbers `[ranks, N]` each.
        """
        ranks = stacked(torch.stack([*normalisers, *of_shards]), self.group)
        largest = ranks[:, 0].amax(0)
        sums = ranks[:, 1] + (ranks[:, 0] - largest)
        whole = sums.logsumexp(0)
        return torch.stack([largest, whole]), sums - whole, [*ranks[:, 2:].unbind(1)]
