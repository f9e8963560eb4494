"""What vLLM's CPU build packs for its kernels at the start alone: after new weights were loaded it has to be packed again.

Without it a head that is tied to the embeddings keeps the old weights, and experts are read in the wrong order, without an error.
"""

from typing import Any


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
