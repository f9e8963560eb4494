"""Layers that compute again in the backward pass: all of them, or the part that is cheap for its bytes.

Of Qwen3-4B in bfloat16 a layer keeps 129 KB of a token. For a byte, the result of attention costs as many operations as the sequence has
tokens, and that of a product twice its inner size by its itemsize: of the products of attention 2560 to 4096, of gate and up 2560. These
two, with what follows from them, are 78 KB of the 129, so they are computed again, and so is what a kernel computes as fast as it reads:
norms, rotations, casts. "selective" keeps 31 KB, and computes 100 of the 235 million operations of a token again at 4096 tokens, 100 of
470 at 32768.
"""

from collections.abc import Callable
from functools import partial, wraps
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


class ChangedInPlaceError(Exception):
    """A layer changed a kept result in place, so that the backward pass would begin with the changed one."""


class SavedActivations:
    """Which results one pass of one layer keeps: those of attention, of the products before it, and, `with_output`, of the one after it.

    The operations of a layer come in one order, of which this counts; the forward pass and the backward pass count by themselves.
    `changed` has the numbers of the results that the layer changes in place, as OLMo clips queries: these are computed again. The pass
    that finds one adds its number and raises ChangedInPlaceError. None: nothing is changed in place.
    """

    def __init__(self, *, with_output: bool, changed: set[int] | None = None) -> None:
        self._after = 1 if with_output else 0  # products after attention that are still to be kept
        self._attended, self._left = {False: False, True: False}, {False: self._after, True: self._after}
        self._changed, self._count = changed, {False: 0, True: 0}
        self._numbers: dict[int, int] = {}  # of the kept results, by their memory

    def __call__(self, context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
        again, kept = context.is_recompute, self._keeps(context.is_recompute, operation, *given)
        if self._changed is None:
            return _policy(kept)
        self._find_change(operation, given, named)
        if kept:
            number, self._count[again] = self._count[again], self._count[again] + 1
            kept = number not in self._changed
            output = getattr(context, "op_output", None)  # which older versions of torch may not tell
            outputs = output if isinstance(output, tuple | list) else (output,)
            if kept:
                self._numbers |= {_memory(each): number for each in outputs if isinstance(each, torch.Tensor)}
        return _policy(kept)

    def _find_change(self, operation: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._changed is None or not isinstance(operation, torch._ops.OpOverload) or not operation._schema.is_mutable:
            return
        arguments = operation._schema.arguments
        by_name = dict(zip((argument.name for argument in arguments), given, strict=False)) | named
        written = [by_name.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        found = {_memory(each) for each in written if isinstance(each, torch.Tensor)} & self._numbers.keys()
        if found:
            self._changed |= {self._numbers[memory] for memory in found}
            raise ChangedInPlaceError

    def _keeps(self, again: bool, operation: Any, *given: Any) -> bool:
        kept = False
        name = operation.name().partition(".")[0] if isinstance(operation, torch._ops.OpOverload) else ""
        if name in KERNELS or name in SOFTMAX:
            self._attended[again], kept = True, name in KERNELS
        elif name in PRODUCTS:
            first, second = (given[place] for place in PRODUCTS[name])
            kept = bool(second.shape[1] <= WIDENS * first.shape[1])
            if self._attended[again]:
                kept = kept and self._left[again] > 0
                self._left[again] -= kept
        return kept


def _policy(kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def prepare_layers(layers: Any, *, recompute: Recompute, compiled: bool, tensor_parallel: int = 1) -> None:
    """Make the layers recompute in the backward pass, or compile them; call it before they are sharded.

    Ranks that share matrices sum what the product after attention gives: each would keep a summand of all tokens, and computes it again.
    transformers' own recomputing is not used: it is for modules in training, whose layers apply dropout.
    """
    for layer in layers:
        if recompute:  # inside of what is compiled: outside, its operations could not be told apart
            changed = None if compiled else set[int]()  # the compiler lets nothing change in place
            contexts = {"context_fn": partial(_contexts, tensor_parallel == 1, changed)} if recompute == "selective" else {}
            layer.forward = _with_cache(layer.forward, contexts)
            layer.forward = layer.forward if compiled else _run_twice(layer.forward)
            layer.gradient_checkpointing = True  # tells the model that passes are computed again
        if compiled:
            layer.compile(dynamic=True)


def _contexts(with_output: bool, changed: set[int] | None) -> Any:
    return create_selective_checkpoint_contexts(SavedActivations(with_output=with_output, changed=changed))


def _with_cache(forward: Callable[..., Any], contexts: dict[str, Any]) -> Callable[..., Any]:
    @wraps(forward)
    def run(*given: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*given, **named)
        return checkpoint(forward, *given, use_reentrant=False, **contexts, **named)

    return run


def _run_twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a layer again for each result that its first pass finds changed in place."""

    @wraps(forward)
    def run(*given: Any, **named: Any) -> Any:
        while True:
            try:
                return forward(*given, **named)
            except ChangedInPlaceError:
                continue

    return run
