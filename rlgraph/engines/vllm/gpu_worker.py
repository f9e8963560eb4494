"""vLLM's worker of one GPU, also as one that writes down routes, and one that computes exactly."""

import logging
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from rlgraph.engines.vllm.mixed_cudagraph_patch import record_prompts
from rlgraph.engines.vllm.routes import write_down
from rlgraph.engines.vllm.weights import Extension

# vLLM's worker of one GPU, as engines start it: it takes weights where they lie, and records steps that read prompts.

log = logging.getLogger("rlgraph.engines")


class GpuWorker(Extension, Worker):
    """Named as `worker_cls` and made by vLLM, in the engine's process or, where it spans GPUs, in one for each of them."""

    def init_device(self) -> None:
        if self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            record_prompts()
        super().init_device()

    def sleep(self, level: int = 1) -> None:
        """Free device memory. vLLM compares what the whole device has free before and after, in which other programs of the device show."""
        try:
            super().sleep(level)
        except AssertionError as error:
            if "Memory usage increased after sleeping" not in str(error):
                raise
            log.warning("the engine sleeps, and its device has less free memory than before: another program took more meanwhile")


# vLLM's worker of one GPU whose routers write down what they choose, in recorded decode steps too.


class RoutesWorker(GpuWorker):
    """Named as `worker_cls`: a `GpuWorker` for engines with routes."""

    chosen: Any = None

    def load_model(self, **settings: Any) -> None:
        super().load_model(**settings)
        self.chosen = write_down(self.get_model(), self.vllm_config)  # here, so that CUDA graphs record it


# vLLM's worker of one GPU with kernels whose rows do not depend on the batch: those that an exact trainer computes with too.
#
# vLLM's own mode for this (VLLM_BATCH_INVARIANT) computes every product by a slower kernel, and still has norms that depend on the batch.

EVERY = 1 << 30  # tokens of a step: more than there are


class ExactWorker(GpuWorker):
    """Named as `worker_cls`: a `GpuWorker` for engines that a policy with exact=True follows."""

    def init_device(self) -> None:
        from rlgraph.engines.exact.rules import check_machine

        check_machine()
        exchange_norms()
        keep_tiles()
        super().init_device()

    def load_model(self, *args: Any, **settings: Any) -> None:
        from rlgraph.engines.exact.gpu_products import exchange_engines_lone_rows, forbid_split_sums

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

    from rlgraph.engines.exact.rules import table_of

    for module in model.modules():
        if isinstance(module, RotaryEmbeddingBase):
            module.cos_sin_cache.copy_(table_of(config, module.cos_sin_cache.dtype, module.cos_sin_cache.device))
