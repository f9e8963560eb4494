"""Attention on a GPU by the engine's kernel, FlashAttention 3 with keys in one piece and one shape of tiles.

The backward pass is that of any trainer, with FlashAttention 2 forward once more.

The kernel takes tiles of 128 keys where it masks causally and is told of queries that fill a tile. Told of one query, as in a decode step,
it takes others for heads of 64. So both sides tell it of `TOLD` at least for these; how many there are it reads on the GPU.
"""

from typing import Any

import torch
from vllm.vllm_flash_attn import flash_attn_varlen_func

from rlgraph.engines.exact.plain_attention import check_plain
from rlgraph.engines.forward import packed_attention

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
    check_plain(module, sliding_window, softcap, s_aux)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out: torch.Tensor = _FlashAttention.apply(q, k, v, cu_seq_lens_q.int(), max_length_q, scaling)
    return out[None], None


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, starts)
        ctx.longest, ctx.scale = longest, scale
        return attended(query.detach(), key.detach(), value.detach(), starts, longest, scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *given, starts = ctx.saved_tensors
        with torch.enable_grad():
            own = [states.detach().requires_grad_() for states in given]
            query, key, value = (states.transpose(0, 1)[None] for states in own)
            out, _ = packed_attention.attend(
                None, query, key, value, None, cu_seq_lens_q=starts, max_length_q=ctx.longest, scaling=ctx.scale
            )
        return (*torch.autograd.grad(out, own, grads[0][None]), None, None, None)


def attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """Attend `[L, H, D]` within each sequence."""
    out: torch.Tensor = flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=told(query.shape[-1], longest),
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        cu_seqlens_k=starts,
        softmax_scale=scale,
        causal=True,
        fa_version=3,
        num_splits=1,
    )
    return out
