"""Rotation of queries and keys on a GPU by vLLM's kernel, with a table that engine and trainer compute by the same lines.

vLLM's kernel rounds once, where separate products and sums in bfloat16 round three times.
"""

import sys
from typing import Any

import torch
from vllm import _custom_ops as kernels

from rlgraph.engines.exact.gpu_table import table_of


class TableRotation(torch.nn.Module):
    """Stands for a model's rotary embedding: hands on the table and the positions, for `rotate` to use."""

    def __init__(self, own: Any, config: Any) -> None:
        super().__init__()
        self.own, self.config = own, config
        self.tables: dict[torch.device, torch.Tensor] = {}  # forth and back: [2, positions, D]

    @torch.no_grad()
    def forward(self, states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if states.device not in self.tables:
            table = table_of(self.config, states.dtype, states.device)
            cos, sin = table.chunk(2, dim=-1)
            self.tables[states.device] = torch.stack([table, torch.cat([cos, -sin], dim=-1)])
        return self.tables[states.device], position_ids.flatten()


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, tables: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(tables, positions)
        return turned(query, key, tables[0], positions)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tables, positions = ctx.saved_tensors
        return *turned(grads[0], grads[1], tables[1], positions), None, None


def turned(query: torch.Tensor, key: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate `[1, H, L, D]` queries and keys at `positions [L]`, as the engine does."""
    q, k = (x.detach()[0].transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (query, key))
    kernels.rotary_embedding(positions, q.view(len(q), -1), k.view(len(k), -1), q.shape[-1], table, True)
    return q.transpose(0, 1)[None], k.transpose(0, 1)[None]


def install(attention: Any) -> None:
    """Have the attention modules of a family rotate by the kernel where they are handed a table; else as before."""
    module = sys.modules[type(attention).__module__]
    own = module.apply_rotary_pos_emb
    if getattr(own, "by_table", False):
        return

    def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        if sin.is_floating_point():
            return own(query, key, cos, sin, unsqueeze_dim)
        return _Rotation.apply(query, key, cos, sin)

    rotate.by_table = True  # type: ignore[attr-defined]
    module.apply_rotary_pos_emb = rotate  # type: ignore[attr-defined]
