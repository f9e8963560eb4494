"""Requests as vLLM's core takes them: checked once for each way to sample, and copied for each request."""

from collections.abc import Iterable
from copy import copy
from itertools import count
from typing import Any

from rlgraph.engines.api import Request, Sampling


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
        self._numbers = count()

    def make(self, request: Request, salt: str) -> Any:
        """Make vLLM's `EngineCoreRequest`, under a name that no other has. It shares prefixes with requests of the same `salt`."""
        sampling = request.sampling
        way = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop_token_ids, sampling.ignore_eos)
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
        return made

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
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)],
            ignore_eos=sampling.ignore_eos,
            seed=0,  # replaced; a request with a seed is sampled by a generator of its own
            logprobs=0,
            detokenize=False,
            skip_clone=True,  # nobody else has it, and a deep copy of many stop tokens takes longer than a decode step
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
