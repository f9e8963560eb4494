"""FlashAttention's calls, of 2 and 4, in plain PyTorch, in the dtype they are given: what a GPU's kernels compute."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from rlgraph.engines.forward import flash4


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Let PyTorch's operators of FlashAttention, which have no kernel for a CPU, be computed here."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def flash4_on_cpu() -> Iterator[None]:
    """Let the functions of the package with FlashAttention 4 be computed here, for heads of any number and size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash4, "_kernels", [_forward4, _backward4])
        patch.setattr(flash4, "takes", lambda heads, size: True)
        yield


def _forward4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, ...]:
    assert given.pop("return_lse")
    scale, causal = given.pop("softmax_scale"), given.pop("causal")
    return forward(q, k, v, *_places(given), 0.0, causal, False, scale=scale, **given)[:2]


def _backward4(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **more: Any) -> tuple[torch.Tensor, ...]:
    out, grad, sums, scale, causal = given
    assert not more.pop("deterministic")
    found = backward(grad, q, k, v, out, sums, *_places(more), 0.0, causal, None, None, scale=scale, **more)
    return tuple(torch.empty_like(given).copy_(gradient) for given, gradient in zip((q, k, v), found, strict=True))  # laid out alike


def _places(given: dict[str, Any]) -> list[Any]:
    return [given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **window: Any) -> tuple[torch.Tensor, ...]:
    """Give the output `[L, H, D]`, the logarithmic sums `[H, L]`, and three tensors of no meaning."""
    *place, dropout, causal, debug = given
    assert not dropout
    assert not debug
    out, sums = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype), torch.zeros(q.shape[1], len(q), dtype=_sums_of(q))
    for own, seen, mask, scale in _segments(q, *place, causal, **window):
        keys, values = (x[seen].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q[own], keys) * scale).masked_fill(~mask, -torch.inf)
        sums[:, own] = scores.logsumexp(-1)
        out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.zeros(0)


def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any, **window: Any) -> tuple[torch.Tensor, ...]:
    """Give the gradients as the kernel does: from output and sums, which may be of more keys than these."""
    out, sums, *place, dropout, causal, _, _ = given
    assert not dropout
    assert sums.is_contiguous()
    found = [torch.zeros_like(x) for x in (q, k, v)]
    for own, seen, mask, scale in _segments(q, *place, causal, **window):
        repeats = q.shape[1] // k.shape[1]
        keys, values = (x[seen].repeat_interleave(repeats, 1) for x in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q[own], keys) * scale).masked_fill(~mask, -torch.inf)
        shares = (scores - sums[:, own, None]).exp()
        rows = (grad[own] * out[own]).sum(-1).t()
        of_scores = shares * (torch.einsum("qhd,khd->hqk", grad[own], values) - rows[..., None]) * scale
        found[0][own] += torch.einsum("hqk,khd->qhd", of_scores, keys)
        for place_of, more in ((1, torch.einsum("hqk,qhd->khd", of_scores, q[own])), (2, torch.einsum("hqk,qhd->khd", shares, grad[own]))):
            found[place_of][seen] += more.unflatten(1, (-1, repeats)).sum(2)
    return tuple(found)


def _segments(
    q: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Iterator[tuple[slice, slice, torch.Tensor, float]]:
    assert window_size_right == (None if window_size_left is None else 0) or window_size_right == -1  # which bounds nothing
    for (start, end), (first, last) in zip(pairwise(of_queries.tolist()), pairwise(of_keys.tolist()), strict=True):
        assert 0 < end - start <= most_queries
        assert 0 < last - first <= most_keys
        distance = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)[None]
        seen = distance >= 0 if causal or window_size_right == 0 else torch.ones_like(distance, dtype=torch.bool)
        seen = seen if window_size_left is None else seen & (distance <= window_size_left)
        yield slice(start, end), slice(first, last), seen, q.shape[-1] ** -0.5 if scale is None else scale


def _sums_of(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32
