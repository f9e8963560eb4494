"""Generate with vLLM: an LLMEngine inside this process, driven step by step.

vLLM patches torch for its whole process (thread count, random seed, garbage collector): never share it with a trainer.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines import copy_plan
from rlgraph.engines.api import Finish, GenerateEngine, Images, Request, Response, check_request, check_weights
from rlgraph.engines.hf.images import mark_of, read_images
from rlgraph.engines.hf.model_files import header_shapes, in_text_model, is_head
from rlgraph.engines.hf.pretrained import check_model, other_tensors, parameter_shapes
from rlgraph.engines.hf.unloaded import AXES, PARTS
from rlgraph.engines.lora import MergedWeights, describe_weights
from rlgraph.engines.precision import in_company
from rlgraph.engines.stop_strings import StopStrings, stop_strings
from rlgraph.engines.vllm import arguments as engine_arguments
from rlgraph.engines.vllm import drafts as vllm_drafts
from rlgraph.engines.vllm import weights as fp8_weights
from rlgraph.engines.vllm.routes import RouteRecorder
from rlgraph.engines.vllm.weights import SharedWeights
from rlgraph.errors import DataError, GraphError
from rlgraph.values.drafts import PromptLookup
from rlgraph.values.sampling import Running, Sampling

# Requests as vLLM's core takes them: checked once for each way to sample, and copied for each request.


class StopTokens(list[int]):
    """A list of token ids in which vLLM looks each new token up, in the time of a set; a process of another GPU gets a plain list.

    >>> 4 in StopTokens([3, 4]), StopTokens([3]) == [3]
    (True, True)
    """

    def __init__(self, ids: Iterable[int]) -> None:
        super().__init__(ids)
        self._set = frozenset(self)

    def __contains__(self, token: object) -> bool:
        return token in self._set

    def __reduce__(self) -> tuple[type, tuple[list[int]]]:
        return list, ([*self],)


class CoreRequests:
    """Makes the requests of an engine's core. A response ends with one of the tokens `ends`, unless its sampling ignores these.

    vLLM takes about as long to check a request as a small model takes for a decode step, and a conversation sends one for each turn. So
    vLLM sees the first request of each way to sample. The others are copies of that, with a prompt, a length and a seed of their own;
    their prompts are checked by the caller.
    """

    def __init__(self, llm: Any, ends: tuple[int, ...]) -> None:
        self._llm, self._ends = llm, ends
        self._checked: dict[tuple[object, ...], Any] = {}  # by way to sample
        self._seen: tuple[str, Any] = "", None  # what was read last: the responses to a prompt share it
        self._numbers = count()

    def make(self, request: Request, salt: str) -> Any:
        """Make vLLM's `EngineCoreRequest`, under a name that no other has. It shares prefixes with requests of the same `salt`."""
        sampling = request.sampling
        way = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.stop_token_ids, sampling.ignore_eos)
        if way not in self._checked:
            prompt, tasks = {"prompt_token_ids": list(request.prompt)}, self._llm.get_supported_tasks()
            checked = self._llm.input_processor.process_inputs(request.id, prompt, self._params(sampling), supported_tasks=tasks)
            # Only now: with the ends that a model's folder names vLLM makes a list of its own.
            checked.sampling_params.stop_token_ids = StopTokens(checked.sampling_params.stop_token_ids)
            self._checked[way] = checked
        made = copy(self._checked[way])
        made.sampling_params = params = copy(made.sampling_params)
        params.max_tokens, params.seed = sampling.max_tokens, request.seed
        made.request_id, made.external_req_id = f"{request.id}-{next(self._numbers)}", request.id
        made.prompt_token_ids, made.cache_salt = list(request.prompt), salt
        if request.images is not None:
            made.mm_features = self._features(request, request.images)
        return made

    def _features(self, request: Request, images: Images) -> Any:
        """Have vLLM's processor read the images, without the rest of the prompt, in which the model may have written a mark itself.

        Raises DataError if it writes other tokens for them than ours.
        """
        if images.urls != self._seen[0]:
            given = {
                "prompt_token_ids": [mark_of(self._llm.vllm_config.model_config.model)] * len(images.places),
                "multi_modal_data": {"image": read_images(images.urls)},
            }
            params, tasks = self._params(request.sampling), self._llm.get_supported_tasks()
            self._seen = images.urls, self._llm.input_processor.process_inputs(request.id, given, params, supported_tasks=tasks)
        read = self._seen[1]
        own = [token for begin, end in images.places for token in request.prompt[begin:end]]
        if list(read.prompt_token_ids) != own:
            raise DataError(
                f"request '{request.id}': vLLM's processor makes {len(read.prompt_token_ids)} tokens of its images, transformers' "
                f"{len(own)}; use engine='transformers', or versions of both that agree"
            )
        found, before = [], 0  # tokens of the images before
        for feature, (begin, end) in zip(read.mm_features, images.places, strict=True):
            position = replace(feature.mm_position, offset=feature.mm_position.offset - before + begin)
            found.append(replace(feature, mm_position=position))
            before += end - begin
        return found

    def make_next_turn(self, request: Request, name: str, tokens: list[int]) -> Any:
        """Make the request by which the one of this `name` goes on: it reads `tokens` after what it has read."""
        made = self.make(request, "")
        made.request_id, made.prompt_token_ids, made.resumable = name, tokens, True
        return made

    def _params(self, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)],
            ignore_eos=sampling.ignore_eos,
            seed=0,  # replaced; a request with a seed is sampled by a generator of its own
            logprobs=0,
            detokenize=False,
            skip_clone=True,  # nobody else has it, and a deep copy of many stop tokens takes longer than a decode step
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


# What vLLM has read of conversations, kept between their turns: the next turn reads only what is new.
#
# A prefix cache keeps whole blocks alone, of 32 tokens on a CPU, so that each turn reads half a block again on average. A resumable request
# keeps all of it, in memory that nothing else can take. So it is given back where others need the room, and the prefix cache has its
# whole blocks from then on. Proven for the scheduler and the runner of vLLM on a CPU, which are in this process.

LEAST_FREE = 0.25  # of the blocks, for what runs: a turn given back in vain reads half a block more


class KVCacheHolds:
    """The requests of conversations that wait for their next turn, by vLLM's names; the longest waiting one first."""

    def __init__(self, llm: Any) -> None:
        self._client = llm.engine_core
        self._scheduler = llm.engine_core.engine_core.scheduler
        self._runner = llm.model_executor.driver_worker.worker.model_runner
        self._names: dict[str, str] = {}  # by conversation

    def __len__(self) -> int:
        return len(self._names)

    def hold(self, conversation: str, name: str) -> None:
        """Keep a request whose turn has ended, and of its conversation no other."""
        self.give_back([conversation])
        self._names[conversation] = name

    def next_turn(self, request: Request) -> tuple[str, list[int]] | None:
        """Give the name of the held request that this one goes on from, and the tokens that are new; None where nothing is held, and
        for one with images.

        The seed of the turn is set as that of a new request is.
        """
        name = self._names.pop(request.conversation, None)
        if name is None:
            return None
        held = self._scheduler.requests[name]
        known = held.num_computed_tokens
        if request.images is not None or known >= len(request.prompt) or list(held.all_token_ids[:known]) != list(request.prompt[:known]):
            self._client.abort_requests([name])
            return None
        generator = self._runner.requests[name].generator
        if generator is not None:
            generator.manual_seed(request.seed)
        return name, list(request.prompt[known:])

    def give_back(self, conversations: Iterable[str] | None = None) -> None:
        """Free what is held of these conversations, or of all."""
        given = list(self._names) if conversations is None else conversations
        names = [self._names.pop(conversation) for conversation in given if conversation in self._names]
        if names:
            self._client.abort_requests(names)

    def make_room(self) -> None:
        """Give back the longest waiting ones while what runs has too few blocks or places."""
        while self._names and self._is_over_budget():
            self.give_back([next(iter(self._names))])

    def _is_over_budget(self) -> bool:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        if pool.get_num_free_blocks() < LEAST_FREE * pool.num_gpu_blocks:
            return True
        waiting = len(scheduler.waiting) + len(scheduler.kv_holding_waiting)  # what is held is among these
        return len(scheduler.running) + waiting > scheduler.max_num_active_reqs


# What vLLM's CPU build packs for its kernels at the start alone: after new weights were loaded it has to be packed again.
#
# Without it a head that is tied to the embeddings keeps the old weights, and experts are read in the wrong order, without an error.


def repack_weights(model: Any, config: Any, *, tied: bool) -> None:
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


# The language model of a multimodal folder in vLLM, run as the text model that it is: no tower is built, whatever it would need.


def arguments(nested: bool) -> dict[str, Any]:
    """The arguments of `vllm.EngineArgs` for such a folder. Its weights have other names than vLLM reads; `folder_weights` has them."""
    return {"hf_overrides": language_model, "load_format": "dummy"} if nested else {}


def language_model(config: Any) -> Any:
    """Take the configuration of the language model out of that of a multimodal one; another one, by which vLLM tries this, stays."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    if text is config:
        return config
    text.architectures = [PARTS.get(text.model_type) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[text.model_type]]
    if text.model_type in PARTS:
        text.tie_word_embeddings = config.tie_word_embeddings
        text.rope_parameters = {name: value for name, value in text.rope_parameters.items() if name not in AXES}
    return text


def folder_weights(path: Path, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Read the weights of these names from a folder."""
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in header_shapes(file) if name in names}
    return found


def as_text_model(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name weights of a multimodal folder as a folder of the text model does."""
    return {in_text_model(name): tensor for name, tensor in weights.items()}


FINISHES: dict[str, Finish] = {"stop": "stop", "length": "length"}  # by vLLM's name; its others cut a response off from outside


class VllmEngine(GenerateEngine):
    """A `GenerateEngine` on vLLM, one in a process.

    `max_model_len` is the context (None: the model's). The `engines` on a GPU together take the share `memory` of its memory, and free it
    between rollouts if the pool is `shared`. In this share each engine has `copies` of the weights: its own, and the buffers in which it
    receives versions; or, where adapters arrive, its own and the `merging_bytes` of their base and versions. `kv_cache_bytes` instead sets
    the size of the KV cache. `threads` is the number of cores on a CPU, for the whole process. `random_weights` ignores the weights of the
    folder. With `weights_dtype="fp8"` the layers' matrices are kept in fp8, and each version is quantised as it is loaded. `drafts` guess
    tokens ahead. `engine_args` replace the arguments that rlgraph gives to vLLM. Log-probs are those of the sampling distribution. `exact`
    takes kernels whose log-probs a trainer can compute to the bit; on a CPU all are such. With `routes` responses tell which experts were
    chosen for each token. Prompts may have up to `images`; the towers of a folder are built only for these.

    Raises DataError for a folder that is no model, GraphError for tensor parallelism on a CPU.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_model_len: int | None = None,
        dtype: str = "bfloat16",
        seed: int = 0,
        threads: int | None = None,
        tensor_parallel: int = 1,
        max_sequences: int | None = None,
        kv_cache_bytes: int | None = None,
        memory: float | None = None,
        shared: bool = False,
        engines: int = 1,
        copies: int = 1,
        merging_bytes: int | None = None,
        random_weights: bool = False,
        exact: bool = False,
        weights_dtype: str | None = None,
        drafts: PromptLookup | None = None,
        routes: bool = False,
        images: int | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._summary, self._dtype, self._shapes = check_model(path), getattr(torch, dtype), parameter_shapes(path)
        _prepare_process(threads)
        from vllm.platforms import current_platform

        self._on_cpu = current_platform.is_cpu()
        self.parallel, self._guesses = tensor_parallel > 1, drafts is not None
        if self._on_cpu and self.parallel:
            raise GraphError(f"VllmEngine(tensor_parallel={tensor_parallel}): on a CPU an engine is one process; use 1 and more engines")
        weights = sum(torch.Size(shape).numel() for shape in self._shapes.values()) * self._dtype.itemsize
        quantised = fp8_weights.quantised_bytes(self._shapes, self._dtype.itemsize) if weights_dtype else weights
        self._own_bytes = quantised // tensor_parallel  # of each device
        share, beside = engine_arguments.share_of_memory(memory, shared), engine_arguments.beside_weights(copies, weights, merging_bytes)
        if not self._on_cpu:
            share, kv_cache_bytes = _memory_of_gpu(share, kv_cache_bytes, shared, engines, beside, self._own_bytes)
        context = max_model_len or self._summary.context_length
        machine = engine_arguments.arguments(
            on_cpu=self._on_cpu, context=context, max_sequences=max_sequences, kv_cache_bytes=kv_cache_bytes, share=share, shared=shared
        )
        machine = {**machine, **({} if self._on_cpu else engine_arguments.of_worker(exact=exact, routes=routes))}
        model = engine_arguments.of_model(path, context, dtype, seed, tensor_parallel, random_weights=random_weights)
        self._text_alone = self._summary.nested and images is None
        nested, fp8 = {**arguments(self._text_alone), **engine_arguments.of_images(images)}, fp8_weights.ARGUMENTS if weights_dtype else {}
        guessing = {} if drafts is None else vllm_drafts.arguments(drafts, machine)
        self.llm = _start_engine({**model, **machine, **nested, **fp8, **guessing, **(engine_args or {})})
        self._routes = self._connect_recorder(routes)
        # What an exact trainer computes follows the engine's passes over whole texts, and routes are told by request.
        self._held = KVCacheHolds(self.llm) if self._on_cpu and not exact and not routes else None
        self._running, self._names = dict[str, _Running](), dict[str, str]()  # by vLLM's own name of the request; that, by request id
        self._loads, self._asleep, self.decoded, self.decodings = 0, set[str](), 0, 0  # `decoded` tokens, by so many steps of a sequence
        self.copies: copy_plan.CopyPlan | None = None
        self._fp8 = fp8_weights.QuantisedWeights(self.model()) if weights_dtype and not self._on_cpu else None
        self._checked, self._copied = dict[str, torch.Tensor](), frozenset[str]()  # weights that are the model's; names that copies are of
        self._shared, self._requests = SharedWeights(self.llm.collective_rpc), CoreRequests(self.llm, self._summary.eos_token_ids)
        if self._text_alone and not random_weights:
            self.replace_weights(folder_weights(self._summary.path, self._shapes), "recompute")

    @cached_property
    def _tower(self) -> dict[str, tuple[int, ...]]:
        """The weights that may arrive beside those of the language model."""
        if self._text_alone or not self._summary.nested:
            return {}
        return {name: shape for name, (_, shape) in other_tensors(self._summary.path).items()}

    def _connect_recorder(self, routes: bool) -> RouteRecorder | None:
        """Connect what rlgraph adds to the engine's model and its runner; with `routes` give what records them."""
        if self._on_cpu:
            pair_single_rows(self.model())
            _count_ranks_eagerly()
        if self._guesses:
            vllm_drafts.connect(self.llm.model_executor.driver_worker.worker.model_runner)
        return RouteRecorder(self.llm.model_executor.driver_worker.worker, on_cpu=self._on_cpu) if routes else None

    def submit(self, request: Request) -> None:
        """Queue a request; see `GenerateEngine`."""
        check_request(request, self._names, self.context_length(), self._summary.vocab_size)
        held = None if self._held is None else self._held.next_turn(request)
        if held is not None:
            made = self._requests.make_next_turn(request, *held)
        else:
            # Requests that began under other weights share no prefix with this one: their keys and values are not the new model's.
            made = self._requests.make(request, salt=str(self._loads))
            made.resumable = self._held is not None and bool(request.conversation) and request.images is None
        self.llm.engine_core.add_request(made)
        self._names[request.id] = made.request_id
        texts = stop_strings(self._summary.path, request.sampling)
        self._running[made.request_id] = _Running(request, texts)
        if texts is not None:
            self.scheduler.watched.add(made.request_id)
        if self._routes is not None:
            self._routes.begin(made.request_id, request.prompt)

    def decode(self) -> dict[str, Response]:
        """Run one decode step; see `GenerateEngine`."""
        if self._held is not None:
            self._held.make_room()
        # The core's own outputs: vLLM makes several objects a token of them, which takes longer than decoding with a small model.
        outputs = self.llm.engine_core.get_output().outputs
        finished = self._take_tokens()
        for output in outputs:
            row = self._running.get(output.request_id)
            if row is None:  # aborted while its next token was being computed
                continue
            if output.new_token_ids:
                row.tokens += output.new_token_ids
                self.decoded += len(output.new_token_ids)
                self.decodings += 1
                row.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            stopped = row.cut_at_text(len(output.new_token_ids))
            if stopped and output.finish_reason is None:
                self.llm.engine_core.abort_requests([output.request_id])
            if stopped or output.finish_reason is not None:
                finish = "stop" if stopped else FINISHES.get(str(output.finish_reason), "abort")
                finished[row.request.id] = self._forget(output.request_id, finish)
            if output.finish_reason is not None:
                self._hold(row, output.request_id)
        return finished

    def _take_tokens(self) -> dict[str, Response]:
        """Take the tokens that the scheduler has kept, and return the responses that end with them."""
        finished: dict[str, Response] = {}
        for written in self.scheduler.take_tokens():
            row = self._running.get(written.name)
            if row is None:
                continue
            row.tokens += written.tokens
            row.log_probs += written.log_probs
            if written.finish is not None:
                finished[row.request.id] = self._forget(written.name, FINISHES.get(written.finish, "abort"))
                self._hold(row, written.name)
        return finished

    def _hold(self, row: "_Running", name: str) -> None:
        """Keep what vLLM has read of a conversation whose turn has ended, if the engine holds such."""
        if self._held is not None and row.request.conversation and row.request.images is None:
            self._held.hold(row.request.conversation, name)

    def _see_all_tokens(self) -> None:
        """Have each running request hold all tokens that it has."""
        self.scheduler.settle()
        ended = self._take_tokens()
        assert not ended, ended

    def end_conversations(self, conversations: Iterable[str]) -> None:
        """Free what is held of these conversations; see `GenerateEngine`."""
        if self._held is not None:
            self._held.give_back(conversations)

    def decode_metrics(self) -> dict[str, float]:
        """With `drafts`: how many guesses a sequence keeps in a step, on average; see `GenerateEngine`."""
        counts, self.decoded, self.decodings = (self.decoded, self.decodings), 0, 0
        return {"rollout/accepted_drafts": counts[0] / max(counts[1], 1) - 1} if self._guesses else {}

    def count_requests(self) -> int:
        """Count the requests that the engine holds."""
        return len(self._running)

    def count_tokens(self) -> dict[str, int]:
        """Count the tokens that each unfinished request has so far."""
        self._see_all_tokens()
        return {row.request.id: len(row.tokens) for row in self._running.values()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests and return their responses so far."""
        names = [self._names[request_id] for request_id in ids if request_id in self._names]
        self.llm.engine_core.abort_requests(names)
        self._take_tokens()
        return {self._running[name].request.id: self._forget(name) for name in names}

    def _forget(self, name: str, finish: Finish = "abort") -> Response:
        row = self._running.pop(name)
        del self._names[row.request.id]
        self.scheduler.watched.discard(name)
        routes = None if self._routes is None else self._routes.take(name, [*row.request.prompt, *row.tokens])
        return Response(row.tokens, row.log_probs, finish=finish, routes=routes)

    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        """Load new weights; see `GenerateEngine`."""
        described = describe_weights(weights)
        sees_anew = not self._tower.keys().isdisjoint(described)
        if not copy_plan.same_tensors(described, self._checked):
            check_weights(described, self._shapes | (self._tower if sees_anew else {}))
            self._checked = dict(described)
        if self._text_alone:
            weights = as_text_model(weights)
        self._wake("weights")
        self.catch_up()
        self._see_all_tokens()
        if self._on_cpu:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(weights.items())})
            repack_weights(self.model(), self.llm.vllm_config, tied=not any(is_head(name) for name in self._shapes))
        elif self.parallel:
            self._shared.load(weights)
        elif self._fp8 is not None:
            self._fp8.load(weights)
        else:
            self._copy(weights)
        if sees_anew or (self._on_cpu and self._tower):  # on host cores vLLM has just dropped the features that its scheduler counts on
            self.llm.reset_encoder_cache()
        self._loads += 1
        if self._held is not None:
            self._held.give_back()
        if self._routes is not None:
            self._routes.forget([name for name, row in self._running.items() if not row.tokens])
        if running == "recompute":
            self.llm.reset_prefix_cache(reset_running_requests=True)
        else:
            self._requeue_requests([row.request for row in self._running.values() if not row.tokens])

    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load by the recorded copies of the model's loader; by the loader itself the first time, or if it does more than copy.

        The copies are under way when this returns; they are done before this thread's next decode step begins.
        """
        if self.copies is None or self._copied != weights.keys():
            self.copies, self._copied = copy_plan.record(self.model(), weights), frozenset(weights)
        elif isinstance(weights, MergedWeights):
            for name in weights.changed:  # one at a time: no second model of merged matrices is in memory
                self.copies.replay_one(name, weights[name])
        else:
            self.copies.replay(weights)

    def catch_up(self) -> None:
        """Collect the tokens of decode steps under way, which the old weights compute."""
        core = self.llm.engine_core.engine_core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        while core.batch_queue:
            self._finished |= self._tag_versions(self.decode())
        core.resume_scheduler()

    def prompt_log_probs(self, texts: Mapping[int, Sequence[int]], top_k: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield for each text of N tokens, as it is read, tokens and their log-probs `[N - 1, 1 + top_k]` at its second place and all later
        ones: the text's own token, and then the `top_k` most probable ones, the most probable first.

        Nothing else may be running.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=top_k, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        rows = {self.llm.add_request(str(row), {"prompt_token_ids": list(tokens)}, asked): row for row, tokens in texts.items()}
        while rows:
            # The core's own outputs: vLLM makes an object of each of them, at each place and for each token.
            for output in self.llm.engine_core.get_output().outputs:
                found = output.new_prompt_logprobs_tensors
                self.llm.output_processor.abort_requests([output.request_id], internal=True)
                yield rows.pop(output.request_id), found.logprob_token_ids, found.logprobs

    def sleep(self) -> int | None:
        """Free the memory of keys, values and weights; the weights go to host memory; see `GenerateEngine`."""
        if self._on_cpu:
            return None
        self.catch_up()
        self.llm.sleep(level=1)
        self._shared.give_back()
        self._asleep = {"weights", "kv_cache"}
        return self._own_bytes

    def wake(self) -> None:
        """Take the device memory back."""
        self._wake("weights")
        self._wake("kv_cache")

    def _wake(self, tag: str) -> None:
        if tag in self._asleep:
            self.llm.wake_up(tags=[tag])
            self._asleep.remove(tag)

    @property
    def scheduler(self) -> Any:
        """The `DecodeScheduler` of vLLM's core."""
        return self.llm.engine_core.engine_core.scheduler

    def model(self) -> Any:
        """The PyTorch module of vLLM, in an engine of one process."""
        return self.llm.model_executor.driver_worker.worker.get_model()

    def _requeue_requests(self, waiting: list[Request]) -> None:
        """Queue requests without a token again, so that they see nothing of the old weights."""
        self.drop([request.id for request in waiting])
        for request in waiting:
            self.submit(request)

    def context_length(self) -> int:
        """The number of tokens that prompt and response may have together."""
        length: int = self.llm.vllm_config.model_config.max_model_len
        return length

    def forget(self) -> None:
        """End all requests, and hold nothing of what they and their versions have left; see `GenerateEngine`."""
        self.catch_up()
        super().forget()
        if self._held is not None:
            self._held.give_back()
        if self._routes is not None:
            self._routes.forget([])
        self.llm.reset_prefix_cache()
        self._loads, self.decoded, self.decodings, self._checked = 0, 0, 0, {}
        self._shared.let_go()
        for holder in (self.copies, self._fp8):
            if holder is not None:
                holder.let_go()

    def renew(self) -> None:
        """Load the weights of the folder as they are now, and be as a new engine is; see `GenerateEngine`."""
        self.wake()
        weights = folder_weights(self._summary.path, self._shapes | self._tower)
        self.replace_weights({name: tensor.to(self._dtype) for name, tensor in weights.items()}, "recompute")
        self.forget()

    def close(self) -> None:
        """Free the model."""
        self.llm.engine_core.shutdown()


def _start_engine(arguments: Mapping[str, Any]) -> Any:
    """Start vLLM's engine."""
    from vllm import EngineArgs, LLMEngine

    with warnings.catch_warnings(), _inspect_models_locally():
        # vLLM looks at every attribute of every module, those included that warn when looked at.
        warnings.simplefilter("ignore", FutureWarning)
        scheduler = engine_arguments.scheduler(arguments["async_scheduling"])
        return LLMEngine.from_engine_args(EngineArgs(**arguments, scheduler_cls=scheduler))


@contextlib.contextmanager
def _inspect_models_locally() -> Iterator[None]:
    """Have vLLM look at the model's class in this process, which loads the class anyway.

    In a home where vLLM has not kept what it saw of a family, it would start a process for that, which imports vLLM once more: 7 s of a
    core on the machine of the benchmarks. It does so to keep CUDA out of a process that forks; ours spawn.
    """
    from vllm.model_executor.models import registry

    apart = registry._run_in_subprocess
    registry._run_in_subprocess = lambda inspect: inspect()
    try:
        yield
    finally:
        registry._run_in_subprocess = apart


def _count_ranks_eagerly() -> None:
    """Count the ranks of sampled tokens, which no one reads, in plain operations.

    vLLM compiles this one comparison at its first token, for two shapes: 1.4 s, and more where the compiler's cache is empty.
    """
    from vllm.v1.sample import sampler

    count = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(count, "_torchdynamo_orig_callable", count)  # if it is compiled


def _prepare_process(threads: int | None) -> None:
    for name, value in engine_arguments.environment(torch.cuda.is_available(), os.environ).items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # "Triton not available", which a CPU does not need
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # without it vLLM goes back to one thread
        torch.set_num_threads(threads)


def _memory_of_gpu(
    share: float, kv_cache_bytes: int | None, shared: bool, engines: int, beside_bytes: int, own_bytes: int
) -> tuple[float, int | None]:
    """Compute the share of a GPU's memory that what its engines keep beside their weights leaves, and the bytes of each KV cache if set."""
    total = torch.cuda.get_device_properties(0).total_memory
    share -= engines * beside_bytes / total
    if (engines > 1 or shared) and kv_cache_bytes is None:
        kv_cache_bytes = engine_arguments.kv_cache_of_many(total, own_bytes, engines, share)
    return share, kv_cache_bytes


@dataclass
class _Running:
    """A request that the engine holds, and what it has so far."""

    request: Request
    texts: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def cut_at_text(self, fresh: int) -> bool:
        """Leave out the tokens after the first of the last `fresh` ones that completes a stop string; return whether there is one."""
        end = None if self.texts is None else self.texts.find_end(self.tokens, len(self.tokens) - fresh)
        if end is not None:
            del self.tokens[end:], self.log_probs[end:]
        return end is not None
