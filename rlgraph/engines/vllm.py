"""Generate with vLLM: an LLMEngine inside this process, driven step by step.

vLLM patches torch for its whole process (thread count, random seed, garbage collector): never share it with a trainer.
"""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rlgraph.engines.base import Response, Sampling, check_requests, check_weights
from rlgraph.engines.pretrained import check_model, parameter_shapes
from rlgraph.errors import GraphError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and model in this process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class VllmEngine:
    """A `GenerateEngine` on vLLM. Make one a process.

    `max_model_len` is the context (None: the model's), `kv_cache_bytes` what the keys and values may take. `threads` is the
    number of cores on a CPU; it is set for the process as a whole. Log-probs are those of the distribution sampled from.

    Raises DataError for a folder that is no model, GraphError for tensor parallelism on a CPU.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_model_len: int | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        seed: int = 0,
        kv_cache_bytes: int = 1 << 30,
        threads: int | None = None,
        tensor_parallel: int = 1,
        max_sequences: int = 256,
    ) -> None:
        self._summary = check_model(path)
        self._shapes = parameter_shapes(path)
        _prepare_process(threads)

        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

        context = max_model_len or self._summary.context_length
        self._on_cpu = current_platform.is_cpu()
        if self._on_cpu and tensor_parallel > 1:
            raise GraphError(f"VllmEngine(tensor_parallel={tensor_parallel}): on a CPU an engine is one process; use 1 and more engines")
        arguments = EngineArgs(
            model=str(path),
            skip_tokenizer_init=True,
            generation_config="vllm",  # not the folder's: only `Sampling` says how to sample
            max_model_len=context,
            dtype=dtype,
            seed=seed,
            kv_cache_memory_bytes=kv_cache_bytes,
            tensor_parallel_size=tensor_parallel,
            max_num_seqs=max_sequences,
            block_size=32,  # the smallest that the CPU build takes; prompts share prefixes in whole blocks
            enable_prefix_caching=True,
            enforce_eager=self._on_cpu,
            # In a split prompt vLLM rewinds the request's random generator, which one of a CPU cannot do.
            enable_chunked_prefill=not self._on_cpu,
            max_num_batched_tokens=max(4096, context),
            async_scheduling=False,
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        with warnings.catch_warnings():
            # vLLM looks at every attribute of every module, those included that warn when looked at.
            warnings.simplefilter("ignore", FutureWarning)
            self._engine = LLMEngine.from_engine_args(arguments)
        self._requests = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Response]:
        """Return one response for each prompt, in the order given; see `GenerateEngine`."""
        check_requests(prompts, seeds, self.context_length(), self._summary.vocab_size)
        ids = [str(self._requests + row) for row in range(len(prompts))]
        self._requests += len(prompts)
        for request, prompt, seed in zip(ids, prompts, seeds, strict=True):
            self._engine.add_request(request, {"prompt_token_ids": list(prompt)}, self._sampling_params(sampling, seed))
        done: dict[str, Response] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    done[output.request_id] = _response(output.outputs[0])
        return [done[request] for request in ids]

    def _sampling_params(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._summary.eos_token_ids)],
            ignore_eos=sampling.ignore_eos,
            seed=seed,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take new weights; every later token comes from them. Raises DataError unless they are all and full."""
        check_weights(weights, self._shapes)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
        if self._on_cpu and self._summary.tied:
            self._pack_head()
        self._engine.reset_prefix_cache()

    def _pack_head(self) -> None:
        """Pack the new embeddings into the head's kernel, which the CPU build leaves as they were before."""
        from vllm.config import set_current_vllm_config

        head = self._engine.model_executor.driver_worker.worker.get_model().lm_head
        with set_current_vllm_config(self._engine.vllm_config):
            head.quant_method.process_weights_after_loading(head)

    def context_length(self) -> int:
        """Return how many tokens prompt and response may have together."""
        length: int = self._engine.vllm_config.model_config.max_model_len
        return length

    def close(self) -> None:
        """Free the model."""
        self._engine.engine_core.shutdown()


def _prepare_process(threads: int | None) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", which a CPU does not need
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # without it vLLM goes back to one thread
        torch.set_num_threads(threads)


def _response(output: Any) -> Response:
    tokens = list(output.token_ids)
    return Response(tokens, [chosen[token].logprob for token, chosen in zip(tokens, output.logprobs, strict=True)])
