"""RMS norms on a GPU by one kernel, for engine and trainer: a row's sums are in one order, however many rows there are.

vLLM's own kernel for a norm after a sum takes other blocks from 256 rows on, and is not its kernel for a norm alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

SMALL = 256  # numbers of a row, below which a program takes several rows
ROWS = 16  # that it then takes


@triton.jit(do_not_specialize=["rows", "heads"])
def _norm(
    states,
    residual,
    weight,
    out,
    inverses,
    rows,
    heads,
    token_stride,
    head_stride,
    eps,
    width: tl.constexpr,
    added: tl.constexpr,
    block: tl.constexpr,
    at_once: tl.constexpr,
):
    """Norms of some rows: row i is head `i % heads` of token `i // heads`. With `added` the residual takes up the states before."""
    row = tl.program_id(0).to(tl.int64) * at_once + tl.arange(0, at_once)
    lanes = tl.arange(0, block)
    here = (row < rows)[:, None] & (lanes < width)[None, :]
    given = states + ((row // heads) * token_stride + (row % heads) * head_stride)[:, None] + lanes[None, :]
    flat = row[:, None] * width + lanes[None, :]
    values = tl.load(given, mask=here, other=0.0).to(tl.float32)
    if added:
        values += tl.load(residual + flat, mask=here, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + flat, rounded, mask=here)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    scale = tl.load(weight + lanes, mask=lanes < width, other=0.0).to(tl.float32)
    found = values * inverse[:, None] * scale[None, :]
    tl.store(out + flat, found.to(out.dtype.element_ty), mask=here)
    tl.store(inverses + row, inverse, mask=row < rows)


def norm(states: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the norms `[..., D]` of states `[L, D]` or `[..., H, D]`, and each row's factor. A `residual` takes the states up first."""
    width = states.shape[-1]
    if states.is_contiguous() or states.dim() == 2:
        tokens, heads = states.reshape(-1, width), 1
    else:
        tokens, heads = states.flatten(0, -3), states.shape[-2]  # a view: a slice of a product keeps its strides
    rows = states.numel() // width
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    inverses = torch.empty(*states.shape[:-1], 1, dtype=torch.float32, device=states.device)
    at_once = ROWS if width < SMALL else 1
    if rows:
        _norm[(triton.cdiv(rows, at_once),)](
            tokens,
            residual if residual is not None else out,
            weight,
            out,
            inverses,
            rows,
            heads,
            tokens.stride(0),
            tokens.stride(-2),
            eps,
            width=width,
            added=residual is not None,
            block=triton.next_power_of_2(width),
            at_once=at_once,
            num_warps=4 if width <= 2048 else 8,
        )
    return out, inverses


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, inverses = norm(states.detach(), weight.detach(), eps)
        ctx.save_for_backward(states, weight, inverses)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight, inverses = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
        of_states, of_weight = torch.ops.aten._fused_rms_norm_backward(
            grads[0].contiguous(), states.contiguous(), list(weight.shape), inverses, weight, wanted
        )
        return of_states, of_weight, None


def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Stand for the forward of a trainer's norm: `[..., D]`."""
    out: torch.Tensor = _Norm.apply(hidden_states, self.weight, self.variance_epsilon)
    return out
