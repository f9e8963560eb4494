"""Checksums of tensors, by which both ends of a transfer detect a changed bit."""

from collections.abc import Iterable

import torch

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
COLUMNS_COUNT = 1_000_003  # weights the sum along the columns differently from the sum along the rows


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute a 64-bit number on the tensor's device: the same for the same bits in the same places, on any device.

    Fletcher's idea in two dimensions: the sums of rows and of columns, each weighted by its place. It changes with any single element and
    with any two rows or columns that swap places. It reads the tensor twice and copies nothing.
    """
    rows = max(len(tensor), 1) if tensor.dim() else 1
    bits = tensor.detach().contiguous().view(WORDS[tensor.itemsize]).view(rows, -1)
    found = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for dim, weight in ((1, 1), (0, COLUMNS_COUNT)):
        sums = bits.sum(dim, dtype=torch.int64)
        found += weight * (sums * torch.arange(1, len(sums) + 1, device=tensor.device)).sum()
    return found


def checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the checksum of each, `[n]` int64."""
    found = [checksum(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64)
