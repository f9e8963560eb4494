"""Record steps that read prompts as CUDA graphs, as vLLM does with steps that only decode.

A later turn of a conversation, or a batch that joins, is read while other sequences decode. Left to vLLM 0.26 such a step is recorded
as if each sequence read one token. FlashAttention 3 then leaves the causal mask out, and sums up split keys for one token of each
sequence alone: replayed, prompts give wrong tokens. So here some sequence reads two tokens in what is recorded, keys are not split,
and the kernels' schedule is made for just that at every replay; how much each sequence reads they take from the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np

from rlgraph import notices
from rlgraph.engines.vllm.arguments import mixed_sequences, mixed_sizes

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

    class Manager(cudagraph_utils.ModelCudaGraphManager):
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

    class State(default.DefaultModelState):
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
