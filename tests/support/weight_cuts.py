"""Weights and how trainer ranks hold them, drawn at random: what any cut of any parameters means in tests."""

import random

import torch

from rlgraph.channels.weights.shards import WeightShard

Cut = list[list[WeightShard]]


def random_cut(draw: random.Random, weights: dict[str, torch.Tensor], ranks: int) -> Cut:
    """Cut every parameter into boxes, again and again in a dim and at a place that are drawn, and deal them out; some ranks hold copies."""
    idle = {rank for rank in range(ranks) if ranks > 1 and draw.random() < 0.2}
    busy = [rank for rank in range(ranks) if rank not in idle] or [0]
    held: Cut = [[] for _ in range(ranks)]
    for name, tensor in weights.items():
        boxes = [((0,) * tensor.dim(), tensor)]
        for _ in range(draw.randrange(2 * ranks) if tensor.dim() else 0):
            offsets, box = boxes.pop(draw.randrange(len(boxes)))
            dim = draw.randrange(tensor.dim())
            at = draw.randint(0, box.shape[dim])  # a part may be empty
            boxes.append((offsets, box.narrow(dim, 0, at)))
            moved = tuple(offset + at * (d == dim) for d, offset in enumerate(offsets))
            boxes.append((moved, box.narrow(dim, at, box.shape[dim] - at)))
        for offsets, box in boxes:
            for replica, rank in enumerate(draw.sample(busy, draw.randint(1, min(2, len(busy))))):
                content = box if replica == 0 else torch.full_like(box, 77)  # a copy is never sent, so its values are never seen
                held[rank].append(WeightShard(name, tuple(tensor.shape), offsets, content, replica))
    return held


def random_weights(draw: random.Random) -> dict[str, torch.Tensor]:
    """Draw some parameters of 0 to 3 dims: floats of two types, whole numbers, some without an element."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    weights = {}
    for number in range(draw.randint(1, 5)):
        shape = [draw.choice([0, 1, 2, 3, 7, 8]) if draw.random() < 0.9 else 0 for _ in range(draw.randrange(4))]
        tensor = torch.randn(shape, generator=generator)
        kind = draw.random()
        weights[f"p{number}"] = (tensor * 100).to(torch.int32) if kind < 0.2 else tensor.double() if kind < 0.4 else tensor
    return weights


def next_version(weights: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    return {name: tensor * version for name, tensor in weights.items()}


def as_bfloat16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def tensor_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.numel() else []
