"""Sums along the response tokens of each row: gaps in the mask are skipped."""

import math
from dataclasses import dataclass

import torch

from rlgraph.algorithms.masks import bits, count, keep_bits

RUN = 32  # tokens of one partial sum on a CPU


@dataclass(frozen=True, eq=False)
class Packing:
    """Moves the tokens under a mask `[B, T]` to the left of their rows, and back. Without gaps nothing has to move.

    >>> packing = Packing.of(torch.tensor([[True, False, True]]))
    >>> packing.left(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 3., 0.]])
    """

    mask: torch.Tensor
    packed: torch.Tensor
    places: torch.Tensor | None

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Packing":
        """Make the packing of a mask `[B, T]`."""
        packed = torch.arange(mask.shape[1], device=mask.device) < count(mask, -1)[:, None]
        if torch.equal(packed, mask):
            return cls.still(mask)
        return cls(mask, packed, (mask.cumsum(-1) - 1).clamp(min=0))

    @classmethod
    def still(cls, mask: torch.Tensor) -> "Packing":
        """Make a packing that leaves every token at its place, gaps or not."""
        return cls(mask, mask, None)

    def left(self, values: torch.Tensor) -> torch.Tensor:
        """Move the values `[B, T]` under the mask to the left; 0 after them."""
        kept = keep_bits(values, bits(self.mask, values))
        if self.places is None:
            return kept
        # Values outside of the mask are 0 and have the place of the token before them: adding them there changes nothing.
        return torch.zeros_like(kept).scatter_add_(1, self.places, kept)

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """Move packed values `[B, T]` back to their places; 0 outside of the mask."""
        return keep_bits(values if self.places is None else values.gather(1, self.places), bits(self.mask, values))


def running_sum_(values: torch.Tensor) -> torch.Tensor:
    """Compute x[0] + ... + x[t] for values `[B, T]`, which it may overwrite."""
    rows, length = values.shape
    if values.device.type != "cpu" or length % RUN:
        return values.cumsum_(-1)
    # One long sum is a chain of additions that wait for each other; short sums run in parallel, in 0.7 of the time on a CPU.
    runs = values.contiguous().view(rows, -1, RUN).cumsum_(-1)
    runs[:, 1:] += runs[:, :-1, -1].cumsum(-1)[:, :, None]
    return runs.view(rows, length)


def discounted_sum(values: torch.Tensor, discount: float) -> torch.Tensor:
    """Compute x[t] + discount x[t+1] + discount^2 x[t+2] + ... for values `[B, T]`."""
    if discount == 1.0:
        return running_sum_(values.flip(-1)).flip(-1)
    rows, length = values.shape
    # Blocks of about sqrt(T) tokens are summed in parallel, then chained: 2 sqrt(T) short steps instead of T.
    block = max(math.isqrt(length), 1)
    blocks = -(-length // block)
    padded = torch.nn.functional.pad(values, (0, blocks * block - length))
    sums = padded.view(rows, blocks, block).permute(2, 1, 0).contiguous()
    for place in range(block - 2, -1, -1):
        sums[place].add_(sums[place + 1], alpha=discount)
    decay = discount ** torch.arange(block, 0, -1, dtype=values.dtype, device=values.device)[:, None]
    for b in range(blocks - 2, -1, -1):
        sums[:, b].addcmul_(decay, sums[0, b + 1])
    return sums.permute(2, 1, 0).reshape(rows, blocks * block)[:, :length].contiguous()
