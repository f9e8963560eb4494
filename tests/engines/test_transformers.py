"""Responses of the transformers engine are samples of its model, and depend on weights, prompt and seed."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from support.generation_requests import FREE, check_stopped, end_at_text, two_letters
from support.tiny import VLLM_PROMPTS

from rlgraph.engines.api import Response
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.engines.transformers.engine import TransformersEngine, sample
from rlgraph.errors import DataError
from rlgraph.values.sampling import Sampling

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]]
SEEDS = [1, 2, 3, 4]


@pytest.fixture
def engine(tied: Path) -> TransformersEngine:
    return TransformersEngine(tied, dtype=torch.float32, max_context=32)


def scores(path: Path, prompt: list[int], response: Response) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        table = model(torch.tensor([prompt + response.tokens])).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(-1, torch.tensor(response.tokens)[:, None])[:, 0]


def test_log_probs_are_those_of_the_model(engine: TransformersEngine, tied: Path) -> None:
    responses = engine.generate(PROMPTS, Sampling(max_tokens=6, ignore_eos=True), SEEDS)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        assert len(response.tokens) == 6
        torch.testing.assert_close(torch.tensor(response.log_probs), scores(tied, prompt, response), atol=1e-5, rtol=0)


def test_responses_repeat_to_the_bit_and_change_with_the_seed(engine: TransformersEngine) -> None:
    sampling = Sampling(max_tokens=6)
    first = engine.generate(PROMPTS, sampling, SEEDS)
    assert engine.generate(PROMPTS, sampling, SEEDS) == first
    assert first[0].tokens != first[3].tokens, "one prompt, two seeds"


def test_a_response_does_not_depend_on_the_other_prompts(engine: TransformersEngine) -> None:
    together = engine.generate(PROMPTS, Sampling(max_tokens=6), SEEDS)
    alone = [engine.generate([prompt], Sampling(max_tokens=6), [seed])[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert [r.tokens for r in together] == [r.tokens for r in alone]


def test_a_response_ends_with_its_stop_token(engine: TransformersEngine) -> None:
    free = engine.generate(PROMPTS, Sampling(max_tokens=8, ignore_eos=True), SEEDS)
    stop = free[0].tokens[3]
    stopped = engine.generate(PROMPTS, Sampling(max_tokens=8, ignore_eos=True, stop_token_ids=(stop,)), SEEDS)
    for before, after in zip(free, stopped, strict=True):
        end = before.tokens.index(stop) + 1 if stop in before.tokens else 8
        assert after.tokens == before.tokens[:end]
        assert (before.finish, after.finish) == ("length", "stop" if stop in before.tokens else "length")
    assert len(stopped[0].tokens) <= 4
    [last] = engine.generate(PROMPTS[:1], Sampling(max_tokens=len(stopped[0].tokens), stop_token_ids=(stop,)), SEEDS[:1])
    assert (last.tokens, last.finish) == (stopped[0].tokens, "stop"), "it ended by itself, with the last token that it may have"


def test_a_response_ends_with_the_token_that_completes_a_stop_string(engine: TransformersEngine) -> None:
    free = [asdict(response) for response in engine.generate(VLLM_PROMPTS[3:], FREE, SEEDS[:2])]
    text = two_letters([response["tokens"] for response in free])
    stopped = engine.generate(VLLM_PROMPTS[3:], replace(FREE, stop=(text,)), SEEDS[:2])
    check_stopped(free, [asdict(response) for response in stopped], text)
    [end] = [end_at_text(response["tokens"], text) for response in free if end_at_text(response["tokens"], text)]
    last = engine.generate(VLLM_PROMPTS[3:], replace(FREE, max_tokens=end, stop=(text,)), SEEDS[:2])
    assert [response.finish for response in last] == [response.finish for response in stopped], "it ends with the last token it may have"


def test_a_response_ends_at_the_context(engine: TransformersEngine) -> None:
    responses = engine.generate([[3] * 30, [3] * 4], Sampling(max_tokens=5, ignore_eos=True), [0, 1])
    assert [(len(response.tokens), response.finish) for response in responses] == [(2, "length"), (5, "length")]
    assert engine.context_length() == 32


def test_greedy_takes_the_likeliest_token(engine: TransformersEngine) -> None:
    greedy = Sampling(max_tokens=5, temperature=0)
    assert engine.generate(PROMPTS, greedy, SEEDS) == engine.generate(PROMPTS, greedy, [9, 9, 9, 9])


def test_new_weights_give_the_responses_of_the_model_they_come_from(engine: TransformersEngine, tmp_path: Path) -> None:
    other = TransformersEngine(tiny_model(tmp_path / "other", seed=1), dtype=torch.float32, max_context=32)
    sampling = Sampling(max_tokens=6)
    expected = other.generate(PROMPTS, sampling, SEEDS)
    assert engine.generate(PROMPTS, sampling, SEEDS) != expected
    engine.load_weights(dict(other._model.named_parameters()))
    assert engine.generate(PROMPTS, sampling, SEEDS) == expected


def test_weights_of_another_model_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(DataError, match="missing"):
        engine.load_weights({"model.norm.weight": torch.ones(64)})


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.2])
    numbers = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sample(probabilities.log().expand(20_000, -1), numbers, Sampling())
    torch.testing.assert_close(torch.bincount(tokens, minlength=4) / 20_000, probabilities, atol=0.01, rtol=0)
    torch.testing.assert_close(log_probs, probabilities.log()[tokens])


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), [4 / 7, 0.0, 3 / 7, 0.0]),
        (Sampling(top_p=0.35), [1.0, 0.0, 0.0, 0.0]),
        (Sampling(top_p=0.6), [4 / 7, 0.0, 3 / 7, 0.0]),
        (Sampling(min_p=0.6), [4 / 7, 0.0, 3 / 7, 0.0]),
        (Sampling(min_p=0.6, top_p=0.5), [1.0, 0.0, 0.0, 0.0]),
        (Sampling(min_p=1.0), [1.0, 0.0, 0.0, 0.0]),
        (Sampling(temperature=0.5), [16 / 30, 1 / 30, 9 / 30, 4 / 30]),
    ],
)
def test_log_probs_are_of_the_distribution_sampled_from(sampling: Sampling, kept: list[float]) -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2]).log().expand(1000, -1)
    numbers = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, log_probs = sample(logits, numbers, sampling)
    assert set(tokens.tolist()) == {i for i, p in enumerate(kept) if p}
    torch.testing.assert_close(log_probs.exp(), torch.tensor(kept)[tokens])


def test_logits_that_are_no_numbers_have_log_probs_that_are_none() -> None:
    for sampling in (Sampling(), Sampling(top_p=0.9, top_k=2, min_p=0.1), Sampling(temperature=0)):
        tokens, log_probs = sample(torch.full((2, 4), torch.nan), torch.tensor([0.1, 0.9], dtype=torch.float64), sampling)
        assert ((tokens >= 0) & (tokens < 4)).all()
        assert log_probs.isnan().all()


def test_the_largest_number_draws_a_token_that_can_be() -> None:
    tokens, _ = sample(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1 - 2**-53], dtype=torch.float64), Sampling())
    assert tokens.tolist() == [0]
