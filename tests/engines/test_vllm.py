"""The vLLM engine gives samples of the weights it was given last. vLLM patches torch, so it has processes of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import UPDATES, VLLM_PROMPTS, changed

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=["tied", "untied"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process with an engine found, and the folder of its model."""
    folder, here = request.getfixturevalue(request.param), Path(__file__)
    out = tmp_path_factory.mktemp("vllm") / "found.pt"
    environment = os.environ | {"PYTHONPATH": f"{here.parents[1]}:{here.parents[2]}"}
    command = [sys.executable, str(here.with_name("vllm_process.py")), str(folder), str(out), "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(out) | {"folder": folder, "printed": done.stdout + done.stderr}


def scores(folder: Path, update: int, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if update:
        model.load_state_dict(changed(load_file(folder / "model.safetensors"), update), strict=False)
    with torch.no_grad():
        table = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("update", range(UPDATES))
def test_log_probs_are_those_of_the_weights_given_last(run: dict[str, Any], update: int) -> None:
    for prompt, response in zip(VLLM_PROMPTS, run["updates"][update], strict=True):
        assert len(response["tokens"]) == 8
        expected = scores(run["folder"], update, prompt, response["tokens"])
        torch.testing.assert_close(torch.tensor(response["log_probs"]), expected, atol=1e-4, rtol=0)


def test_responses_repeat_to_the_bit_and_change_with_the_seed(run: dict[str, Any]) -> None:
    assert run["repeated"] == run["updates"][-1]
    assert run["repeated"][0]["tokens"] != run["repeated"][-1]["tokens"], "one prompt, two seeds"


def test_a_response_ends_with_its_stop_token(run: dict[str, Any]) -> None:
    free = run["repeated"][0]["tokens"]
    assert run["stopped"]["tokens"] == free[: free.index(free[3]) + 1]
    assert (run["stopped"]["finish"], run["repeated"][0]["finish"]) == ("stop", "length")


def test_arguments_of_the_user_replace_those_of_rlgraph(run: dict[str, Any]) -> None:
    assert run["batched_tokens"] == 2000


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


def test_the_terminal_is_left_to_the_user(run: dict[str, Any]) -> None:
    lines = [line for line in run["printed"].splitlines() if "NUMA binding" not in line]  # torch's own, from C++, on machines with NUMA
    assert lines == []
