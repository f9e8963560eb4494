"""vLLM's scheduler, with a short way for steps in which every sequence decodes one token: nearly all steps of a rollout.

vLLM looks at each sequence twice per step: when it schedules the step, and when the step's tokens are there. With 256 sequences the host
does that for 5.8 ms, and launches the step for 3.2 ms; the kernels of 1.7B need 7.4 ms. Until a request arrives or is dropped, or memory
runs short, such a step differs from the one before in its numbers alone. So the short way looks only at sequences that end or that need
another block of the KV cache. It writes the rest into vLLM's requests when vLLM's own way goes on.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import check_stop, remove_all
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec


@dataclass(frozen=True)
class DecodedTokens:
    """The tokens that a request got in steps of the short way, their log-probs, and why it ended, in vLLM's words; None: it goes on."""

    name: str
    tokens: list[int]
    log_probs: list[float]
    finish: str | None = None


@dataclass
class _Sequence:
    """A sequence: vLLM's request, and how many tokens of it were computed and written as the short way began, with those under way."""

    request: Any
    computed: int
    outputs: int
    left: int | None = None  # the steps it was in, if no step needs it any more


@dataclass
class _StepResults:
    """The tokens of steps whose results list the same requests in the same order."""

    order: list[str]
    tokens: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = {name: place for place, name in enumerate(self.order)}


class _Steady:
    """Steps of the same sequences, each one token longer than in the step before."""

    def __init__(self, requests: Sequence[Any], template: SchedulerOutput, block: int, longest: int) -> None:
        self.rows = {request.request_id: _sequence(request) for request in requests}
        self.template, self.scheduled, self.updated = template, 0, 0
        self.results: list[_StepResults] = []
        self._block = block
        self._crossing: dict[int, list[_Sequence]] = {}  # by the steps after which a sequence needs its next block, modulo its size
        self._last: dict[int, list[_Sequence]] = {}  # by the steps after which a sequence needs no further step
        self.ends: dict[int, list[str]] = {}  # by the results after which a sequence has its last token
        self.stops: set[int] = set()  # tokens that end some sequence
        for row in self.rows.values():
            request, params = row.request, row.request.sampling_params
            self._crossing.setdefault(-row.computed % block, []).append(row)
            most = min(request.num_prompt_tokens + request.max_tokens, longest)
            self._last.setdefault(most - 1 - row.computed, []).append(row)
            self.ends.setdefault(most - request.num_tokens, []).append(request.request_id)
            self.stops.update(params.stop_token_ids or ())
            self.stops.add(params.eos_token_id)
        self.list_names()

    def list_names(self) -> None:
        """List the sequences that the next step decodes."""
        running = [(name, row) for name, row in self.rows.items() if row.left is None]
        self.names = [name for name, _ in running]
        self.ones = dict.fromkeys(self.names, 1)
        self._computed = [row.computed for _, row in running]
        self._outputs = [row.outputs for _, row in running]

    def leave_last(self) -> None:
        """Leave sequences out whose last token is under way."""
        for row in self._last.get(self.scheduled, ()):
            row.left = self.scheduled
        if self.scheduled in self._last:
            self.list_names()

    def find_crossing(self) -> list[_Sequence]:
        """The sequences that need another block in the next step."""
        return [row for row in self._crossing.get(self.scheduled % self._block, ()) if row.left is None]

    def describe_step(self, blocks: dict[str, Any], **more: Any) -> SchedulerOutput:
        """Describe the next step to the model's runner; `blocks` are new, by request."""
        cached = replace(
            self.template.scheduled_cached_reqs,
            req_ids=self.names,
            resumed_req_ids=set(),
            all_token_ids={},
            new_block_ids=[blocks.get(name) for name in self.names],
            num_computed_tokens=[computed + self.scheduled for computed in self._computed],
            num_output_tokens=[outputs + self.scheduled for outputs in self._outputs],
        )
        return replace(
            self.template,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=self.ones,
            total_num_scheduled_tokens=len(self.names),
            kv_cache_block_copies=None,
            **more,
        )

    def take(self, order: list[str], tokens: list[int], log_probs: np.ndarray) -> list[str]:
        """Keep the tokens of a step; name the sequences that end with them, in the order of their rows."""
        if not self.results or self.results[-1].order != order:
            self.results.append(_StepResults(order))
        self.results[-1].tokens.append(np.array(tokens, dtype=np.int32))
        self.results[-1].log_probs.append(log_probs)
        self.updated += 1
        done = set(self.ends.get(self.updated, ()))
        if not self.stops.isdisjoint(tokens):
            done.update(name for name, token in zip(order, tokens, strict=True) if token in self.stops and self._stops(name, token))
        return [name for name in self.rows if name in done] if done else []

    def _stops(self, name: str, token: int) -> bool:
        params = self.rows[name].request.sampling_params if name in self.rows else None
        return params is not None and (token == params.eos_token_id or token in (params.stop_token_ids or ()))

    def read_tokens(self, name: str) -> tuple[list[int], list[float]]:
        """All tokens of a sequence, and their log-probs."""
        tokens: list[int] = []
        log_probs: list[float] = []
        for step in self.results:
            place = step.places.get(name)
            if place is not None:
                tokens += [each.item(place) for each in step.tokens]
                log_probs += [each.item(place) for each in step.log_probs]
        return tokens, log_probs


def _sequence(request: Any) -> _Sequence:
    return _Sequence(request, request.num_computed_tokens, request.num_output_tokens + request.num_output_placeholders)


class DecodeScheduler(Scheduler):
    """Named as `scheduler_cls` and made by vLLM. It replaces nothing of what vLLM decides: each step holds the same requests, blocks and
    tokens as vLLM's own.

    `watched` names requests whose every token the engine must see at once. `take_tokens` has what the engine has not seen. `short` counts
    the steps of the short way.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.finished_req_ids: set[str]
        self.reset_preempted_req_ids: set[str]
        self.running: list[Any]
        self.watched: set[str] = set()
        self.short = 0
        self._written: list[DecodedTokens] = []
        self._under_way: deque[SchedulerOutput] = deque()  # steps without a result yet
        self._template: SchedulerOutput | None = None  # a step of vLLM's own
        self._steady: _Steady | None = None
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        sizes = {spec.block_size if isinstance(spec, AttentionSpec) else 0 for spec in specs}
        self._block, self._windows = max(sizes, default=0), not all(isinstance(spec, FullAttentionSpec) for spec in specs)
        beside = (self.connector, self.ec_connector, self.lora_config, self.finished_req_ids_dict)
        one_size = len(sizes) == 1 and self._block > 0  # of all layers, and no state of another kind
        self._able = one_size and all(part is None for part in beside) and not (self.num_spec_tokens or self.log_stats)

    def take_tokens(self) -> list[DecodedTokens]:
        """Take the tokens of steps of the short way, whose sequences have ended or for which `settle` was called."""
        written, self._written = self._written, []
        return written

    def settle(self) -> None:
        """Write what the short way has computed into vLLM's requests, which then goes on in its own way."""
        steady, self._steady = self._steady, None
        if steady is not None:
            for name in steady.rows:
                tokens, log_probs = self._settle_row(steady, name)
                self._written.append(DecodedTokens(name, tokens, log_probs))

    def schedule(self, *given: Any, **more: Any) -> SchedulerOutput:
        """Schedule the next step."""
        output = self._schedule_steady()
        if output is None:
            self.settle()
            output = super().schedule(*given, **more)
            if output.total_num_scheduled_tokens:
                self._template = output
        if output.total_num_scheduled_tokens:
            self._under_way.append(output)
        return output

    def _schedule_steady(self) -> SchedulerOutput | None:
        if self._steady is None:
            self._steady = self._begin()
        steady = self._steady
        if steady is None or self.watched:
            return None
        steady.leave_last()
        crossing = steady.find_crossing()
        # Blocks behind a window come back only where a sequence gets its next one, up to a block per sequence later than in vLLM's own way.
        blocks = 2 * len(steady.names) if self._windows else len(crossing)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        if free < blocks * len(self.kv_cache_config.kv_cache_groups):
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        added: dict[str, Any] = {}
        for row in crossing:
            row.request.num_computed_tokens = row.computed + steady.scheduled
            row.request.num_in_flight_tokens = len(self._under_way)
            slots = self.kv_cache_manager.allocate_slots(row.request, 1, num_lookahead_tokens=self.num_lookahead_tokens)
            added[row.request.request_id] = slots.get_block_ids(allow_none=True)
        output = steady.describe_step(
            added,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.reset_preempted_req_ids,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        steady.scheduled += bool(steady.names)  # none where all last tokens are under way
        self.short += 1
        return output

    def _begin(self) -> _Steady | None:
        """Begin the short way, if the next step is to decode one token of each running request."""
        if not self._able or self._template is None or self.pause_state is not PauseState.UNPAUSED:
            return None
        if not self.running or any(self.get_request_counts()[1:]):
            return None
        ahead = len(self._under_way) if isinstance(self, AsyncScheduler) else 0
        for request in self.running:
            params, known = request.sampling_params, request.num_tokens + request.num_output_placeholders
            most = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
            decodes = known == request.num_computed_tokens + 1 < most and request.num_output_placeholders == ahead
            plain = (
                params is not None
                and not request.use_structured_output
                and params.prompt_logprobs is None
                and params.logprobs == 0
                and not params.min_tokens
            )
            if not (decodes and plain) or request.is_prefill_chunk:
                return None
        return _Steady(self.running, self._template, self._block, self.max_model_len)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Take the tokens of a step."""
        steady, sampled, log_probs = self._steady, model_runner_output.sampled_token_ids, model_runner_output.logprobs
        if steady is not None and not scheduler_output.total_num_scheduled_tokens:
            return {}
        next_one = bool(self._under_way) and scheduler_output is self._under_way[0]
        short = next_one and steady is not None and log_probs is not None and all(len(tokens) == 1 for tokens in sampled)
        if not short:
            self.settle()  # as of before this step
        if next_one:
            self._under_way.popleft()
        if steady is None or not short:
            return super().update_from_output(scheduler_output, model_runner_output)
        done = steady.take(model_runner_output.req_ids, [token for (token,) in sampled], log_probs.logprobs[:, 0].copy())
        for name in done:
            self._finish(steady, name)
        if done:
            steady.list_names()
        return {}

    def _finish(self, steady: _Steady, name: str) -> None:
        """End a sequence, as vLLM does."""
        request = steady.rows[name].request
        tokens, log_probs = self._settle_row(steady, name)
        steady.rows.pop(name).left = steady.scheduled
        stopped = check_stop(request, self.max_model_len)
        assert stopped, name
        finish = str(request.get_finished_reason())
        if self._handle_stopped_request(request):
            self._free_request(request)
        self.running = remove_all(self.running, {request})
        self._written.append(DecodedTokens(name, tokens, log_probs, finish))

    def _settle_row(self, steady: _Steady, name: str) -> tuple[list[int], list[float]]:
        """Write into vLLM's request what it has computed and sampled; return the tokens and their log-probs."""
        row = steady.rows[name]
        request, (tokens, log_probs) = row.request, steady.read_tokens(name)
        ahead = [output.num_scheduled_tokens.get(name, 0) for output in self._under_way]
        request.num_computed_tokens = row.computed + (steady.scheduled if row.left is None else row.left)
        request.num_in_flight_tokens = sum(ahead)
        if isinstance(self, AsyncScheduler):
            request.num_output_placeholders = sum(map(bool, ahead))
        if tokens:
            request.append_output_token_ids(tokens)
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        return tokens, log_probs

    # What changes the requests from outside: vLLM's own way, on requests that are up to date.

    def add_request(self, request: Any) -> None:
        """Queue a request."""
        self.settle()
        super().add_request(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """End requests from outside."""
        self.settle()
        return super().finish_requests(request_ids, finished_status)

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause the scheduling, or go on."""
        self.settle()
        super().set_pause_state(pause_state)

    def reset_prefix_cache(self, *given: Any, **more: Any) -> bool:
        """Forget keys and values."""
        self.settle()
        return bool(super().reset_prefix_cache(*given, **more))


class AheadScheduler(DecodeScheduler, AsyncScheduler):
    """The same where the next step is scheduled while the GPU is at this one."""
