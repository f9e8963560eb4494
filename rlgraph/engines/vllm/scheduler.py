"""vLLM's scheduler, with a short way for steps in which every sequence decodes one token: nearly all steps of a rollout.

vLLM looks at each sequence twice per step: when it schedules the step, and when the step's tokens are there. With 256 sequences the host
does that for 5.8 ms, and launches the step for 3.2 ms; the kernels of 1.7B need 7.4 ms. Until a request is dropped, or memory runs short,
such a step differs from the one before in its numbers alone. So the short way looks only at sequences that end or that need another block
of the KV cache. vLLM's own way schedules new requests beside them, and all requests after what the short way knows was written into them.
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

NEVER = 1 << 60  # a step that does not come


@dataclass(frozen=True)
class DecodedTokens:
    """The tokens that a request got in steps of the short way, their log-probs, and why it ended, in vLLM's words; None: it goes on."""

    name: str
    tokens: list[int]
    log_probs: list[float]
    finish: str | None = None


@dataclass(eq=False)
class _Sequence:
    """A sequence: vLLM's request, and how many tokens of it were computed and written before the first step, with those under way."""

    request: Any
    computed: int
    outputs: int
    first: int  # the results before its own
    left: int | None = None  # the steps before it left, if no further step needs it


@dataclass
class _StepResults:
    """The tokens of steps whose results list the same requests in the same order."""

    order: list[str]
    first: int  # the results before these
    tokens: list[np.ndarray] = field(default_factory=list)
    log_probs: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = {name: place for place, name in enumerate(self.order)}


class _Steady:
    """Steps of sequences that get one token in each. `scheduled` steps and `updated` results are counted from the first one on."""

    def __init__(self, block: int, longest: int) -> None:
        self.rows: dict[str, _Sequence] = {}
        self.scheduled, self.updated = 0, 0
        self.results: list[_StepResults] = []
        self._block, self._longest = block, longest
        self._crossing: dict[int, list[_Sequence]] = {}  # by the steps after which a sequence needs its next block, modulo its size
        self._last: dict[int, list[_Sequence]] = {}  # by the steps after which a sequence needs no further step
        self._ends: dict[int, list[_Sequence]] = {}  # by the results after which a sequence has its last token
        self._stops: set[int] = set()  # tokens that end some sequence
        self.list_names()

    def join(self, requests: Sequence[Any]) -> None:
        """Add sequences that the next step decodes."""
        for request in requests:
            outputs = request.num_output_tokens + request.num_output_placeholders
            row = _Sequence(request, request.num_computed_tokens - self.scheduled, outputs - self.scheduled, self.updated)
            self.rows[request.request_id] = row
            self._crossing.setdefault(-row.computed % self._block, []).append(row)
            most = most_tokens(request, self._longest)
            self._last.setdefault(most - 1 - row.computed, []).append(row)
            self._ends.setdefault(self.updated + most - request.num_tokens, []).append(row)
            self._stops.update(request.sampling_params.stop_token_ids or ())
            self._stops.add(request.sampling_params.eos_token_id)
            request.next_decode_eligible_step = NEVER
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
        last = self._last.pop(self.scheduled, ())
        for row in last:
            if row.left is None:
                row.left = self.scheduled
        if last:
            self.list_names()

    def find_crossing(self) -> list[_Sequence]:
        """List the sequences that need another block in the next step."""
        place = self.scheduled % self._block
        self._crossing[place] = [row for row in self._crossing.get(place, ()) if row.left is None]
        return self._crossing[place]

    def add_step(self, beside: SchedulerOutput, blocks: dict[str, Any]) -> SchedulerOutput:
        """Add the next step of the sequences to what vLLM scheduled in its own way `beside` them; `blocks` are new, by request."""
        others = beside.scheduled_cached_reqs
        cached = replace(
            others,
            req_ids=self.names + others.req_ids,
            new_block_ids=[blocks.get(name) for name in self.names] + others.new_block_ids,
            num_computed_tokens=[computed + self.scheduled for computed in self._computed] + others.num_computed_tokens,
            num_output_tokens=[outputs + self.scheduled for outputs in self._outputs] + others.num_output_tokens,
        )
        tokens, total = self.ones | beside.num_scheduled_tokens, len(self.names) + beside.total_num_scheduled_tokens
        return replace(beside, scheduled_cached_reqs=cached, num_scheduled_tokens=tokens, total_num_scheduled_tokens=total)

    def take(self, order: list[str], tokens: list[int], log_probs: np.ndarray) -> list[str]:
        """Keep the tokens of a step; name the sequences that end with them, in the order of their rows."""
        if not self.results or self.results[-1].order != order:
            if len(self.results) % 64 == 63:
                self.results = [each for each in self.results if not self.rows.keys().isdisjoint(each.places)]
            self.results.append(_StepResults(order, self.updated))
        self.results[-1].tokens.append(np.array(tokens, dtype=np.int32))
        self.results[-1].log_probs.append(log_probs)
        self.updated += 1
        last = self._ends.pop(self.updated, ())  # some may have stopped before, and be here again with their next turn
        stops: set[str] = set()
        if not self._stops.isdisjoint(tokens):
            stops = {name for name, token in zip(order, tokens, strict=True) if token in self._stops and self._is_stop(name, token)}
        return [name for name, row in self.rows.items() if name in stops or row in last] if last or stops else []

    def _is_stop(self, name: str, token: int) -> bool:
        params = self.rows[name].request.sampling_params if name in self.rows else None
        return params is not None and (token == params.eos_token_id or token in (params.stop_token_ids or ()))

    def read_tokens(self, name: str) -> tuple[list[int], list[float]]:
        """Read all tokens of a sequence, and their log-probs."""
        tokens: list[int] = []
        log_probs: list[float] = []
        first = self.rows[name].first
        for step in self.results:
            place, start = step.places.get(name), max(first - step.first, 0)
            if place is not None:
                tokens += [each.item(place) for each in step.tokens[start:]]
                log_probs += [each.item(place) for each in step.log_probs[start:]]
        return tokens, log_probs


def most_tokens(request: Any, longest: int) -> int:
    """Count the tokens that a request has at most, with its prompt."""
    return int(min(request.num_prompt_tokens + request.max_tokens, longest))


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
        steady = self._join()
        if steady is None:
            return None
        steady.leave_last()
        crossing = steady.find_crossing()
        # Blocks behind a window come back only where a sequence gets its next one, up to a block per sequence later than in vLLM's own way.
        blocks = 2 * len(steady.names) if self._windows else len(crossing)
        free = self.kv_cache_manager.block_pool.get_num_free_blocks()
        waiting = any(self.get_request_counts()[1:])
        if free < blocks * len(self.kv_cache_config.kv_cache_groups) or (waiting and self._windows):
            return None
        added: dict[str, Any] = {}
        for row in crossing:
            row.request.num_computed_tokens = row.computed + steady.scheduled
            row.request.num_in_flight_tokens = sum(self._count_under_way(row.request.request_id))
            slots = self.kv_cache_manager.allocate_slots(row.request, 1, num_lookahead_tokens=self.num_lookahead_tokens)
            added[row.request.request_id] = slots.get_block_ids(allow_none=True)
        output = steady.add_step(self._schedule_others(len(steady.names)) if waiting else self._schedule_nothing(), added)
        if waiting:
            self.prev_step_scheduled_req_ids.update(steady.names)
        steady.scheduled += bool(steady.names)  # none where all last tokens are under way
        self.short += 1
        return output

    def _schedule_others(self, tokens: int) -> SchedulerOutput:
        """Schedule waiting requests in vLLM's own way, which leaves out the sequences of the short way and the tokens of their step."""
        self.max_num_scheduled_tokens -= tokens
        try:
            return super().schedule()
        finally:
            self.max_num_scheduled_tokens += tokens

    def _schedule_nothing(self) -> SchedulerOutput:
        """Do what vLLM does in each step, where no request waits."""
        assert self._template is not None
        self.current_step += 1
        none = replace(
            self._template.scheduled_cached_reqs,
            req_ids=[], resumed_req_ids=set(), all_token_ids={}, new_block_ids=[], num_computed_tokens=[], num_output_tokens=[],
        )  # fmt: skip
        output = replace(
            self._template,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=none,
            num_scheduled_tokens={},
            total_num_scheduled_tokens=0,
            scheduled_encoder_inputs={},
            scheduled_encoder_input_stats=None,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            kv_cache_block_copies=None,
            finished_req_ids=self.finished_req_ids,
            preempted_req_ids=self.reset_preempted_req_ids,
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return output

    def _join(self) -> _Steady | None:
        """Begin the short way, or let new requests join it: if the next step is to decode one token of each running request."""
        if not self._able or self._template is None or self.watched or self.pause_state is not PauseState.UNPAUSED:
            return None
        steady = self._steady or _Steady(self._block, self.max_model_len)
        if len(self.running) == len(steady.rows):
            return steady if self.running else None
        ahead = len(self._under_way) if isinstance(self, AsyncScheduler) else 0
        new = [request for request in self.running if request.request_id not in steady.rows]
        for request in new:
            params, known = request.sampling_params, request.num_tokens + request.num_output_placeholders
            decodes = (
                known == request.num_computed_tokens + 1 < most_tokens(request, self.max_model_len)
                and request.num_output_placeholders == ahead
            )
            plain = params is not None and not request.use_structured_output and params.prompt_logprobs is None and params.logprobs == 0
            if request.is_prefill_chunk or not (decodes and plain) or params.min_tokens:
                return None
        steady.join(new)
        self._steady = steady
        return steady

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        """Take the tokens of a step."""
        steady, scheduled = self._steady, scheduler_output.num_scheduled_tokens
        if steady is None:
            return self._update_own_way(scheduler_output, model_runner_output)
        if not scheduled:
            return {}
        order, sampled, log_probs = model_runner_output.req_ids, model_runner_output.sampled_token_ids, model_runner_output.logprobs
        if log_probs is None or any(len(tokens) != 1 and name in steady.rows for name, tokens in zip(order, sampled, strict=True)):
            return self._update_own_way(scheduler_output, model_runner_output)
        self._under_way.popleft()
        others = {name: count for name, count in scheduled.items() if name not in steady.rows and name in self.requests}
        done = steady.take(order, [tokens[0] if tokens else -1 for tokens in sampled], log_probs.logprobs[:, 0].copy())
        for name in done:
            self._finish(steady, name)
        if done:
            steady.list_names()
        return super().update_from_output(replace(scheduler_output, num_scheduled_tokens=others), model_runner_output) if others else {}

    def _update_own_way(self, scheduler_output: SchedulerOutput, model_runner_output: Any) -> Any:
        self.settle()  # as of before this step
        if scheduler_output.num_scheduled_tokens:
            self._under_way.popleft()
        return super().update_from_output(scheduler_output, model_runner_output)

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
        ahead = self._count_under_way(name)
        request.num_computed_tokens = row.computed + (steady.scheduled if row.left is None else row.left)
        request.num_in_flight_tokens = sum(ahead)
        request.next_decode_eligible_step = 0
        if isinstance(self, AsyncScheduler):
            request.num_output_placeholders = sum(map(bool, ahead))
        if tokens:
            request.append_output_token_ids(tokens)
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
        return tokens, log_probs

    def _count_under_way(self, name: str) -> list[int]:
        """Count the tokens of a request in each step without a result."""
        return [output.num_scheduled_tokens.get(name, 0) for output in self._under_way]

    # What changes the requests from outside: vLLM's own way, on requests that are up to date.

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        """End requests from outside; None: all."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids if request_ids is None else list(request_ids)
        if self._steady is not None and (names is None or not self._steady.rows.keys().isdisjoint(names)):
            self.settle()
        return super().finish_requests(names, finished_status)

    def reset_prefix_cache(self, *given: Any, **more: Any) -> bool:
        """Forget keys and values."""
        self.settle()
        return bool(super().reset_prefix_cache(*given, **more))


class AheadScheduler(DecodeScheduler, AsyncScheduler):
    """The same where the next step is scheduled while the GPU is at this one."""
