"""Rows of tokens in the order of their experts, and the products of all experts in one call: no wait of the host, no row that is masked.

`torch.nn.functional.grouped_mm` multiplies the rows of each expert by its own matrix. Rows move by permutations whose gradients are gathers
too: those of an index would be sorted first, or added by atomics in any order.
"""

from functools import partial
from typing import Any

import torch

product: Any = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # as torch before 2.10 names it


def experts_of(model: Any) -> list[Any]:
    """List the modules of a model that hold the experts of a layer."""
    return [module for module in model.modules() if hasattr(module, "num_experts") and hasattr(module, "has_gate")]


def install(model: Any) -> None:
    """Have the layers of experts that `takes` names compute by `mixed`, instead of by transformers' function."""
    for module in experts_of(model):
        if takes(module):
            module.forward = partial(mixed, module)


def takes(module: Any) -> bool:
    """Whether `grouped` computes what this module of transformers does: gated experts without biases, whose products it groups itself."""
    grouped_there = getattr(module.config, "_experts_implementation", None) == "grouped_mm"
    return grouped_there and module.has_gate and not module.has_bias and module.gate_up_proj.dtype == module.down_proj.dtype


def mixed(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Compute tokens `[N, H]`, each by `k` experts `[N, k]`, and sum their results by the weights `[N, k]` in a fixed order."""
    chosen = top_k_index.shape[-1]
    results = grouped(module, hidden_states, top_k_index.reshape(-1), chosen) * top_k_weights.reshape(-1, 1)
    return results.view(-1, chosen, results.shape[-1]).sum(1).to(hidden_states.dtype)


def grouped(module: Any, rows: torch.Tensor, experts: torch.Tensor, each: int = 1) -> torch.Tensor:
    """Compute rows `[n, H]`, each by `each` of the module's experts `[n × each]`; equal rows and experts give equal bits."""
    experts, order = experts.sort(stable=True)
    back = inverse(order)
    ends = torch.searchsorted(experts, torch.arange(1, module.num_experts + 1, device=experts.device), out_int32=True)
    up, down = (one if module.is_transposed else one.transpose(-2, -1) for one in (module.gate_up_proj, module.down_proj))
    inner = module._apply_gate(product(spread(rows.to(up.dtype), order, back, each), up, offs=ends))
    return spread(product(inner, down, offs=ends), back, order).to(rows.dtype)


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Invert a permutation `[n]`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


def spread(rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int = 1) -> torch.Tensor:
    """Copy each of the rows `[n, H]` so many times and put the copies in an `order`, of which `back` is the inverse; `[n × copies, H]`.

    >>> order = torch.tensor([2, 0, 1, 3])
    >>> spread(torch.tensor([[1.0], [2.0]]), order, inverse(order), copies=2).flatten().tolist()
    [2.0, 1.0, 1.0, 2.0]
    """
    found: torch.Tensor = _Spread.apply(rows, order, back, copies)
    return found


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        own = grads[0][back]
        return own if ctx.copies == 1 else own.view(-1, ctx.copies, own.shape[-1]).sum(1), None, None, None
