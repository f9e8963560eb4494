"""FlashAttention 4, where its package is installed and the GPU is a Hopper: the same attention as FlashAttention 2 in about half the time.

The package compiles a kernel for each kind of call, which takes some seconds once: it keeps them in a folder. Its functions for a pass
and its gradients are private ones of this version, since public ones do not take the sums of more keys than a call sees.
"""

import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rlgraph import notices

PACKAGE, KNOWN = "flash-attn-4", "4.0.0b19"  # the last version beside vLLM 0.26, whose packages it shares
HOPPER = 9  # the first number of the compute capability
SIZES = 64, 128, 256  # of heads, compared on an H100 with FlashAttention 2; with 80 its gradients of queries are wrong
WIDE = 1024  # numbers of a token's queries: below, the host takes longer for a call than the GPU saves
_kernels: list[Any] = []  # the package's two functions, after `load` found them


def load() -> bool:
    """Import the package if it is installed and the GPU a Hopper. Returns whether passes may use it; why they do not is a notice."""
    if _kernels or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != HOPPER:
        return bool(_kernels)
    try:
        if (found := version(PACKAGE)) != KNOWN:
            notices.here.say(f"attention is FlashAttention 2: {PACKAGE} {found} is installed, and rlgraph knows {KNOWN}; install that")
            return False
    except PackageNotFoundError:
        return False
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path("~/.cache/rlgraph/flash_attention").expanduser()))
    try:
        from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    except Exception as error:  # noqa: BLE001 (whatever a broken installation raises, FlashAttention 2 computes the same)
        notices.here.say(f"attention is FlashAttention 2: {PACKAGE} cannot be imported ({type(error).__name__}: {error})")
        return False
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # of the package, each time that it compiles a kernel
    _kernels[:] = _flash_attn_fwd, _flash_attn_bwd
    return True


def takes(heads: int, size: int) -> bool:
    """Whether the package is loaded and wanted for so many heads of this size."""
    return bool(_kernels) and size in SIZES and heads * size >= WIDE


@torch.library.custom_op("rlgraph::flash4_forward", mutates_args=())
def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the output `[L, H, D]` and the logarithmic sums `[H, L]` of the segments that start at `of_queries` and `of_keys`."""
    starts = {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys, "max_seqlen_q": most_queries, "max_seqlen_k": most_keys}
    found: tuple[torch.Tensor, ...] = _kernels[0](q, k, v, softmax_scale=scale, causal=causal, return_lse=True, **starts, **_window(window))
    return found[0].contiguous(), found[1].contiguous()


@forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("rlgraph::flash4_backward", mutates_args=())
def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    of_queries: torch.Tensor,
    of_keys: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys and values from output and sums, which may be of more keys than these."""
    starts = {"cu_seqlens_q": of_queries, "cu_seqlens_k": of_keys, "max_seqlen_q": most_queries, "max_seqlen_k": most_keys}
    same = torch.are_deterministic_algorithms_enabled()
    found: tuple[torch.Tensor, ...] = _kernels[1](q, k, v, out, grad, sums, scale, causal, deterministic=same, **starts, **_window(window))
    of_q, of_k, of_v = (gradient.contiguous() for gradient in found)  # laid out as `q` may be, which a compiled layer does not expect
    return of_q, of_k, of_v


@backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.settings = inputs[5:]


def _gradients(ctx: Any, grad: torch.Tensor, of_sums: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, of_queries, of_keys, out, sums = ctx.saved_tensors
    return *backward(grad.contiguous(), q, k, v, out, sums, of_queries, of_keys, *ctx.settings), *(None,) * 7


torch.library.register_autograd("rlgraph::flash4_forward", _gradients, setup_context=_keep)


def _window(window: int | None) -> dict[str, int]:
    """Convert a window to the kernel's, which does not count the token itself."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
