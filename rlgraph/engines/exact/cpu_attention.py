"""Attention by the kernel of vLLM on a CPU, in the engine's order: the prompt at once, then each token by itself; backward by PyTorch."""

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as kernels
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from rlgraph.engines.exact.cpu_rotation import rotated, rotated_plainly
from rlgraph.errors import DataError

NAME = "rlgraph_exact"
BLOCK = 32  # tokens of a block of keys and values: results do not depend on it
SPLIT = True  # as vLLM's default; with one thread it has no effect


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
    prompt_lengths: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of a flat row: `[1, L, H, D]` from `query [1, H, L, D]`, keys and values of as many or fewer heads.

    Queries and keys come as they were projected; `module.rotation` turns them.

    Sequence i begins at `cu_seq_lens_q[i]` with a prompt of `prompt_lengths[i]` tokens. Raises DataError for a setting that is not
    proven to be exact.
    """
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise DataError(f"{type(module).__name__} has a window, a soft cap or sinks, which exact=True does not have; leave it out")
    starts = cu_seq_lens_q.tolist()
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(starts)])
    table = module.rotation.table(int(positions.max()) + 1, query)
    out: torch.Tensor = _Attention.apply(query, key, value, (positions, table), starts, prompt_lengths.tolist(), scaling)
    return out, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        turn: tuple[torch.Tensor, torch.Tensor],
        starts: list[int],
        prompts: list[int],
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.turn, ctx.starts, ctx.scale = turn, starts, scale
        q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in (query, key, value))
        return scheduled(rotated(q, *turn), rotated(k, *turn), v, starts, prompts, scale)[None]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            q, k, v = rotated_plainly(given[0], *ctx.turn), rotated_plainly(given[1], *ctx.turn), given[2]
            parts = [
                scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True, scale=ctx.scale, enable_gqa=True)
                for a, b in pairwise(ctx.starts)
            ]
            found = torch.cat(parts, dim=2).transpose(1, 2)
        return (*torch.autograd.grad(found, given, grads), None, None, None, None)


def scheduled(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: list[int], prompts: list[int], scale: float
) -> torch.Tensor:
    """Attend `[L, H, D]`: one call for all prompts, and one in which each later token is a sequence of its own over the same keys."""
    lengths = [end - start for start, end in pairwise(starts)]
    table, keys, values, kind = _cached(key, value, lengths)
    out = torch.empty_like(query)
    decoded = [range(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    of_prompts = [start + at for start, prompt in zip(starts, prompts, strict=False) for at in range(prompt)]
    of_tokens = [start + at for start, ats in zip(starts, decoded, strict=False) for at in ats]
    owner = [index for index, ats in enumerate(decoded) for _ in ats]
    calls = (
        (of_prompts, torch.tensor([0, *prompts]).cumsum(0), torch.tensor(prompts), table),
        (of_tokens, torch.arange(len(of_tokens) + 1), torch.tensor([at + 1 for ats in decoded for at in ats]), table[owner]),
    )
    for rows, begins, seen, blocks in calls:
        if rows:
            out[rows] = _called(query[rows], keys, values, begins.int(), seen.int(), blocks.contiguous(), scale, kind)
    return out


def _cached(key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """Lay keys and values in blocks as the engine's cache. Gives the blocks of each sequence, keys, values and the kernel's kind."""
    _, heads, size = key.shape
    kind = _get_attn_isa(key.dtype, BLOCK, size, "auto")
    counts = [-(-length // BLOCK) for length in lengths]
    table, slots, first = torch.zeros(len(lengths), max(counts), dtype=torch.int32), list[int](), 0
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        table[index, :count] = torch.arange(first, first + count)
        slots += range(first * BLOCK, first * BLOCK + length)
        first += count
    keys, values = torch.zeros(first, heads, 2 * BLOCK, size).chunk(2, dim=2)
    kernels.cpu_attn_reshape_and_cache(key, value, keys, values, torch.tensor(slots), kind)
    return table, keys, values, kind


def _called(
    query: torch.Tensor, keys: Any, values: Any, begins: torch.Tensor, seen: torch.Tensor, table: torch.Tensor, scale: float, kind: str
) -> torch.Tensor:
    (_, heads, size), own = query.shape, keys.shape[1]
    plan = kernels.cpu_attn_get_scheduler_metadata(
        len(seen), heads, own, size, seen, query.dtype, begins, causal=True, sliding_window_size=-1, isa=kind, enable_kv_split=SPLIT
    )
    out = torch.empty_like(query)
    kernels.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=out,
        query_start_loc=begins,
        seq_lens=seen,
        scale=scale,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return out
