"""What vLLM's CPU build packs for its kernels at the start alone: after new weights were loaded it has to be packed again.

Without it a head that is tied to the embeddings keeps the old weights, and experts are read in the wrong order, without an error.
"""

from collections.abc import Callable
from typing import Any

import torch

from rlgraph.engines.exact.cpu_rows import in_company


def pack_again(model: Any, config: Any, *, tied: bool) -> None:
    """Pack the embeddings of a model whose head they are (`tied`), and the experts of each layer."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    with set_current_vllm_config(config):
        for module in model.modules():
            if tied and isinstance(module, VocabParallelEmbedding):
                module.quant_method.process_weights_after_loading(module)
            if isinstance(module, RoutedExperts):
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
    pair_single_rows(model)


class _InCompany:
    """The product of a layer whose result for a row does not depend on whether it is alone."""

    def __init__(self, own: Callable[..., torch.Tensor]) -> None:
        self._own = own

    def __call__(self, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return in_company(lambda rows: self._own(rows, weight, bias), states)


def pair_single_rows(model: Any) -> None:
    """Let each linear layer compute one row alone as it does among others: what packs a layer gives it a product of its own."""
    for module in model.modules():
        own = module.__dict__.get("cpu_linear")
        if own is not None and not isinstance(own, _InCompany):
            module.cpu_linear = _InCompany(own)
