"""Sums, means and whitening over the tokens that a mask selects. Values outside of the mask are ignored, even NaN."""

import torch

from rlgraph.errors import DataError

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

    An empty mask gives zeros. `where` begins the message of an error. Raises DataError for a single token, which has no variance.
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
