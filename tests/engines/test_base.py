"""Values that pass through engines are checked where they are made."""

import dataclasses

import pytest
import torch

from rlgraph.engines.api import Request, check_request, check_weights
from rlgraph.errors import DataError
from rlgraph.values.optimizers import AdamW
from rlgraph.values.sampling import Sampling


def test_the_learning_rate_rises_over_the_warm_up() -> None:
    settings = AdamW(lr=4.0, warmup_steps=4)
    assert [settings.lr_at(step) for step in range(6)] == [1, 2, 3, 4, 4, 4]
    assert dataclasses.replace(settings, warmup_steps=0).lr_at(0) == 4


@pytest.mark.parametrize(("prompt", "rule"), [([], "0 tokens"), ([1] * 8, "8 tokens"), ([99], "token id"), ([-1], "token id")])
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: list[int], rule: str) -> None:
    with pytest.raises(DataError, match=f"request 'mine': the prompt has .*{rule}"):
        check_request(Request("mine", prompt, Sampling(), 0), (), context=8, vocab=99)


def test_a_request_needs_an_id_of_its_own() -> None:
    with pytest.raises(DataError, match="request 'mine': the engine already holds a request with this id"):
        check_request(Request("mine", [1], Sampling(), 0), ("mine",), context=8, vocab=99)


@pytest.mark.parametrize(("weights", "rule"), [({}, "missing"), ({"a": (2,), "b": (1,)}, "unknown"), ({"a": (3,)}, "shape")])
def test_weights_that_are_not_all_of_the_model_are_refused(weights: dict[str, tuple[int, ...]], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        check_weights({name: torch.zeros(shape) for name, shape in weights.items()}, {"a": (2,)})
