"""A generate engine driven step by step: new weights, new requests and aborts while responses are under way."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from support.tiny import other_weights

from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.values.sampling import Running, Sampling

PROMPTS = [[5, 6, 7], list(range(1, 41)), list(range(1, 41)), [9, 10, 11, 12, 13]]  # two share a block of 32
LATE = [list(range(1, 41)), [5, 6, 7]]
LENGTH = 12
BEFORE = 5  # decode steps before the weights change
OTHER = 7  # the seed of the other weights


def requests(prompts: Iterable[list[int]], name: str) -> list[Request]:
    sampling = Sampling(max_tokens=LENGTH, ignore_eos=True)
    return [Request(f"{name}{row}", prompt, sampling, seed=row) for row, prompt in enumerate(prompts)]


def finish_requests(engine: GenerateEngine, count: int) -> dict[str, Response]:
    finished: dict[str, Response] = {}
    while len(finished) < count:
        finished |= engine.step()
    return finished


def swap_weights(
    engine: GenerateEngine, before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], running: Running
) -> dict[str, Any]:
    """Change the weights after BEFORE steps, with requests under way and others submitted just before and after the change."""
    engine.load_weights(before, version=3)
    for request in requests(PROMPTS, "early"):
        engine.submit(request)
    for _ in range(BEFORE):
        assert engine.step() == {}
    late, new = requests(LATE, "late"), requests(LATE, "new")
    for request in late:
        engine.submit(request)
    written = engine.count_tokens()
    engine.load_weights(after, running=running)
    for request in new:
        engine.submit(request)
    return {
        "written": written,
        "responses": {name: asdict(response) for name, response in finish_requests(engine, len(PROMPTS) + 2 * len(LATE)).items()},
    }


def step_engine(engine: GenerateEngine, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what tests of any engine look at."""
    other = other_weights(weights, OTHER)
    found: dict[str, Any] = {
        "recompute": swap_weights(engine, weights, other, "recompute"),
        "keep": swap_weights(engine, weights, other, "keep"),
        "unchanged": swap_weights(engine, weights, weights, "recompute"),
        "unchanged keep": swap_weights(engine, weights, weights, "keep"),
    }
    whole = engine.generate(PROMPTS, Sampling(max_tokens=LENGTH, ignore_eos=True), list(range(len(PROMPTS))))
    found["whole"] = [asdict(response) for response in whole]
    first, second = requests(PROMPTS[:2], "early")
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.submit(second)
    found["beside"] = [asdict(r) for r in engine.generate(PROMPTS[2:], Sampling(max_tokens=LENGTH, ignore_eos=True), [2, 3])]
    found["held"] = {name: asdict(response) for name, response in finish_requests(engine, 2).items()}
    engine.submit(first)
    engine.submit(second)
    for _ in range(3):
        engine.step()
    found["aborted"] = {name: asdict(response) for name, response in engine.abort(["early0", "unknown"]).items()}
    found["left"] = {name: asdict(response) for name, response in (finish_requests(engine, 1) | engine.step()).items()}
    return found
