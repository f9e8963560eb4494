"""Reductions over the tokens that a mask selects, along the rows and within groups, and of the losses of tokens to one number.

Values outside of the mask are ignored, even NaN.

The loss is the same however the batch is split over micro-batches and ranks: each micro-batch divides its own sum by totals of the whole
mini-batch, so that the losses of all micro-batches add up to that of the mini-batch. Where gradients are averaged over D ranks instead of
summed, the trainer multiplies by D.
"""

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import torch

from rlgraph.algorithms.inputs import check_choice, check_mask, check_tokens, check_whole, tensor
from rlgraph.columns import Columns
from rlgraph.errors import DataError, GraphError, show_value
from rlgraph.settings import OneOf

EPSILON = 1e-8
CACHED = 1 << 18  # numbers that stay in a CPU's cache
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Replace the values outside of the mask by 0; neither the result nor its gradient depends on them."""
    return torch.where(mask, values, 0.0)


def bits(mask: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Turn a bool mask into one for `keep_bits`: integers as wide as the numbers, with all bits set or none."""
    return (-mask.view(torch.int8)).to(BITS[numbers.itemsize])


def keep_bits(values: torch.Tensor, bits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Do what `keep` does, without a gradient: on a CPU this takes a quarter of the time if the values are cached."""
    kept = torch.bitwise_and(values.view(bits.dtype), bits, out=None if out is None else out.view(bits.dtype))
    return kept.view(values.dtype)


def blocks(mask: torch.Tensor) -> list[slice]:
    """Split the rows of `[B, T]` into slices to work on one after the other, so that intermediate results stay in a CPU's cache."""
    rows = max(CACHED // mask.shape[1], 1) if mask.device.type == "cpu" else max(len(mask), 1)
    return [slice(start, start + rows) for start in range(0, len(mask), rows)]


def spread(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Copy the value of each row `[B]` to the tokens under its mask `[B, T]`; 0 elsewhere."""
    # A CPU converts bytes to numbers eight at a time, and bools one by one: with the product this takes half the time of `keep`.
    return mask.view(torch.int8).to(rows.dtype).mul_(rows[:, None])


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum the values under the mask: all of them, or along `dim`.

    >>> masked_sum(torch.tensor([[1.0, 2.0, float("nan")]]), torch.tensor([[True, True, False]]))
    tensor(3.)
    """
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Average the values under the mask: all of them, or along `dim`. The mean of an empty mask is 0.

    >>> masked_mean(torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]]), dim=-1)
    tensor([1.5000, 3.0000])
    """
    return masked_sum(values, mask, dim) / lengths(mask, values.dtype, dim)


def count(mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Count the flags that are set, in all or along `dim`, as int32."""
    if mask.ndim == 2 and mask.numel() and mask.shape[1] % 8 == 0 and mask.is_contiguous() and mask.storage_offset() % 8 == 0:
        if dim is None:
            return count(mask, -1).sum(dtype=torch.int32)
        if dim == -1:
            # Each int64 addition adds eight flags, each in its own byte, which 255 additions cannot overflow: a quarter of the CPU's time.
            words = mask.view(torch.int64)
            sums = torch.stack([words[:, start : start + 255].sum(-1) for start in range(0, words.shape[1], 255)], -1)
            return sums.view(torch.uint8).sum(-1, dtype=torch.int32)
    # On a CPU, summing bools in int32 takes a sixteenth of the time of int64, the default.
    return mask.sum(dtype=torch.int32) if dim is None else mask.sum(dim, dtype=torch.int32)


def ends(mask: torch.Tensor) -> torch.Tensor:
    """Find the end `[B]` of each row: the index of its last token plus 1, gaps included; 0 for an empty row."""
    return (mask.view(torch.int8) * torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)).amax(-1)


def lengths(mask: torch.Tensor, dtype: torch.dtype, dim: int | None = -1) -> torch.Tensor:
    """Count the tokens under the mask along `dim`, plus 1e-8, so that 0 divided by the count of an empty row is 0."""
    return count(mask, dim).to(dtype) + EPSILON


def whiten(values: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """Shift and scale the values to mean 0 and variance 1 over the mask; 0 outside of it.

        >>> whiten(torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]]), "example")
        tensor([[-0.7071,  0.7071,  0.0000]])

    An empty mask yields zeros. `where` begins the message of an error. Raises DataError for a single token, which has no variance.
    """
    total = int(count(mask))
    _check_whitening(total, where)
    centered = keep(values - masked_mean(values, mask), mask)
    # The variance is taken of centered values: the rounding error of the mean is then of second order.
    variance = centered.square().sum() / (total + EPSILON) * (total / max(total - 1, 1))
    return centered.mul_(torch.rsqrt(variance + EPSILON))


def whiten_rows(rows: torch.Tensor, lengths: torch.Tensor, where: str) -> torch.Tensor:
    """Whiten values that are the same for all tokens of a row: `rows` `[B]` are the values and `lengths` `[B]` the numbers of tokens.

    Raises DataError for a single token, which has no variance.
    """
    weights = lengths.double()
    total = float(weights.sum())
    _check_whitening(total, where)
    centered = rows.double() - (weights * rows).sum() / (total + EPSILON)
    variance = (weights * centered.square()).sum() / (total + EPSILON) * (total / max(total - 1, 1))
    return (centered * torch.rsqrt(variance + EPSILON)).to(rows.dtype)


def _check_whitening(total: float, where: str) -> None:
    if total == 1:
        raise DataError(f"{where}: the batch holds one response token, whose advantage cannot be whitened; use a larger batch")


# Sums along the response tokens of each row: gaps in the mask are skipped.

RUN = 32  # tokens of one partial sum on a CPU


@dataclass(frozen=True, eq=False)
class Packing:
    """Moves the tokens under a mask `[B, T]` to the left of their rows, and back. Without gaps nothing has to move.

    >>> packing = Packing.of(torch.tensor([[True, False, True]]))
    >>> packing.pack(torch.tensor([[1.0, 2.0, 3.0]]))
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
            return cls.identity(mask)
        return cls(mask, packed, (mask.cumsum(-1) - 1).clamp(min=0))

    @classmethod
    def identity(cls, mask: torch.Tensor) -> "Packing":
        """Make a packing that leaves every token at its place, gaps or not."""
        return cls(mask, mask, None)

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Move the values `[B, T]` under the mask to the left; 0 after them."""
        kept = keep_bits(values, bits(self.mask, values))
        if self.places is None:
            return kept
        # Values outside of the mask are 0 and have the place of the token before them: adding them there changes nothing.
        return torch.zeros_like(kept).scatter_add_(1, self.places, kept)

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
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


# Statistics of groups, that is of rows with the same group id, in any order, by index operations alone.


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of a batch: `index` `[B]` is the group of each row, counted from 0, and `sizes` `[G]` the number of rows of each group."""

    index: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor) -> "Groups":
        """Find the groups of `group_ids` `[B]`; rows with equal ids are one group.

        >>> Groups.of(torch.tensor([7, 7, 3])).sizes
        tensor([1, 2])
        """
        _, index, sizes = torch.unique(ids, return_inverse=True, return_counts=True)
        return cls(index, sizes)

    @property
    def singleton(self) -> torch.Tensor:
        """The rows `[B]` that are alone in their group, as flags."""
        return (self.sizes == 1)[self.index]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values `[B, ...]` by group, to `[G, ...]`."""
        return values.new_zeros((len(self.sizes), *values.shape[1:])).index_add_(0, self.index, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Average values `[B]` by group, to `[G]`."""
        return self.sum(values) / self.sizes

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Take the largest of the values `[B]` of each group, `[G]`."""
        return self._extreme(values, "amax")

    def min(self, values: torch.Tensor) -> torch.Tensor:
        """Take the smallest of the values `[B]` of each group, `[G]`."""
        return self._extreme(values, "amin")

    def _extreme(self, values: torch.Tensor, reduce: str) -> torch.Tensor:
        return values.new_zeros(len(self.sizes)).scatter_reduce_(0, self.index, values, reduce, include_self=False)

    def center(self, values: torch.Tensor) -> torch.Tensor:
        """Subtract the mean of its group from each value `[B]`, in float64: exactly 0 in a group of equal values."""
        # Subtracting a member of the group first keeps the rounding error of the mean out of groups of equal values.
        shifted = values.double() - self.min(values).double()[self.index]
        return shifted - self.mean(shifted)[self.index]

    def std(self, centered: torch.Tensor) -> torch.Tensor:
        """Compute the unbiased standard deviation `[B]` of each row's group from centered values; 1 for a row that is alone."""
        variance = self.sum(centered.square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes > 1, variance.sqrt(), 1.0)[self.index]


def groups_of(where: str, batch: Columns, mask: torch.Tensor) -> Groups:
    """Find the groups of a batch by its `group_ids`. Raises DataError unless these are int64 `[B]`."""
    ids = tensor(where, batch, "group_ids")
    if ids.dtype is not torch.int64 or ids.shape != mask.shape[:1]:
        raise DataError(
            f"{where}: column 'group_ids' is {ids.dtype} of shape {list(ids.shape)}; for {mask.shape[0]} responses it holds "
            f"{mask.shape[0]} int64 ids, equal for the responses of one prompt"
        )
    return Groups.of(ids)


# Reduce the losses of tokens to one number, the same however the batch is split over micro-batches and ranks.

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")
Aggregation: TypeAlias = Annotated[str, OneOf(AGGREGATIONS)]


@dataclass(frozen=True)
class Totals:
    """The size of a whole mini-batch over all ranks: the trained tokens, and the rows with at least one. Micro-batches divide by it.

        >>> Totals.of(torch.tensor([[True, True], [True, False], [False, False]]))
        Totals(tokens=3, rows=2)

    A row that a filter or a rejection masks out counts in no mean over rows: with 4 of 8 rows masked, the loss is the loss of the other 4.
    """

    tokens: int
    rows: int

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Totals":
        """Count the trained tokens and rows of a mini-batch that is whole on this rank, by its mask `[B, T]`.

        Raises DataError for a mask that is not bool and [B, T].
        """
        check_mask("Totals.of", mask)
        return cls(int(count(mask)), int(count(mask.any(-1))))


def check_aggregation(where: str, mode: str, horizon: int | None) -> None:
    """Raise GraphError for an unknown mode, a missing horizon, or a horizon that the mode does not use."""
    check_choice(where, "aggregation", mode, AGGREGATIONS)
    if mode == "seq-mean-token-sum-norm":
        check_whole(where, "horizon", horizon, 1)
    elif horizon is not None:
        raise GraphError(
            f"{where}(horizon={show_value(horizon)}): only 'seq-mean-token-sum-norm' divides by a horizon, not '{mode}'; leave it out"
        )


def aggregate(
    losses: torch.Tensor, mask: torch.Tensor, totals: Totals, mode: str = "token-mean", horizon: int | None = None
) -> torch.Tensor:
    """Reduce the losses of a micro-batch, `[b, T]` under a bool `mask` `[b, T]`, to its share of the loss of the mini-batch.

        >>> losses, mask = torch.tensor([[1.0, 3.0], [4.0, 9.0]]), torch.tensor([[True, True], [True, False]])
        >>> [float(aggregate(losses, mask, Totals.of(mask), mode)) for mode in ("token-sum", "seq-mean-token-mean")]
        [8.0, 3.0]

    The modes, where means over rows are over the rows that have tokens:

    * `token-mean`: the mean over all tokens.
    * `token-sum`: the sum over all tokens.
    * `seq-mean-token-sum`: the sum of each response, then the mean over rows.
    * `seq-mean-token-sum-norm`: the same divided by `horizon`, a fixed number of tokens such as the longest response allowed
      (Liu et al., 2025, 2503.20783).
    * `seq-mean-token-mean`: the mean of each response, then the mean over rows.

    Losses outside of the mask do not count, and an empty mask yields 0.

    Raises GraphError for an unknown mode, or a horizon that the mode does not use;
    DataError for losses or a mask of another shape or dtype.
    """
    check_aggregation("aggregate", mode, horizon)
    check_tokens("aggregate", mask, losses=losses)
    return (masked_sum(losses, mask, -1) * row_weights(losses, mask, totals, mode, horizon)).sum()


def row_weights(losses: torch.Tensor, mask: torch.Tensor, totals: Totals, mode: str, horizon: int | None) -> torch.Tensor:
    """Compute the factor `[b]` of each row's sum, by which the rows of all micro-batches add up to the loss."""
    if mode == "seq-mean-token-mean":
        return 1 / lengths(mask, losses.dtype) / divisor(mode, totals)
    return losses.new_full((len(losses),), 1 / divisor(mode, totals) / (horizon or 1))


def divisor(mode: str, totals: Totals) -> int:
    """Give the number by which a mode divides the sum over a mini-batch, besides what it divides each row by."""
    return max({"token-mean": totals.tokens, "token-sum": 1}.get(mode, totals.rows), 1)
