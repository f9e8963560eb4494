"""Layers that compute again in the backward pass: all of them, or the part that is cheap for its bytes.

Of Qwen3-4B in bfloat16 a layer keeps 129 KB of a token. For a byte, the result of attention costs as many operations as the sequence has
tokens, and that of a product twice its inner size by its itemsize: of the products of attention 2560 to 4096, of gate and up 2560. These
two, with what follows from them, are 78 KB of the 129, so they are computed again, and so is what a kernel computes as fast as it reads:
norms, rotations, casts. "selective" keeps 31 KB, and computes 100 of the 235 million operations of a token again at 4096 tokens, 100 of
470 at 32768.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from rlgraph.settings import Recompute

KERNELS = frozenset(
    (
        "rlgraph::flash4_forward",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
    )
)
SOFTMAX = frozenset(("aten::_softmax", "aten::_safe_softmax"))  # of attention in plain operations, whose scores are never kept
PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2)}  # and the places of their matrices
WIDENS = 16  # times what it reads: a product that gives more costs little for its bytes, as the second matrix of an adapter does


class Keeps:
    """Which results one pass of one layer keeps: those of attention, of the products before it, and, `with_output`, of the one after it.

    The operations of a layer come in one order, of which this counts; the forward pass and the backward pass count by themselves.
    """

    def __init__(self, *, with_output: bool) -> None:
        self._after = 1 if with_output else 0  # products after attention that are still to be kept
        self._attended, self._left = {False: False, True: False}, {False: self._after, True: self._after}

    def __call__(self, context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        again, kept = context.is_recompute, False
        name = operation.name().partition(".")[0] if isinstance(operation, torch._ops.OpOverload) else ""
        if name in KERNELS or name in SOFTMAX:
            self._attended[again], kept = True, name in KERNELS
        elif name in PRODUCTS:
            first, second = (given[place] for place in PRODUCTS[name])
            kept = bool(second.shape[1] <= WIDENS * first.shape[1])
            if self._attended[again]:
                kept = kept and self._left[again] > 0
                self._left[again] -= kept
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def prepare_layers(model: Any, layers: Any, *, recompute: Recompute, compiled: bool, tensor_parallel: int = 1) -> None:
    """Make the layers recompute in the backward pass, or compile them; call it before they are sharded.

    Ranks that share matrices sum what the product after attention gives: each would keep a summand of all tokens, and computes it again.
    """
    chosen: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        chosen["context_fn"] = partial(_contexts, tensor_parallel == 1)
    if recompute == "selective" and compiled:  # inside of what is compiled: outside, its operations could not be told apart
        for layer in layers:
            layer.forward = _remembering(layer.forward, chosen)
    elif recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
    for layer in layers:
        layer.training = bool(recompute)  # of the layer alone, not of what is in it: recomputing is off otherwise, dropout stays off
        if compiled:
            layer.compile(dynamic=True)


def _contexts(with_output: bool) -> Any:
    return create_selective_checkpoint_contexts(Keeps(with_output=with_output))


def _remembering(forward: Callable[..., Any], chosen: dict[str, Any]) -> Callable[..., Any]:
    def run(*given: Any, **named: Any) -> Any:
        return checkpoint(forward, *given, **named, **chosen) if torch.is_grad_enabled() else forward(*given, **named)

    return run
