"""What a user's functions return is found at the launch, on a made-up batch: node, finding, rule and fix, before anything starts."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.user_mistakes import graph

import rlgraph as rg
from rlgraph import notices
from rlgraph.columns import Columns
from rlgraph.errors import RlgraphError
from rlgraph.nodes import trial
from rlgraph.nodes.trial import try_functions

REWARDS: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda responses: None, "node 'reward': reward function <lambda> returned NoneType"),
    "a wrong count": (lambda responses: [0.0], "returned 1 rewards for 4 responses"),
    "text": (lambda response: "good", "returned 'good' for response 0 (prompt 0 of the data order: '0 + 1 =')"),
    "NaN": (lambda response, answer: float("nan"), "a reward is a finite number"),
    "an unknown name": (lambda response: responses, "raised NameError: name 'responses' is not defined"),  # type: ignore[name-defined]  # noqa: F821
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_that_goes_wrong_is_found_before_the_launch(name: str) -> None:
    function, words = REWARDS[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(graph(reward=function))
    assert words in str(caught.value)
    assert "trial=False" in str(caught.value)
    try_functions(graph(reward=function, rewarding={"trial": False}))


def test_an_error_that_real_texts_may_not_cause_is_a_notice() -> None:
    answers = {"0 + 1 =": "1"}
    try_functions(graph(reward=lambda response: answers[response]))
    said = "node 'reward': its function raised KeyError: '2 + 2 = 4, so the answer is 4.' on a made-up batch"
    assert any(text.startswith(said) for text in notices.here.said())


NODES: dict[str, tuple[Callable[[Columns], Any], str]] = {
    "nothing": (lambda batch: None, "node 'mine' returned None; it returns its columns by name"),
    "a float mask": (
        lambda batch: {"loss_mask": batch["response_mask"].float()},  # type: ignore[union-attr]
        "node 'mine' returned loss_mask as a tensor [4, 5] of float32; this column is a tensor [B, T] of bool",
    ),
    "a list of numbers": (lambda batch: {"loss_mask": [1, 2, 3, 4]}, "a column is a tensor of one row each, or a list of texts"),
    "an undeclared column": (
        lambda batch: {"loss_mask": batch["responses"] > 0},  # type: ignore[operator]
        "node 'mine': the function reads column 'responses', but its node reads ['response_mask']: add the column to reads=",
    ),
    "too few rows": (lambda batch: {"loss_mask": batch["response_mask"][:1]}, "returned 1 rows where 4 are due"),
}


def masked(function: Callable[[Columns], Any], **settings: Any) -> rg.Graph:
    mask = rg.node(reads="response_mask", writes="loss_mask", **settings)(function)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1 ="}], 3), group_size=2)
    return rg.Graph("g", mask(rollout, name="mine"))


@pytest.mark.parametrize("name", NODES)
def test_a_node_that_goes_wrong_is_found_before_the_launch(name: str) -> None:
    function, words = NODES[name]
    with pytest.raises(RlgraphError) as caught:
        try_functions(masked(function))
    assert words in str(caught.value)
    try_functions(masked(function, trial=False))


def test_a_made_up_batch_has_fields_of_the_data_and_leaves_states_and_random_numbers_alone() -> None:
    seen: list[Columns] = []

    class Counting:
        calls = 0

        def __call__(self, responses: list[str], answers: list[str], prompt_texts: list[str]) -> list[float]:
            self.calls += 1
            seen.append({"answers": answers, "prompt_texts": prompt_texts, "responses": responses})
            return [torch.rand(1).item() for _ in responses]

    counting = Counting()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    try_functions(graph(reward=counting))
    assert (torch.rand(1), counting.calls) == (expected, 0)
    assert seen[0]["answers"] == ["1", "1", "2", "2"]
    assert seen[0]["prompt_texts"] == ["0 + 1 =", "0 + 1 =", "1 + 1 =", "1 + 1 ="]
    assert all(isinstance(text, str) and text for text in seen[0]["responses"])


def test_a_slow_function_is_left_with_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT_S", 0.05)
    monkeypatch.setattr("rlgraph.nodes.rewards.scoring.LIMIT_S", 0.05)
    end = threading.Event()
    try_functions(graph(reward=lambda response: float(end.wait(30))))
    end.set()
    assert any("has not returned within 0.05 s, so it is not tried before the launch" in text for text in notices.here.said())


def test_the_reward_of_an_evaluation_is_tried_too() -> None:
    generator, weights = rg.Generator("m", pool=rg.Pool("rollout")), rg.feedback("weights", depth=1)
    found = rg.evaluate(generator, [{"prompt": "1 =", "answer": "1"}], weights, reward=lambda answers, responses: answers, every=1)
    with pytest.raises(RlgraphError, match="reward function <lambda> returned '1' for response 0"):
        found.node.operation.trial(found.node, trial.made_up(found.node.reads, 2), 2)


def test_functions_are_tried_before_a_job_is_made() -> None:
    node = rg.node(reads="prompt_ids", writes="rewards")(lambda batch: None)  # type: ignore[arg-type,return-value]
    plan = rg.compile(rg.Graph("g", node(rg.prompts([{"prompt": "1"}], 1), name="mine")), rg.Cluster(cpus=1))
    for start in (plan.run_here, plan.launch):
        with pytest.raises(RlgraphError, match=r"node 'mine' returned None.*found on a made-up batch"):
            start()
