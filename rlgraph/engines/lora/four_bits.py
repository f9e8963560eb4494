"""Frozen matrices in NF4, 4 bits a number with a float32 scale for each block of 64, by bitsandbytes."""

from typing import Any

import torch

from rlgraph.engines.low_bits import bitsandbytes

BLOCK = 64


class FourBits:
    """A matrix `[out, in]` in NF4: it multiplies as a matrix of `dtype` that is made for each product, and again for its gradient.

    The numbers are made of float32, so that any copy of the same matrix gives the same.
    """

    def __init__(self, matrix: torch.Tensor, dtype: torch.dtype) -> None:
        self._library = bitsandbytes()
        self.codes, self.state = _quantised(self._library, matrix)
        self.state.dtype = dtype

    def linear(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute `states Wᵀ + bias`, with a gradient of `states`."""
        found: torch.Tensor = self._library.matmul_4bit(states, self.codes, quant_state=self.state, bias=bias)
        return found


def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that `FourBits` multiplies with in `dtype`."""
    library = bitsandbytes()
    codes, state = _quantised(library, matrix)
    found: torch.Tensor = library.functional.dequantize_4bit(codes, state)
    return found.to(dtype)


def _quantised(library: Any, matrix: torch.Tensor) -> tuple[torch.Tensor, Any]:
    codes, state = library.functional.quantize_4bit(matrix.detach().float().contiguous(), blocksize=BLOCK, quant_type="nf4")
    return codes, state
