"""Sums, means and whitening over the tokens that a mask selects. What is outside of the mask is never touched, not even NaN."""

import torch

from rlgraph.errors import DataError

EPSILON = 1e-8


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the values under the mask and 0 elsewhere; neither the result nor its gradient sees what was elsewhere."""
    return torch.where(mask, values, 0.0)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the sum under the mask, of everything or along `dim`."""
    kept = keep(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the mean under the mask, of everything or along `dim`; 0 where the mask is empty."""
    return masked_sum(values, mask, dim) / lengths(mask, values.dtype, dim)


def lengths(mask: torch.Tensor, dtype: torch.dtype, dim: int | None = -1) -> torch.Tensor:
    """Return how many tokens are under the mask along `dim`, plus 1e-8, so that dividing 0 by it gives 0."""
    return (mask.sum() if dim is None else mask.sum(dim)).to(dtype) + EPSILON


def whiten(values: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """Return the values shifted and scaled to mean 0 and variance 1 over the mask, and 0 outside of it.

    An empty mask gives zeros. Raises DataError for a single token, which has no variance.
    """
    count = int(mask.sum())
    _check_whitening(count, where)
    centered = keep(values - masked_mean(values, mask), mask)
    # The variance is taken around the mean of what is centered already: its rounding error is of second order.
    variance = centered.square().sum() / (count + EPSILON) * (count / max(count - 1, 1))
    return centered * torch.rsqrt(variance + EPSILON)


def whiten_rows(rows: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """Return what `whiten` gives on the tokens of each row, where all tokens of a row have the same value, from values `[B]`.

    Raises DataError for a single token, which has no variance.
    """
    weights = mask.sum(-1).double()
    count = float(weights.sum())
    _check_whitening(count, where)
    centered = rows.double() - (weights * rows).sum() / (count + EPSILON)
    variance = (weights * centered.square()).sum() / (count + EPSILON) * (count / max(count - 1, 1))
    return (centered * torch.rsqrt(variance + EPSILON)).to(rows.dtype)


def _check_whitening(count: float, where: str) -> None:
    if count == 1:
        raise DataError(f"{where}: the batch holds one response token, whose advantage cannot be whitened; use a larger batch")
