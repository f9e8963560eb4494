"""What every engine that generates is asked by the conformance suite, in the process that holds it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from support.tiny import UPDATES, VLLM_PROMPTS, other_weights

from rlgraph.engines.api import GenerateEngine, Response
from rlgraph.errors import DataError
from rlgraph.values.sampling import Sampling

SEEDS = list(range(len(VLLM_PROMPTS)))
FREE = Sampling(max_tokens=8, ignore_eos=True)
# By name: how a token is drawn. Each leaves out tokens of the tiny model, whose distribution is nearly flat.
DRAWN = {
    "top_p": Sampling(max_tokens=8, ignore_eos=True, temperature=0.7, top_p=0.6),
    "top_k": Sampling(max_tokens=8, ignore_eos=True, top_k=7),
    "both": Sampling(max_tokens=8, ignore_eos=True, temperature=1.3, top_p=0.8, top_k=20),
    "greedy": Sampling(max_tokens=8, ignore_eos=True, temperature=0),
}


def sample_requests(engine: GenerateEngine, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what tests of any engine look at, in a process where it is alone."""

    def sampled(sampling: Sampling, rows: slice = slice(None)) -> list[dict[str, Any]]:
        return [asdict(response) for response in engine.generate(VLLM_PROMPTS[rows], sampling, SEEDS[rows])]

    found: dict[str, Any] = {"context": engine.context_length(), "updates": [sampled(FREE)]}
    for update in range(1, UPDATES):
        engine.load_weights(other_weights(weights, update))
        found["updates"].append(sampled(FREE))
    found["repeated"] = sampled(FREE)
    found["alone"] = [sampled(FREE, slice(row, row + 1))[0] for row in range(len(VLLM_PROMPTS))]
    found["drawn"] = {name: sampled(sampling) for name, sampling in DRAWN.items()}
    stop = found["repeated"][0]["tokens"][3]
    found["stopped"] = asdict(engine.generate(VLLM_PROMPTS[:1], Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)), [0])[0])
    found["at_context"] = asdict(engine.generate([[3] * 60], FREE, [0])[0])
    found["refused"] = refusal(engine, {"model.norm.weight": torch.ones(64)})
    found["reshaped"] = refusal(engine, {**weights, "model.norm.weight": torch.ones(1)})
    return found


def refusal(engine: GenerateEngine, weights: Mapping[str, torch.Tensor]) -> str:
    """Return the error at weights that are not the model's."""
    try:
        engine.load_weights(weights)
    except DataError as refused:
        return str(refused)
    return ""


def sleep_and_sample(engine: GenerateEngine) -> list[Response]:
    """Sleep, wake, and sample."""
    engine.sleep()
    engine.wake()
    return engine.generate(VLLM_PROMPTS, FREE, SEEDS)
