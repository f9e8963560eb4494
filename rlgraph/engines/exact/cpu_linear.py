"""Linear maps by the kernel of vLLM on a CPU, whose results do not depend on the number of rows; backward by PyTorch."""

from typing import Any

import torch
from vllm import _custom_ops as kernels

from rlgraph.engines.exact.cpu_rows import in_company

PRIMITIVES = 32  # that a kernel keeps, one for each number of rows: as many as the engine's


class ExactLinear(torch.nn.Linear):
    """A linear map that computes each row as the engine does. Its weights are packed at the first pass after `forget`."""

    packed: Any = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            self.packed = kernels.create_onednn_mm(self.weight.detach().t(), PRIMITIVES)
        out: torch.Tensor = _Product.apply(states, self.weight, self.bias, self.packed)
        return out

    def forget(self) -> None:
        """Let go of the packed weights: the kernel would go on with them after the weights have changed."""
        self.packed = None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: Any) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        ctx.has_bias = bias is not None
        given = None if bias is None else bias.detach()
        return in_company(lambda rows: kernels.onednn_mm(packed, rows, given), states.detach())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (states, weight) = grads, ctx.saved_tensors
        rows, of_rows = states.flatten(0, -2), grad.flatten(0, -2)
        of_weight = of_rows.t() @ rows if ctx.needs_input_grad[1] else None
        return grad @ weight if ctx.needs_input_grad[0] else None, of_weight, of_rows.sum(0) if ctx.has_bias else None, None
