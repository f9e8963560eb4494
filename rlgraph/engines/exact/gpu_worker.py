"""vLLM's worker of one GPU with kernels whose rows do not depend on the batch: those that an exact trainer computes with too.

vLLM's own mode for this (VLLM_BATCH_INVARIANT) computes every product by a slower kernel, and still has norms that depend on the batch.
"""

from typing import Any

import torch

from rlgraph.engines.exact.gpu_products import exchange_engines_lone_rows, forbid_split_sums
from rlgraph.engines.exact.rules import check_machine, table_of
from rlgraph.engines.vllm.gpu_worker import GpuWorker

EVERY = 1 << 30  # tokens of a step: more than there are


class ExactWorker(GpuWorker):
    """Named as `worker_cls`: a `GpuWorker` for engines that a policy with exact=True follows."""

    def init_device(self) -> None:
        check_machine()
        exchange_norms()
        keep_tiles()
        super().init_device()

    def load_model(self, *args: Any, **settings: Any) -> None:
        forbid_split_sums()
        super().load_model(*args, **settings)
        exchange_tables(self.get_model(), self.model_config.hf_text_config)
        exchange_engines_lone_rows(self.get_model())


def exchange_norms() -> None:
    """Compute norms by the kernel that the trainer has."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    from rlgraph.engines.exact.gpu_norm import norm

    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        out, _ = norm(x, self.weight.data, self.variance_epsilon, residual)
        return out if residual is None else (out, residual)

    RMSNorm.forward_cuda = forward


def keep_tiles() -> None:
    """Have FlashAttention 3 take the same tiles in each step, and never split keys."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    from rlgraph.engines.exact.gpu import kernel_seqlen

    own = FlashAttentionMetadataBuilder.build

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        longest = common_attn_metadata.max_query_len
        common_attn_metadata.max_query_len = kernel_seqlen(self.headdim, longest)
        self.max_num_splits, self.max_cudagraph_size = 1, EVERY
        if not self.use_full_cuda_graph:  # then schedules would be made for any number of splits
            self.aot_schedule = False
        try:
            made = own(self, common_prefix_len, common_attn_metadata, fast_build)
        finally:
            common_attn_metadata.max_query_len = longest
        made.max_query_len, made.max_num_splits = kernel_seqlen(self.headdim, longest), 1
        return made

    FlashAttentionMetadataBuilder.build = build


def exchange_tables(model: torch.nn.Module, config: Any) -> None:
    """Rotate queries and keys by the table that the trainer has."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module.cos_sin_cache.copy_(table_of(config, module.cos_sin_cache.dtype, module.cos_sin_cache.device))
