"""Attention on a GPU by the engine's kernel, FlashAttention 3 with keys in one piece and one shape of tiles; backward FlashAttention 2.

The kernel takes tiles of 128 keys where it masks causally and is told of queries that fill a tile. Told of one query, as in a decode step,
it takes others for heads of 64. So both sides tell it of `TOLD` at least for these; how many there are it reads on the GPU.
"""

from typing import Any

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func

from rlgraph.errors import DataError

NAME = "rlgraph_exact_gpu"
TOLD = 128  # queries of the longest sequence, as the kernel is told for narrow heads
NARROW = 64  # numbers of a head


def told(size: int, longest: int) -> int:
    """The number of queries of the longest sequence that the kernel is told of, for heads of a size."""
    return max(longest, TOLD) if size <= NARROW else longest


def register() -> None:
    """Make the attention known to transformers, under its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of a flat row: `[1, L, H, D]` from `query [1, H, L, D]`, keys and values of as many or fewer heads.

    Raises DataError for a setting that is not proven to be exact.
    """
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise DataError(f"{type(module).__name__} has a window, a soft cap or sinks, which exact=True does not have; leave it out")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(q, k, v, cu_seq_lens_q.int(), max_length_q, scaling)
    return out[None], None


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        out, sums = attended(query.detach(), key.detach(), value.detach(), starts, longest, scale)
        ctx.save_for_backward(query, key, value, out, sums, starts)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, sums, starts = ctx.saved_tensors
        none = torch.zeros(2, dtype=torch.uint64, device=out.device)  # the state of a dropout that there is not
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            query,
            key,
            value,
            out,
            sums,
            starts,
            starts,
            ctx.longest,
            ctx.longest,
            0.0,
            True,
            none,
            none[:0],
            scale=ctx.scale,
        )
        return (*found, None, None, None)


def attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend `[L, H, D]` within each sequence; give the logarithm `[H, L]` of each row's sum too."""
    out, sums = flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=told(query.shape[-1], longest),
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        cu_seqlens_k=starts,
        softmax_scale=scale,
        causal=True,
        return_softmax_lse=True,
        fa_version=3,
        num_splits=1,
    )
    return out, sums
