"""Guessed tokens in vLLM 0.26, whose model runner V2 has no prompt look-up, and whose rejection sampler draws other noise for a guess.

The runner asks this file's speculator for guesses, and its sampler draws at every place that a step has read as it does without guesses.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from rlgraph.engines.vllm.arguments import recorded_sizes
from rlgraph.errors import GraphError
from rlgraph.values.drafts import PromptLookup, accept_draft, guesses

REFUSED = "ngram/ngram_gpu speculative decoding"  # what vLLM 0.26 says that its runner V2 does not have: it has it from here


def arguments(drafts: PromptLookup, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` for an engine of these other ones, made ready to guess: steps with guesses are recorded too."""
    install()
    most, recorded = machine["max_num_seqs"], machine["compilation_config"]
    sizes = {(drafts.tokens + 1) * size for size in recorded_sizes(min(drafts.below, most))}
    lookup = {"prompt_lookup_max": drafts.longest, "prompt_lookup_min": drafts.shortest}
    config = {"method": "ngram_gpu", "num_speculative_tokens": drafts.tokens, **lookup}
    return {
        "speculative_config": {**config, "num_speculative_tokens_per_batch_size": drafts.schedule(most)},
        "compilation_config": {**recorded, "cudagraph_capture_sizes": sorted({*recorded["cudagraph_capture_sizes"], *sizes})},
    }


def install() -> None:
    """Have the engines that this process makes next guess by `PromptLookup` if they are asked to. Raises GraphError for another vLLM."""
    if not version("vllm").startswith("0.26."):
        raise GraphError(f"drafts: they are written for vLLM 0.26 and this is {version('vllm')}; leave them out")
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    if model_runner.RejectionSampler is not RejectionSampler:
        return  # it was asked for before
    lacking, lookup = VllmConfig._get_v2_model_runner_unsupported_features, _lookup(BaseSpeculator)
    VllmConfig._get_v2_model_runner_unsupported_features = lambda config: [what for what in lacking(config) if what != REFUSED]
    model_runner.init_speculator = lambda config, device: lookup(config)
    model_runner.RejectionSampler = _draft_class(RejectionSampler)


def connect(runner: Any) -> None:
    """Let the guesses see the tokens of the runner's sequences."""
    runner.speculator.sequences = runner.req_states


def _lookup(base: Any) -> Any:
    class Lookup(base):
        """Guesses from the tokens that the runner has of each sequence."""

        supports_mm_inputs, draft_logits = False, None

        def __init__(self, config: Any) -> None:
            self.config, self.model = config.speculative_config, torch.nn.Module()
            self.sequences: Any = None  # the runner's, once it is made

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None: ...

        def capture(self) -> None: ...

        def propose(self, input_batch: Any, *given: Any, dummy_run: bool = False, **named: Any) -> torch.Tensor:
            config, rows = self.config, input_batch.idx_mapping
            if dummy_run or self.sequences is None:
                return torch.zeros(len(rows), config.num_speculative_tokens, dtype=torch.int64, device=rows.device)
            width = int(input_batch.seq_lens_cpu_upper_bound.max()) + config.num_speculative_tokens + 1
            tokens = self.sequences.all_token_ids.gpu[:, :width][rows].long()
            n = {"longest": config.prompt_lookup_max, "shortest": config.prompt_lookup_min}
            return guesses(tokens, self.sequences.total_len.gpu[rows], config.num_speculative_tokens, **n)

    return Lookup


def _draft_class(base: Any) -> Any:
    class Drawn(base):
        """Draws at every place as the sampler does without guesses."""

        def __call__(self, logits: torch.Tensor, input_batch: Any, draft_logits: Any = None) -> Any:
            from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
            from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
            from vllm.v1.worker.gpu.sample.output import SamplerOutput

            sampler, states, batch = self.sampler, self.sampler.sampling_states, input_batch
            expanded, local = batch.expanded_idx_mapping, batch.expanded_local_pos
            places, read = batch.positions[batch.logits_indices], batch.input_ids[batch.logits_indices]
            processed = sampler.apply_sampling_params(logits, expanded, batch.idx_mapping_np, places, read, local)
            noise = states.temperature.gpu, states.seeds.gpu
            drawn = gumbel_sample(processed, expanded, *noise, places, apply_temperature=False, use_fp64=sampler.use_fp64_gumbel)
            tokens, count = accept_draft(drawn, read.long(), batch.cu_num_logits, self.num_speculative_steps)
            log_probs = self._get_logprobs_tensors(batch, tokens, count, processed)
            prompts = sampler.req_states.prefill_len.gpu
            done = get_num_sampled_and_rejected(count, batch.seq_lens, batch.cu_num_logits, batch.idx_mapping, prompts)
            return SamplerOutput(
                sampled_token_ids=tokens, logprobs_tensors=log_probs, num_nans=None, num_sampled=done[0], num_rejected=done[1]
            )

    return Drawn
