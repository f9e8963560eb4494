"""The conformance suite of engines that generate: each gives samples of the weights it was given last.

An engine patches torch for its whole process, so each has processes of its own. SGLang's pins exclude vLLM's: its tests run where it is
installed, by `make test-sglang`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.generation_requests import DRAWN, check_stopped
from support.tiny import UPDATES, VLLM_PROMPTS, other_weights

from rlgraph.values.sampling import Sampling

VLLM = [pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.stage("jobs")])]
SGLANG = [pytest.param(name, marks=pytest.mark.stage("sglang")) for name in ("sglang", "sglang overlap")]


@pytest.fixture(scope="module", params=[*VLLM, *SGLANG])
def run(request: pytest.FixtureRequest, in_process: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What one process with an engine found, and the folder of its model."""
    return in_process(request.param)


def logits_of(folder: Path, update: int, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if update:
        model.load_state_dict(other_weights(load_file(folder / "model.safetensors"), update), strict=False)
    with torch.no_grad():
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


def of_tokens(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("update", range(UPDATES))
def test_log_probs_are_those_of_the_weights_given_last(run: dict[str, Any], update: int) -> None:
    for prompt, response in zip(VLLM_PROMPTS, run["updates"][update], strict=True):
        assert len(response["tokens"]) == 8
        expected = of_tokens(logits_of(run["folder"], update, prompt, response["tokens"]), response["tokens"])
        torch.testing.assert_close(torch.tensor(response["log_probs"]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("drawn", DRAWN)
def test_log_probs_are_those_of_the_distribution_that_is_drawn_from(run: dict[str, Any], drawn: str) -> None:
    sampling = DRAWN[drawn]
    for prompt, response in zip(VLLM_PROMPTS, run["drawn"][drawn], strict=True):
        logits = logits_of(run["folder"], UPDATES - 1, prompt, response["tokens"])
        if sampling.temperature == 0:
            assert response["tokens"] == logits.argmax(-1).tolist()
        else:
            logits = left_in(logits / sampling.temperature, sampling)
        expected = of_tokens(logits, response["tokens"])
        torch.testing.assert_close(torch.tensor(response["log_probs"]), expected, atol=1e-4, rtol=0)


def left_in(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Leave in what `min_p` does, the `top_k` likeliest tokens, then the likeliest that together have `top_p`, token by token."""
    kept = torch.full_like(logits, -torch.inf)
    for row, values in enumerate(logits):
        order = values.argsort(descending=True)[: sampling.top_k or None]
        order = order[(values[order] - values.max()).exp() >= sampling.min_p]
        share = 0.0
        for token, probability in zip(order.tolist(), values[order].softmax(-1).tolist(), strict=True):
            if share < sampling.top_p:
                kept[row, token] = values[token]
            share += probability
    return kept


def test_responses_repeat_and_change_with_the_seed(run: dict[str, Any]) -> None:
    """To the bit, or to the last ones where the cached part of a prompt may end at any token: the rest is then read in another shape."""
    again, first = run["repeated"], run["updates"][-1]
    assert [response["tokens"] for response in again] == [response["tokens"] for response in first]
    off = 1e-5 if run["engine"].startswith("sglang") else 0
    for one, other in zip(again, first, strict=True):
        torch.testing.assert_close(torch.tensor(one["log_probs"]), torch.tensor(other["log_probs"]), atol=off, rtol=0)
    assert again[0]["tokens"] != again[-1]["tokens"], "one prompt, two seeds"


def test_a_response_alone_is_the_one_of_a_batch(run: dict[str, Any]) -> None:
    assert [response["tokens"] for response in run["alone"]] == [response["tokens"] for response in run["repeated"]]


def test_an_engine_that_slept_samples_as_before(run: dict[str, Any]) -> None:
    assert [response["tokens"] for response in run["slept"]] == [response["tokens"] for response in run["repeated"]]


@pytest.mark.parametrize("run", SGLANG, indirect=True)
def test_sglang_frees_weights_keys_and_values_asleep_and_has_both_again_awake(run: dict[str, Any]) -> None:
    assert run["asleep"] == {"weights", "kv_cache"}
    assert run["awake"] == set()


@pytest.mark.parametrize("run", SGLANG, indirect=True)
def test_recorded_copies_leave_the_model_as_its_own_loader_does(run: dict[str, Any]) -> None:
    """On a CPU vLLM reloads instead; its copies are compared on GPUs."""
    assert len(run["copied"]) > 10
    assert all(run["copied"].values())


@pytest.mark.parametrize("run", SGLANG, indirect=True)
def test_a_closed_engine_leaves_no_file_in_shared_memory_or_among_temporary_ones(run: dict[str, Any]) -> None:
    assert run["left"] == []


def test_a_response_ends_with_its_stop_token(run: dict[str, Any]) -> None:
    free = run["repeated"][0]["tokens"]
    assert run["stopped"]["tokens"] == free[: free.index(free[3]) + 1]
    assert (run["stopped"]["finish"], run["repeated"][0]["finish"]) == ("stop", "length")


def test_a_response_ends_with_the_token_that_completes_a_stop_string(run: dict[str, Any]) -> None:
    off = 1e-5 if run["engine"].startswith("sglang") else 0.0
    check_stopped(run["repeated"], run["stopped_at_text"], run["text"], off)
    in_conversation, alone = run["next_turns"]
    assert in_conversation == alone


@pytest.mark.parametrize("run", VLLM, indirect=True)
def test_arguments_of_the_user_replace_those_of_rlgraph(run: dict[str, Any]) -> None:
    assert run["batched_tokens"] == 2000


@pytest.mark.parametrize("run", VLLM, indirect=True)
def test_an_engine_of_a_cpu_compiles_nothing(run: dict[str, Any]) -> None:
    assert run["compiled"] == 0


@pytest.mark.parametrize("run", VLLM, indirect=True)
def test_a_request_that_was_copied_is_what_vllm_makes_of_it(run: dict[str, Any]) -> None:
    assert not any(run["differing"].values())
    assert len(run["differing"]) == len(DRAWN) + 2


def test_a_response_ends_at_the_context(run: dict[str, Any]) -> None:
    assert run["context"] == 64
    assert len(run["at_context"]["tokens"]) == 4
    assert run["at_context"]["finish"] == "length"


def test_weights_that_are_not_all_of_the_model_are_refused(run: dict[str, Any]) -> None:
    assert "missing" in run["refused"]
    assert "shape" in run["reshaped"]


def test_one_thread_is_one_core(run: dict[str, Any]) -> None:
    assert run["threads"] == 1
    assert run["cores"] < 1.1


@pytest.mark.parametrize("run", VLLM, indirect=True)
def test_an_engine_that_starts_in_a_new_home_imports_vllm_in_no_other_process(run: dict[str, Any]) -> None:
    assert run["children_s"] < 2


def test_the_terminal_is_left_to_the_user(run: dict[str, Any]) -> None:
    lines = [line for line in run["printed"].splitlines() if "NUMA binding" not in line]  # torch's own, from C++, on machines with NUMA
    assert lines == []
