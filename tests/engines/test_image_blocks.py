"""Attention in both directions within images: the call of the kernel equals PyTorch's."""

import pytest
import torch
from support.flat_kernel import flash_on_cpu

from rlgraph.engines.forward.image_blocks import ImageBlocks, attend_by_kernel, attend_one_by_one


@pytest.mark.parametrize("window", [None, 12, 3])
def test_the_call_of_the_kernel_is_the_attention_of_one_image_after_another(window: int | None) -> None:
    """Windows are longer and shorter than an image."""
    places = torch.zeros(2, 20, dtype=torch.bool)
    for row, begin, end in ((0, 3, 8), (0, 12, 17), (1, 2, 3)):
        places[row, begin:end] = True
    blocks = ImageBlocks.of(places, torch.arange(2)[:, None].expand(2, 20))
    draw = torch.Generator().manual_seed(0)
    sizes = (len(blocks.queries), 4, 8), (len(blocks.keys), 2, 8), (len(blocks.keys), 2, 8)
    leaves = [torch.randn(size, dtype=torch.float64, generator=draw, requires_grad=True) for size in sizes]
    up, results = torch.randn(sizes[0], dtype=torch.float64, generator=draw), []
    for attend in (attend_by_kernel, attend_one_by_one):
        with flash_on_cpu():
            out = attend(blocks, leaves[0], leaves[1], leaves[2], 0.3, window)
            results.append([out.detach(), *torch.autograd.grad(out, leaves, up)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
