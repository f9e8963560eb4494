"""The attention of a trained model: sliding windows, soft caps and sinks, on padded rows, shared prompts and rows packed flat.

Implementations for transformers' `AttentionInterface`. `PADDED` takes rows of one sequence each, or a prompt and the responses
that share it. `FLAT` takes sequences that lie one behind the other in one row, without padding: how a GPU's passes are packed.
A setting of a layer that neither knows is refused by name, since leaving it out gives other log-probs without a word.
"""

from functools import partial
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from rlgraph.batching.packing import SharedPrompts
from rlgraph.engines.forward import flash, flash4
from rlgraph.engines.forward.collectives import ranks_in, whole_heads, whole_tokens
from rlgraph.engines.forward.image_blocks import sees_images
from rlgraph.engines.forward.ring import RingPass, ring_attention
from rlgraph.engines.hf.model_files import text_config
from rlgraph.errors import DataError

PADDED, FLAT, FLAT_HALF = "rlgraph_padded", "rlgraph_packed", "rlgraph_packed_half"
PARTS = "rlgraph_flash_parts"  # transformers gives segments to an implementation with "flash" in its name
WITHOUT_EFFECT = frozenset(  # what models hand on to attention and its result does not depend on
    (
        *("dropout", "is_causal", "position_ids", "cache_position", "past_key_values", "use_cache", "output_attentions", "layer_idx"),
        *("output_hidden_states", "output_router_logits", "return_dict", "cu_seq_lens_k", "max_length_k", "logits_to_keep"),
        *("prompt_lengths",),
    )
)


def install(model: Any, name: str) -> None:
    """Let a Hugging Face model attend by one of the implementations; passes over `FLAT` are given `cu_seq_lens_q`, `max_length_q`.

    A model whose attention is its own alone keeps it.
    """
    register()
    if name != PADDED:
        flash4.load()
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)


def padded_implementation(auto: Any, path: Any) -> str:
    """The implementation to load a folder with, by a class like `AutoModelForCausalLM`: `PADDED`, or the model's own plain one."""
    register()
    config = text_config(path)
    kind = auto._model_mapping.get(type(config), None)
    return PADDED if kind is None or isinstance(kind, tuple) or kind._can_set_attn_implementation() else "eager"


def register() -> None:
    """Make the implementations known to transformers, under their names."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PADDED, attend_rows)
    AttentionMaskInterface.register(PADDED, sdpa_mask)
    AttentionInterface.register(FLAT, attend)  # has no mask: it would be the square of all tokens of a pass
    AttentionInterface.register(FLAT_HALF, partial(attend_half, dtype=torch.bfloat16))
    AttentionInterface.register(PARTS, attend_parts)


@sees_images
def attend_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    shared_positions: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each row: `[S, L, H, D]` from `query [S, H, L, D]`, keys and values of as many or fewer heads.

    The mask is the model's own, windows included, unless prompts are shared: then `shared_positions [S, L]` are the tokens'
    positions in their own sequences, by which a window counts. Raises DataError for a setting of the layer that it does not know.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    _refuse(module, others)
    if shared_positions is not None:
        assert attention_mask is not None
        if sliding_window is not None:
            distance = shared_positions[:, :, None] - shared_positions[:, None, :]
            attention_mask = attention_mask & (distance < sliding_window)[:, None]
    if softcap is None and s_aux is None:
        out: torch.Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=others.get("is_causal"), position_bias=position_bias
        )[0]
        return out, None
    if position_bias is not None:
        raise DataError(f"{type(module).__name__}: rlgraph has no attention with both a position_bias and a soft cap or sinks")
    if attention_mask is None:
        attention_mask = _causal(query.shape[2], key.shape[2], None, query.device)
    return _attend_plainly(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2), None


@sees_images
def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    shared_prompts: SharedPrompts | None = None,
    context_group: Any = None,
    context_ring: RingPass | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence: `[1, L, H, D]` from `query [1, H, L, D]`, keys and values of as many or fewer heads.

    Sequence i lies at `cu_seq_lens_q[i]` up to the next entry. With `shared_prompts` that is a segment of a sequence, which also sees the
    prompt before it. The kernel is FlashAttention, which knows windows, and sinks and shared prompts by `flash`.
    It knows no soft cap, does not run on a CPU or in float32, and has heads of at most 256 numbers: there the sequences are attended to
    one by one. Raises DataError for a setting of the layer that it does not know.

    The ranks of a `context_group` have some tokens of the row each: see `attend_by_head`. With a `context_ring` they pass keys round.
    """
    if context_group is not None:
        more: dict[str, Any] = {
            "cu_seq_lens_q": cu_seq_lens_q,
            "max_length_q": max_length_q,
            "scaling": scaling,
            "sliding_window": sliding_window,
        }
        more |= {"softcap": softcap, "s_aux": s_aux, "shared_prompts": shared_prompts}
        if context_ring is not None:
            _refuse(module, others)
            return attend_in_ring(module, query, key, value, context_ring, scaling, sliding_window, softcap, s_aux), None
        return attend_by_head(module, query, key, value, context_group, **more, **others), None
    _refuse(module, others)
    if cu_seq_lens_q is None:
        raise DataError(f"{type(module).__name__} does not pass the starts of sequences to its attention")
    if softcap is None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and flash.takes(query.shape[-1]):
        given = (query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window, s_aux, shared_prompts)
        return flash.flash(*given)[None], None
    parts = []
    spans = pairwise(cu_seq_lens_q.tolist())
    seen = None if shared_prompts is None else shared_prompts.keys.split(shared_prompts.key_starts.diff().tolist())
    for index, (start, end) in enumerate(spans):
        q, k, v = (x[:, :, start:end] for x in (query, key, value))
        if seen is not None and len(seen[index]) > end - start:
            k, v = (x[:, :, seen[index]] for x in (key, value))
        parts.append(_attend_one(q, k, v, scaling, sliding_window, softcap, s_aux))
    return torch.cat(parts, dim=2).transpose(1, 2), None


def attend_parts(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each part of an image, in both directions: `[1, L, H, D]` from `[1, H, L, D]`, in bfloat16 on a GPU.

    Part i lies at `cu_seq_lens_q[i]` up to the next entry. transformers' own implementations launch some kernels for each part.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash.forward(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, False, scaling)[0][None], None


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend `[1, H, l, D]` within one sequence in PyTorch, from all its tokens or the last of them."""
    queries, keys = query.shape[2], key.shape[2]
    plain = queries == keys and (window is None or window >= keys)
    if softcap is not None or sinks is not None:
        return _attend_plainly(query, key, value, _causal(queries, keys, window, query.device), scaling, softcap, sinks)
    mask = None if plain else _causal(queries, keys, window, query.device)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=plain, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


def attend_by_head(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, *, s_aux: Any, **settings: Any
) -> torch.Tensor:
    """Attend `[1, l, H, D]` for the tokens of this rank, where the ranks of a group share a row: each attends for some heads of all tokens.

    Two exchanges for each layer, and two in the backward pass (Jacobs et al. 2023, arXiv:2309.14509, "DeepSpeed Ulysses"). Where there are
    fewer heads of keys than ranks, or they do not divide, each is sent more than once.
    """
    if s_aux is not None:
        raise DataError(f"{type(module).__name__} has attention sinks, which ranks that share a row do not support; use context_parallel=1")
    query, key, value = _some_heads(query, key, value, group)
    out, _ = attend(module, query, key, value, None, **settings)
    return whole_tokens(out.transpose(1, 2), group).transpose(1, 2)


def attend_in_ring(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row: RingPass,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend `[1, l, H, D]` for the tokens of this rank: neighbours exchange tokens for heads, and a ring of them passes keys round."""
    given = {"a sliding window": window, "a soft cap": softcap, "attention sinks": sinks}
    unknown = [name for name, value in given.items() if value is not None]
    if unknown:
        raise DataError(
            f"{type(module).__name__} has {unknown[0]}, which ring attention does not support; use a context_parallel "
            "that divides the heads of a rank"
        )
    if row.heads is None:
        return ring_attention(query, key, value, row, scaling)
    query, key, value = _some_heads(query, key, value, row.heads)
    out = ring_attention(query, key, value, row, scaling)
    return whole_tokens(out.transpose(1, 2), row.heads).transpose(1, 2)


def _some_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Exchange tokens for heads, those of keys as often as ranks need them."""
    copies = ranks_in(group) // gcd(key.shape[1], ranks_in(group))
    key, value = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value))
    return [whole_heads(x, group) for x in (query, key, value)]


def attend_half(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, *, dtype: Any, **settings: Any
) -> Any:
    """Attend as `attend` does in `dtype`, in a model of float32: so the kernel of a GPU is tested, and rounding nowhere else."""
    out, _ = attend(module, query.to(dtype), key.to(dtype), value.to(dtype), attention_mask, **settings)
    return out.to(query.dtype), None


def _refuse(module: Any, settings: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in settings.items() if name not in WITHOUT_EFFECT and value is not None and value is not False)
    if unknown or settings.get("dropout"):
        raise DataError(f"{type(module).__name__} asks its attention for {unknown or ['dropout']}, which rlgraph does not support")


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """A mask `[1, 1, queries, keys]`, the last query on the last key: each sees what is before it, no further than the window."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return seen[None, None]


def _attend_plainly(*given: Any) -> torch.Tensor:
    """Attend in plain PyTorch, and again in the backward pass: the scores of all layers would not fit into memory."""
    if not torch.is_grad_enabled():
        return _plain(*given)
    out: torch.Tensor = checkpoint(_plain, *given, use_reentrant=False, preserve_rng_state=False)
    return out


def _plain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend `[S, H, L, D]` with soft-capped scores and a sink for each head, whose share of the probability goes to no token."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) if repeat > 1 else x for x in (key, value))
    scores = (query @ key.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    shares = scores.softmax(-1)[..., : key.shape[2]]
    return shares.to(value.dtype) @ value
