"""What every engine that generates is asked by the conformance suite, in the process that holds it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from support.tiny import UPDATES, VLLM_PROMPTS, other_weights

from rlgraph.engines.api import GenerateEngine, Request, Response
from rlgraph.engines.hf.pretrained import byte_tokenizer
from rlgraph.errors import DataError
from rlgraph.values.sampling import Sampling

SEEDS = list(range(len(VLLM_PROMPTS)))
FREE = Sampling(max_tokens=8, ignore_eos=True)
# By name: how a token is drawn. Each leaves out tokens of the tiny model, whose distribution is nearly flat.
DRAWN = {
    "top_p": Sampling(max_tokens=8, ignore_eos=True, temperature=0.7, top_p=0.6),
    "top_k": Sampling(max_tokens=8, ignore_eos=True, top_k=7),
    "min_p": Sampling(max_tokens=8, ignore_eos=True, temperature=0.5, min_p=0.6),
    "both": Sampling(max_tokens=8, ignore_eos=True, temperature=1.3, top_p=0.8, top_k=20, min_p=0.1),
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
    found["text"] = two_letters([response["tokens"] for response in found["repeated"]])
    found["stopped_at_text"] = sampled(replace(FREE, stop=("never", found["text"])))
    row = next(row for row, response in enumerate(found["stopped_at_text"]) if response["finish"] == "stop")
    found["next_turns"] = next_turns(engine, VLLM_PROMPTS[row], replace(FREE, stop=(found["text"],)), row)
    found["at_context"] = asdict(engine.generate([[3] * 60], FREE, [0])[0])
    found["refused"] = refusal(engine, {"model.norm.weight": torch.ones(64)})
    found["reshaped"] = refusal(engine, {**weights, "model.norm.weight": torch.ones(1)})
    return found


def next_turns(engine: GenerateEngine, prompt: Sequence[int], sampling: Sampling, seed: int) -> list[list[int]]:
    """Return the tokens of a turn after one that a stop string ended, in its conversation and by itself."""
    done: dict[str, Response] = {}
    for turn in ("0", "1"):
        read = [*prompt, *(done["0"].tokens if done else ())]
        engine.submit(Request(turn, read, sampling, seed, "talk"))
        while turn not in done:
            done |= engine.step()
    engine.end_conversations(["talk"])
    return [done["1"].tokens, engine.generate([[*prompt, *done["0"].tokens]], sampling, [seed])[0].tokens]


def two_letters(responses: Sequence[Sequence[int]]) -> str:
    """Return the text of two tokens that follow each other in a response to the tiny model's prompts."""
    decode = byte_tokenizer().decode
    pairs = [decode(tokens[place : place + 2]) for tokens in responses for place in range(1, len(tokens) - 2)]
    return next(pair for pair in pairs if len(pair) == 2 and "\ufffd" not in pair)


def end_at_text(tokens: Sequence[int], text: str) -> int | None:
    """Count the fewest tokens of a response of the tiny model whose text has this text in it."""
    decode = byte_tokenizer().decode
    return next((end for end in range(1, len(tokens) + 1) if text in decode(tokens[:end])), None)


def check_stopped(free: Sequence[Mapping[str, Any]], stopped: Sequence[Mapping[str, Any]], text: str, off: float = 0.0) -> None:
    """Compare responses that end at a text with those that went on: the same tokens and log-probs, up to the one that completes it."""
    ends = [end_at_text(one["tokens"], text) for one in free]
    assert {end is None for end in ends} == {True, False}
    for one, other, end in zip(free, stopped, ends, strict=True):
        assert other["tokens"] == one["tokens"][:end]
        torch.testing.assert_close(torch.tensor(other["log_probs"]), torch.tensor(one["log_probs"][:end]), atol=off, rtol=0)
        assert other["finish"] == ("length" if end is None else "stop")


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
