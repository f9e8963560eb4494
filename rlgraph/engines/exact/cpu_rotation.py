"""Rotation of queries and keys by the kernel of vLLM on a CPU. With AVX-512 it rounds once where separate products and sums round twice."""

from typing import Any

import torch
from vllm import _custom_ops as kernels


class LateRotation(torch.nn.Module):
    """Stands for a model's rotary embedding: gives cos = 1 and sin = 0, so that the exact attention can rotate by itself."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, _ = self.own(states[:, :1], position_ids[:, :1])
        one = cos.new_ones(1, 1, 1).expand(*position_ids.shape, cos.shape[-1])
        return one, torch.zeros_like(one)

    @torch.no_grad()
    def table(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """The cosines, then the sines, of the positions up to a length: `[length, D]` for heads of D numbers."""
        cos, sin = self.own(like, torch.arange(length)[None])
        half = cos.shape[-1] // 2
        return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def rotated(states: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[L, H, D]` at these positions `[L]`, as the engine does."""
    out = states.clone()
    kernels.rotary_embedding(positions, out.view(len(out), -1), None, states.shape[-1], table, True)
    return out


def rotated_plainly(states: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate heads `[1, H, L, D]` in PyTorch, for their gradient."""
    cos, sin = table[positions].chunk(2, dim=-1)
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
