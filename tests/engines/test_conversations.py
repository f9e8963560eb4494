"""An engine that is told of conversations keeps what it has read between their turns, and samples what it samples without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engine_conversations import BETWEEN, CASES, PROMPTS, TURN, compare_conversations

from rlgraph.engines.transformers.engine import TransformersEngine

VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.stage("jobs")])
SGLANG = [pytest.param(name, marks=pytest.mark.stage("sglang")) for name in ("sglang", "sglang overlap")]


@pytest.fixture(scope="module", params=["transformers", VLLM, *SGLANG])
def found(request: pytest.FixtureRequest, tied: Path, in_process: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    if request.param == "transformers":
        return compare_conversations(TransformersEngine(tied, dtype=torch.float32, max_context=64), load_file(tied / "model.safetensors"))
    told: dict[str, Any] = in_process(request.param)["talked"]
    return told


@pytest.mark.parametrize("case", CASES)
def test_turns_have_the_tokens_that_requests_of_their_own_have(found: dict[str, Any], case: str) -> None:
    told, apart = found[case][True], found[case][False]
    for name in ("tokens", "versions", "finish"):
        assert [response[name] for response in told] == [response[name] for response in apart]
    for with_it, without in zip(told, apart, strict=True):
        assert with_it["log_probs"] == pytest.approx(without["log_probs"], abs=1e-5)


def test_a_turn_after_new_weights_is_of_these_alone(found: dict[str, Any]) -> None:
    old, new = found["goes on"][True], found["new weights"][True]
    assert [response["versions"] for response in new[-len(PROMPTS) :]] == [[1] * TURN.max_tokens] * len(PROMPTS)
    assert old[: -len(PROMPTS)] == new[: -len(PROMPTS)]
    assert old[-1]["log_probs"] != pytest.approx(new[-1]["log_probs"], abs=1e-3)


@pytest.fixture(scope="module")
def held(in_process: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = in_process("vllm")["held"]
    return found


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_vllm_reads_only_what_is_new_to_a_conversation(held: dict[str, Any]) -> None:
    assert held["read, True"] == len(PROMPTS) * (len(BETWEEN) + 1), "and the last token of the turn, which it wrote and has not read"
    assert held["read, False"] == sum(len(prompt) + TURN.max_tokens + len(BETWEEN) for prompt in PROMPTS), "no whole block of 32 is cached"
    assert held["after a turn"] == (len(PROMPTS), len(PROMPTS))
    assert held["two at once"] == (1, 1), "of one conversation"
    assert held["ended"] == (0, 0)
    assert held["dropped"] == (0, 0)


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_vllm_reads_a_turn_anew_that_goes_on_from_elsewhere(held: dict[str, Any]) -> None:
    told, apart = held["branch"]
    assert [response["tokens"] for response in told] == [response["tokens"] for response in apart]


@pytest.mark.stage("jobs")
@pytest.mark.vllm
def test_vllm_gives_back_what_waits_where_others_need_its_memory_or_its_places(held: dict[str, Any]) -> None:
    assert held["without room"] == (0, 0)
    assert held["without a place"] == (1, 1), "the request that ran and one that waits"
