"""Generate with SGLang: its scheduler inside this process, driven step by step, with rlgraph's own sampler.

SGLang keeps settings of its whole process (threads, a process group, stand-ins): never share it with a trainer.
"""

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rlgraph.engines import copy_plan
from rlgraph.engines.api import GenerateEngine, Request, Response, check_request, check_weights
from rlgraph.engines.hf.pretrained import check_model, parameter_shapes
from rlgraph.engines.sglang import start
from rlgraph.engines.sglang.start import GREEDY, SeededSampler
from rlgraph.engines.stop_strings import StopStrings, stop_strings
from rlgraph.values.sampling import Running

MEMORIES = ("weights", "kv_cache")  # that SGLang frees by name, in the order in which they come back


class SglangEngine(GenerateEngine):
    """A `GenerateEngine` on SGLang, one in a process.

    `max_context` bounds prompt and response together (None: the model's own bound). On a GPU it takes the share `memory`, less the
    `copies` of the weights but its own, and frees it between rollouts if the pool is `shared`. `kv_cache_bytes` is the size of the KV
    cache on a CPU, `threads` the number of its cores. With `overlap` (None: on a GPU) it schedules a step while the device is at the
    one before. Log-probs are those of the sampling distribution.

    Raises DataError for a folder without a model.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_context: int | None = None,
        dtype: str = "bfloat16",
        seed: int = 0,
        threads: int | None = None,
        max_sequences: int | None = None,
        kv_cache_bytes: int | None = None,
        memory: float | None = None,
        shared: bool = False,
        copies: int = 1,
        overlap: bool | None = None,
    ) -> None:
        super().__init__()
        self._summary = check_model(path)
        self._shapes = parameter_shapes(path)
        self._context = max_context or self._summary.context_length
        self._own_bytes = sum(torch.Size(shape).numel() for shape in self._shapes.values()) * getattr(torch, dtype).itemsize
        machine = start.MachineLimits(threads, max_sequences, kv_cache_bytes, memory, shared, (copies - 1) * self._own_bytes, overlap)
        self._scheduler, self._files = start.scheduler(path, self._context, dtype, seed, machine)
        self._shared = shared
        self._sampler = SeededSampler()
        self._scheduler.tp_worker.model_runner.sampler = self._sampler
        self._process = self._scheduler.process_batch_result
        self._scheduler.process_batch_result = self._take  # SGLang calls it too, before it takes running requests back
        self._rows: dict[str, _HeldRequest] = {}  # by SGLang's name of the request
        self._names: dict[str, str] = {}  # that name, by request id
        self._numbers = itertools.count()
        self._ended: dict[str, Response] = {}  # in the decode step under way
        self._loads = 0
        self._copies: copy_plan.CopyPlan | None = None
        self._checked: dict[str, torch.Tensor] = {}  # the weights that were found to be the model's
        self._asleep: set[str] = set()

    def submit(self, request: Request) -> None:
        """Queue a request; see `GenerateEngine`."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        check_request(request, self._names, self._context, self._summary.vocab_size)
        name = f"{next(self._numbers)}."  # SGLang aborts by prefix: no name is the beginning of another
        ids = array("q", request.prompt)
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=name,
                input_text=None,
                input_ids=ids,
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=self._sampling_params(request),
                return_logprob=False,  # `SeededSampler` keeps them
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                extra_key=self._salt,
            )
        )
        queued = self._scheduler.waiting_queue[-1]
        assert queued.rid == name
        queued.eos_token_ids = set()  # the stop tokens of `Sampling` alone end a response
        self._names[request.id] = name
        self._rows[name] = _HeldRequest(request, queued, stop_strings(self._summary.path, request.sampling))

    @property
    def _salt(self) -> str:
        """The name of the weights. Requests under other weights share no prefix: their keys and values are not the new model's."""
        return str(self._loads)

    def _sampling_params(self, request: Request) -> Any:
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = request.sampling
        params = SamplingParams(
            max_new_tokens=min(sampling.max_tokens, self._context - len(request.prompt)),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            min_p=sampling.min_p,
            sampling_seed=GREEDY if sampling.temperature == 0 else request.seed % (1 << 63),
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._summary.eos_token_ids)],
        )
        params.normalize(None)
        return params

    @torch.no_grad()
    def decode(self) -> dict[str, Response]:
        """Run one decode step; see `GenerateEngine`. With overlap its tokens are known in the next one."""
        scheduler = self._scheduler
        plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if scheduler.enable_overlap:
            self._run_overlapping(batch)
        elif batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch
        ended, self._ended = self._ended, {}
        return ended

    def _run_overlapping(self, batch: Any) -> None:
        """Start a step, then take the results of the one before, as SGLang's own loop does."""
        scheduler, results = self._scheduler, self._scheduler.result_queue
        if results and scheduler.is_disable_overlap_for_batch(batch, last_batch=scheduler.last_batch):
            scheduler.process_batch_result(*results.popleft())
        result = None
        if batch:
            result = scheduler.run_batch(batch)
            scheduler._apply_war_barrier()
            results.append((batch.copy(), result))
        if len(results) > (1 if batch else 0):
            scheduler.process_batch_result(*results.popleft())
        scheduler.launch_batch_sample_if_needed(result, batch)

    def _take(self, batch: Any, result: Any) -> None:
        """Let SGLang process the results of a step, and keep the tokens and log-probs that they add to requests."""
        known = [(place, req, len(req.output_ids)) for place, req in enumerate(batch.reqs)]
        self._process(batch, result)
        log_probs = self._sampler.drawn.popleft().tolist()
        for place, req, count in known:
            row = self._rows.get(req.rid)
            if row is None or len(req.output_ids) == count:  # dropped, or ended while its next token was being computed
                continue
            row.tokens.append(int(req.output_ids[-1]))
            row.log_probs.append(log_probs[place])
            stopped = row.texts is not None and row.texts.find_end(row.tokens, len(row.tokens) - 1) is not None
            if stopped and not req.finished():
                self._abort(req.rid)
            if stopped or req.finished():
                ended = self._forget(req.rid)
                self._ended[row.request.id] = replace(ended, finish="stop") if stopped else ended

    def _forget(self, name: str) -> Response:
        row = self._rows.pop(name)
        del self._names[row.request.id]
        stops = {*row.request.sampling.stop_token_ids, *(() if row.request.sampling.ignore_eos else self._summary.eos_token_ids)}
        return Response(row.tokens, row.log_probs, finish="stop" if row.tokens and row.tokens[-1] in stops else "length")

    def count_requests(self) -> int:
        """Count the requests that the engine holds."""
        return len(self._rows)

    def count_tokens(self) -> dict[str, int]:
        """Count the tokens that each unfinished request has so far."""
        return {row.request.id: len(row.tokens) for row in self._rows.values()}

    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests and return their responses so far."""
        ended = {}
        for request_id in ids:
            if request_id in self._names:
                name = self._names[request_id]
                self._abort(name)
                ended[request_id] = self._forget(name)
        return ended

    def _abort(self, name: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.abort_request(AbortReq(rid=name))

    @torch.no_grad()
    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        """Load new weights; see `GenerateEngine`."""
        if not copy_plan.same_tensors(weights, self._checked):
            check_weights(weights, self._shapes)
            self._checked = dict(weights)
        self._wake("weights")
        self._catch_up()
        if running == "recompute":
            self._retract_requests()
        if self._copies is None:
            self._copies = copy_plan.record(self._scheduler.tp_worker.model_runner.model, weights)
        else:
            self._copies.replay(weights)
        self._loads += 1
        for row in self._rows.values():
            if running == "recompute" or not row.tokens:
                row.req.extra_key = self._salt

    def _catch_up(self) -> None:
        """Take the results of the step under way, which the old weights compute."""
        while self._scheduler.enable_overlap and self._scheduler.result_queue:
            self._scheduler.process_batch_result(*self._scheduler.result_queue.popleft())
        self._finished |= self._tag_versions(self._ended)
        self._ended = {}

    def _retract_requests(self) -> None:
        """Free the keys and values of running requests, which wait again with their tokens so far."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        scheduler = self._scheduler
        overlap, scheduler.enable_overlap = scheduler.enable_overlap, False  # no result is left for it to wait for
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        scheduler.enable_overlap = overlap

    def sleep(self) -> int | None:
        """Free the memory of keys, values and weights; the weights go to host memory; see `GenerateEngine`."""
        if not self._shared:
            return None
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        while not self._scheduler.is_fully_idle():  # requests that were dropped end in a step of their own
            self.decode()
        self._catch_up()
        self._scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=list(MEMORIES)))
        self._asleep = set(MEMORIES)
        return self._own_bytes

    def wake(self) -> None:
        """Take the device memory back."""
        for memory in MEMORIES:
            self._wake(memory)

    def _wake(self, memory: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if memory in self._asleep:
            self._scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[memory]))
            self._asleep.remove(memory)

    def context_length(self) -> int:
        """The number of tokens that prompt and response may have together."""
        return self._context

    def close(self) -> None:
        """Free the model."""
        self._scheduler.release_host_resources()
        for file in self._files:
            file.unlink(missing_ok=True)


@dataclass
class _HeldRequest:
    """A request that the engine holds, SGLang's own record of it, and what it has so far."""

    request: Request
    req: Any
    texts: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
