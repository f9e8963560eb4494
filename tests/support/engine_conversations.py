"""Conversations of several turns on an engine, as requests of one conversation and as requests that know nothing of each other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from support.tiny import other_weights

from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.values.sampling import Sampling

PROMPTS = [[5, 6, 7], [9, 10, 11, 12, 13]]
BETWEEN = [3, 4, 2]  # what the model reads between two of its turns
TURNS = 3
TURN = Sampling(max_tokens=9, ignore_eos=True)
CASES = {"goes on": None, "new weights": "recompute", "new weights, kept": "keep"}


def sample_turn(engine: GenerateEngine, prompts: Sequence[Sequence[int]], number: int, *, told: bool) -> list[Response]:
    """Sample one turn of each conversation, in one batch. `told` says that the engine is told which conversation it is of."""
    for row, prompt in enumerate(prompts):
        engine.submit(Request(f"{row}/{number}", prompt, TURN, 10 * number + row, f"talk {row}" if told else ""))
    done: dict[str, Response] = {}
    while len(done) < len(prompts):
        done |= engine.step()
    return [done[f"{row}/{number}"] for row in range(len(prompts))]


def end_conversations(engine: GenerateEngine) -> None:
    engine.end_conversations([*(f"talk {row}" for row in range(len(PROMPTS))), "unknown"])


def sample_conversations(engine: GenerateEngine, weights: Mapping[str, torch.Tensor], swap: Any, *, told: bool) -> list[dict[str, Any]]:
    """Sample conversations; before their last turn new weights come where `swap` says what becomes of running requests."""
    engine.load_weights(weights, version=0)
    prompts, found = [list(prompt) for prompt in PROMPTS], list[dict[str, Any]]()
    for number in range(TURNS):
        if swap is not None and number == TURNS - 1:
            engine.load_weights(other_weights(weights, 5), running=swap)
        responses = sample_turn(engine, prompts, number, told=told)
        found += [asdict(response) for response in responses]
        prompts = [[*prompt, *response.tokens, *BETWEEN] for prompt, response in zip(prompts, responses, strict=True)]
    end_conversations(engine)
    return found


def compare_conversations(engine: GenerateEngine, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what tests of any engine look at: for each case the responses where it is told of conversations, and where it is not."""
    return {case: {told: sample_conversations(engine, weights, swap, told=told) for told in (True, False)} for case, swap in CASES.items()}


def inspect_caches(engine: Any) -> dict[str, Any]:
    """Return what tests of vLLM look at: the tokens that it reads for second turns, what it holds, and when it gives that back."""
    from rlgraph.engines.vllm import engine as vllm_engine

    scheduler, schedule, read = engine._held._scheduler, engine._held._scheduler.schedule, list[int]()

    def counted(*given: Any, **named: Any) -> Any:
        planned = schedule(*given, **named)
        read.append(sum(planned.num_scheduled_tokens.values()))
        return planned

    def first() -> list[list[int]]:
        responses = sample_turn(engine, PROMPTS, 0, told=True)
        return [[*prompt, *response.tokens, *BETWEEN] for prompt, response in zip(PROMPTS, responses, strict=True)]

    def left() -> tuple[int, int]:
        return len(engine._held), len(scheduler.requests)

    found: dict[str, Any] = {}
    scheduler.schedule = counted
    for told in (True, False):
        prompts = first()
        found["after a turn"] = left()
        read.clear()
        sample_turn(engine, prompts, 1, told=told)
        found[f"read, {told}"] = read[0]
        end_conversations(engine)
        found["ended"] = left()
    branched = [[*prompt[:4], 17, *prompt[5:]] for prompt in first()]
    found["branch"] = [[asdict(response) for response in sample_turn(engine, branched, 1, told=told)] for told in (True, False)]
    end_conversations(engine)
    for row in range(2):
        engine.submit(Request(f"at once {row}", PROMPTS[row], TURN, row, "talk 0"))
    while engine.count_requests():
        engine.step()
    found["two at once"] = left()
    end_conversations(engine)
    first()
    free, vllm_engine.LEAST_FREE = vllm_engine.LEAST_FREE, 1.1
    sample_turn(engine, [[8]], 1, told=False)
    found["without room"], vllm_engine.LEAST_FREE = left(), free
    first()
    places, scheduler.max_num_active_reqs = scheduler.max_num_active_reqs, 2
    sample_turn(engine, [[8]], 1, told=False)
    found["without a place"], scheduler.max_num_active_reqs = left(), places
    end_conversations(engine)
    first()
    engine.submit(Request("dropped", [5, 6], TURN, 1, "talk 0"))
    engine.step()
    engine.abort(["dropped"])
    end_conversations(engine)
    found["dropped"] = left()
    scheduler.schedule = schedule
    return found
