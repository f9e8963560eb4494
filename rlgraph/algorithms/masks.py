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
    if count == 1:
        raise DataError(f"{where}: the batch holds one response token, whose advantage cannot be whitened; use a larger batch")
    centered = keep(values - masked_mean(values, mask), mask)
    # The variance is taken around the mean of what is centered already: its rounding error is of second order.
    variance = centered.square().sum() / (count + EPSILON) * (count / max(count - 1, 1))
    return centered * torch.rsqrt(variance + EPSILON)


def last_token(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask `[B, T]` that is true on the last token of each row; an empty row has none."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    ends = torch.where(mask, places, 0).amax(-1, keepdim=True) if mask.shape[1] else places.new_zeros(mask.shape[0], 1)
    return mask & (places == ends)
