"""Causal attention over sequences that lie one behind the other in one row, without padding: how a GPU's passes are packed."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "rlgraph_packed"


def install(model: Any) -> None:
    """Let a Hugging Face model attend so; its passes are then given `cu_seq_lens_q` and `max_length_q`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention `[1, L, H, D]` of `query [1, H, L, D]` over keys and values of as many or fewer heads.

    Sequence i lies at `cu_seq_lens_q[i]` up to the next entry. The kernel is FlashAttention 2 as PyTorch carries it; where it
    does not run, on a CPU or in float32, the sequences are attended to one by one.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        rows = [x[0].transpose(0, 1) for x in (query, key, value)]
        out = torch.ops.aten._flash_attention_forward(
            *rows, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, 0.0, True, False, scale=scaling
        )[0]
        return out[None], None
    parts = []
    for start, end in zip(cu_seq_lens_q.tolist(), cu_seq_lens_q.tolist()[1:], strict=False):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]))
    return torch.cat(parts, dim=2).transpose(1, 2), None
