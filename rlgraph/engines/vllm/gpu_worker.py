"""The worker of vLLM for one GPU: it records steps that read prompts, writes down routes, and computes exactly.

Steps that read prompts are recorded as CUDA graphs, as vLLM does with steps that only decode. A later turn of a conversation, or a batch
that joins, is read while other sequences decode. vLLM 0.26 records such a step as if each sequence read one token. FlashAttention 3 then
leaves the causal mask out, and sums up split keys for one token of each sequence: replayed, prompts give wrong tokens. So here some
sequence reads two tokens in what is recorded, keys are not split, and the schedule of the kernels is made for this at every replay; how
much each sequence reads they take from the GPU.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu_worker import Worker

from rlgraph import notices
from rlgraph.engines.vllm.arguments import mixed_sequences, mixed_sizes
from rlgraph.engines.vllm.routes import write_down
from rlgraph.engines.vllm.weights import Extension

NOT_RECORDED = "steps that read prompts beside decoding are not recorded as CUDA graphs, which makes them slower: {}"
MIN_MAX_SEQLEN_Q = 2  # tokens of the longest prompt, as kernels are told: with more than one they keep the causal mask


def record_prompts() -> None:
    """Have the engine that this process makes next record such steps, if its vLLM is one that this was made for: 0.26, on a GPU."""
    if not version("vllm").startswith("0.26."):
        notices.here.say(NOT_RECORDED.format(f"it is written for vLLM 0.26 and this is {version('vllm')}"))
        return
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner
    from vllm.v1.worker.gpu.model_states import default

    if model_runner.ModelCudaGraphManager is not cudagraph_utils.ModelCudaGraphManager:
        return  # it was asked for before
    if get_flash_attn_version() != 3:
        notices.here.say(NOT_RECORDED.format(f"it needs FlashAttention 3 and this GPU has {get_flash_attn_version()}"))
        return
    full = CUDAGraphMode.FULL

    class Manager(cudagraph_utils.ModelCudaGraphManager):  # type: ignore[misc]
        """Knows steps of so many tokens, besides those in which each sequence reads one."""

        def _init_candidates(self) -> None:
            super()._init_candidates()
            most, recorded = self.max_num_reqs, cudagraph_utils.BatchExecutionDescriptor
            sizes = mixed_sizes(most, self.vllm_config.model_config.max_model_len)
            steps = [recorded(full, tokens, mixed_sequences(tokens, most)) for tokens in sizes]
            # The largest comes first: the others are recorded in its memory.
            self._capture_descs[full] = sorted([*self._capture_descs[full], *steps], key=lambda step: -step.num_tokens)
            for before, step in zip([1, *sizes], steps, strict=False):
                for tokens in range(before + 1, step.num_tokens + 1):
                    self._candidates.setdefault((tokens, 0), []).append(step)

    class State(default.DefaultModelState):  # type: ignore[misc]
        """Tells the kernels of such a step the same at every replay."""

        def prepare_attn(
            self, batch: Any, mode: Any, block_tables: Any, slot_mappings: Any, groups: Any, cache: Any, for_capture: bool = False
        ) -> Any:
            rest = block_tables, slot_mappings, groups, cache, for_capture
            read = batch.num_scheduled_tokens
            if not (for_capture or mode == full) or read.max() <= 1:
                return super().prepare_attn(batch, mode, *rest)
            with _forbid_key_splits(groups):
                return super().prepare_attn(replace(batch, num_scheduled_tokens=np.minimum(read, MIN_MAX_SEQLEN_Q)), mode, *rest)

    model_runner.ModelCudaGraphManager = Manager
    default.DefaultModelState = State


@contextmanager
def _forbid_key_splits(groups: list[list[Any]]) -> Iterator[None]:
    """Have schedules made in which the keys of a sequence are not split."""
    builders = [group.get_metadata_builder(0) for each in groups for group in each]
    splits = [builder.max_num_splits for builder in builders]
    for builder in builders:
        builder.max_num_splits = 1
    try:
        yield
    finally:
        for builder, count in zip(builders, splits, strict=True):
            builder.max_num_splits = count


# vLLM's worker of one GPU, as engines start it: it takes weights where they lie, and records steps that read prompts.

log = logging.getLogger("rlgraph.engines")


class GpuWorker(Extension, Worker):  # type: ignore[misc]
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
