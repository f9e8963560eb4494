"""A hash of a tensor that depends on the position of each element, so that swapped elements show. Hashes of shards add up."""

from typing import Any

MIX, PIECE = -7046029254386353131, 1 << 24  # an odd number without structure; elements that are hashed at once


def placed_hash(tensor: Any, offset: int = 0, strides: tuple[int, ...] | None = None) -> int:
    """Sum over all bfloat16 elements of their bits times a number mixed from their place, modulo 2**64.

    The element at (i, j) of a part has the place `offset + i * strides[0] + j * strides[1]` in its weight, so that hashes of parts add up
    to that of the whole, and elements that change places change it.
    """
    import torch

    if strides is None:
        strides = tuple(tensor.contiguous().stride()) if tensor.dim() else ()
    rows = max(1, PIECE // max(1, tensor[:1].numel())) if tensor.dim() else 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(tensor) if tensor.dim() else 1, rows):
        piece = tensor[first : first + rows] if tensor.dim() else tensor
        places = torch.full((), offset + (first * strides[0] if strides else 0), dtype=torch.int64, device=tensor.device)
        for dim, (size, stride) in enumerate(zip(piece.shape, strides, strict=True)):
            steps = torch.arange(size, device=tensor.device) * stride
            places = places + steps.view(*([1] * dim), -1, *([1] * (piece.dim() - dim - 1)))
        mixed = (places + 1) * MIX
        mixed = (mixed ^ (mixed >> 29)) * MIX | 1
        total += ((piece.contiguous().view(torch.int16).long() + 40503) * mixed).sum()
    return int(total)


def placed_hashes(tensors: Any) -> dict[str, int]:
    """Hash each full tensor."""
    return {name: placed_hash(tensor) for name, tensor in tensors.items()}


def shard_hashes(shards: Any) -> dict[str, int]:
    """Hash by parameter what a trainer's boxes, which are sent, are in bfloat16; those of all ranks add up to the whole parameter's."""
    import torch

    found: dict[str, int] = {}
    for shard in shards:
        if shard.replica == 0:
            strides = torch.empty(shard.global_shape, device="meta").stride()
            offset = sum(at * stride for at, stride in zip(shard.offsets, strides, strict=True))
            found[shard.name] = added(found.get(shard.name, 0), placed_hash(shard.tensor.to(torch.bfloat16), offset, strides))
    return found


def added(*hashes: int) -> int:
    """Return the hash of a whole whose parts have these hashes."""
    return (sum(hashes) + 2**63) % 2**64 - 2**63
