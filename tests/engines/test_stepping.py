"""Every generate engine can be driven step by step; what it does at a change of weights is told by the log-probs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engine_steps import BEFORE, LATE, LENGTH, OTHER, PROMPTS, step_engine
from support.tiny import other_weights

from rlgraph.engines.transformers.engine import TransformersEngine

PROMPT_OF = {f"early{i}": p for i, p in enumerate(PROMPTS)} | {f"{name}{i}": p for name in ("late", "new") for i, p in enumerate(LATE)}


VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.stage("jobs")])
SGLANG = [pytest.param(name, marks=pytest.mark.stage("sglang")) for name in ("sglang", "sglang overlap")]


@pytest.fixture(scope="module", params=["transformers", VLLM, *SGLANG])
def found(request: pytest.FixtureRequest, tied: Path, in_process: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    if request.param == "transformers":
        engine = TransformersEngine(tied, dtype=torch.float32, max_context=64)
        return step_engine(engine, load_file(tied / "model.safetensors")) | {"late": 0, "folder": tied}
    done, late = in_process(request.param), int("overlap" in request.param)  # by how many steps its tokens are known late
    return done["stepped"] | {"late": late, "folder": done["folder"]}


@pytest.fixture(scope="module")
def models(found: dict[str, Any]) -> tuple[Any, Any]:
    """The model before the change of weights and after it."""
    from transformers import AutoModelForCausalLM

    before, after = (AutoModelForCausalLM.from_pretrained(found["folder"], dtype=torch.float32) for _ in range(2))
    after.load_state_dict(other_weights(load_file(found["folder"] / "model.safetensors"), OTHER), strict=False)
    return before, after


def scores(model: Any, name: str, response: dict[str, Any]) -> torch.Tensor:
    """Return the log-prob of each token of a response in one forward pass over the whole sequence."""
    prompt, tokens = PROMPT_OF[name], response["tokens"]
    with torch.no_grad():
        table = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_tokens_before_a_change_of_weights_are_of_the_old_ones(found: dict[str, Any], models: tuple[Any, Any], running: str) -> None:
    assert found[running]["written"] == dict.fromkeys(("early0", "early1", "early2", "early3"), BEFORE - found["late"]) | {
        "late0": 0,
        "late1": 0,
    }
    for row in range(len(PROMPTS)):
        response = found[running]["responses"][f"early{row}"]
        expected = scores(models[0], f"early{row}", response)[:BEFORE]
        torch.testing.assert_close(torch.tensor(response["log_probs"][:BEFORE]), expected, atol=1e-4, rtol=0)


def test_tokens_after_it_are_of_the_new_ones_where_keys_and_values_are_computed_again(
    found: dict[str, Any], models: tuple[Any, Any]
) -> None:
    for row in range(len(PROMPTS)):
        response = found["recompute"]["responses"][f"early{row}"]
        assert len(response["tokens"]) == LENGTH
        expected = scores(models[1], f"early{row}", response)[BEFORE:]
        torch.testing.assert_close(torch.tensor(response["log_probs"][BEFORE:]), expected, atol=1e-4, rtol=0)


def test_tokens_after_it_are_of_neither_where_keys_and_values_are_kept(found: dict[str, Any], models: tuple[Any, Any]) -> None:
    for row in range(len(PROMPTS)):
        response = found["keep"]["responses"][f"early{row}"]
        assert len(response["tokens"]) == LENGTH
        for model in models:
            off = torch.tensor(response["log_probs"]) - scores(model, f"early{row}", response)
            assert off[BEFORE:].abs().max() > 1e-3


@pytest.mark.parametrize("running", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["late0", "late1", "new0", "new1"])
def test_requests_without_a_token_know_the_new_weights_alone(
    found: dict[str, Any], models: tuple[Any, Any], running: str, name: str
) -> None:
    response = found[running]["responses"][name]
    torch.testing.assert_close(torch.tensor(response["log_probs"]), scores(models[1], name, response), atol=1e-4, rtol=0)


@pytest.mark.parametrize("running", ["recompute", "keep"])
def test_each_token_carries_the_version_that_wrote_it(found: dict[str, Any], running: str) -> None:
    for name, response in found[running]["responses"].items():
        before = BEFORE if name.startswith("early") else 0
        assert response["versions"] == [3] * before + [4] * (LENGTH - before)


@pytest.mark.parametrize("case", ["unchanged", "unchanged keep"])
def test_loading_the_same_weights_changes_no_token(found: dict[str, Any], case: str) -> None:
    tokens = [found[case]["responses"][f"early{row}"]["tokens"] for row in range(len(PROMPTS))]
    assert tokens == [response["tokens"] for response in found["whole"]]


def test_requests_that_join_later_change_no_token(found: dict[str, Any]) -> None:
    together = [found["held"]["early0"], found["held"]["early1"], *found["beside"]]
    assert [response["tokens"] for response in together] == [response["tokens"] for response in found["whole"]]


def test_an_aborted_request_gives_what_it_has_and_the_others_go_on(found: dict[str, Any]) -> None:
    assert found["aborted"].keys() == {"early0"}
    assert found["aborted"]["early0"]["tokens"] == found["whole"][0]["tokens"][: 3 - found["late"]]
    assert len(found["aborted"]["early0"]["log_probs"]) == 3 - found["late"]
    assert found["left"].keys() == {"early1"}
    assert found["left"]["early1"]["tokens"] == found["whole"][1]["tokens"]
