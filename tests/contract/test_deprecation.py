"""Public names that changed: the old spelling works for one version, and warns with the new one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.engines.api import GenerateEngine
from rlgraph.nodes.base import Context
from rlgraph.notices import accept_old_names
from rlgraph.values.trainer import TrainerSettings


def right(prompt_texts: Sequence[str]) -> list[float]:
    return [1.0] * len(prompt_texts)


def reward(**settings: Any) -> int:
    operation: Any = rg.reward(right, rg.prompts([{"prompt": "1 + 1 ="}], 1), **settings).node.operation
    return int(operation.scoring.concurrency)


def evaluation(**settings: Any) -> int:
    pool, data = rg.Pool("rollout"), [{"prompt": "1 + 1 ="}]
    edge = rg.feedback("weights", depth=1)
    node = rg.evaluate(rg.Generator("m", pool=pool), data, edge, reward=right, every=1, **settings).node
    operation: Any = node.operation
    return int(operation.scoring.concurrency)


SPELLINGS: dict[str, tuple[Callable[..., Any], str, str, Any]] = {
    "feedback": (lambda **given: rg.feedback("w", depth=1, **given).latest, "freshest", "latest", True),
    "reward": (reward, "at_once", "concurrency", 3),
    "evaluate": (evaluation, "at_once", "concurrency", 3),
    "Refill": (lambda **given: rg.options.Refill(reward=right, **given).concurrency, "at_once", "concurrency", 3),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_old_spelling_works_and_the_warning_says_the_new_one(name: str) -> None:
    make, old, new, value = SPELLINGS[name]
    assert make(**{new: value}) == value
    with pytest.warns(DeprecationWarning, match=rf"{name}\({old}=...\) is now {name}\({new}=...\)") as said:
        assert make(**{old: value}) == value
    assert said[0].filename == __file__


def test_old_attributes_of_a_context_are_those_of_their_new_names() -> None:
    said: list[tuple[int, int, str]] = []
    with pytest.warns(DeprecationWarning, match=r"Context\(counted=...\) is now Context\(report_progress=...\)"):
        context = Context(counted=lambda *progress: said.append(progress))  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match=r"Context\.counted is now Context\.report_progress") as warned:
        context.counted(1, 2, "responses")
    assert warned[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"Context\.meeting is now Context\.listen_fd"):
        context.meeting = 3
    assert (said, context.listen_fd) == ([(1, 2, "responses")], 3)


ATTRIBUTES: dict[str, tuple[object, str, str]] = {
    "Output": (rg.prompts([{"prompt": "1 + 1 ="}], count=1), "apart", "with_prefix"),
    "Sampling": (rg.Sampling(max_tokens=1), "whole", "is_full_distribution"),
    "TrainerSettings": (TrainerSettings(tensor_parallel=2), "sharing", "ranks_per_pass"),
    "TruncatedIS": (rg.estimators.TruncatedIS(), "bounded", "bound"),
    "Context": (Context(shares_devices=True), "shared", "shares_devices"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_old_attribute_is_the_new_one(name: str) -> None:
    value, old, new = ATTRIBUTES[name]
    with pytest.warns(DeprecationWarning, match=rf"{name}\.{old} is now {name}\.{new}") as warned:
        assert getattr(value, old) == getattr(value, new)
    assert warned[0].filename == __file__


def test_a_class_of_a_user_may_define_a_method_by_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match=r"Halved\.bounded is now Halved\.bound") as warned:

        class Halved(rg.estimators.ImportanceWeights):
            def bounded(self, weights: torch.Tensor) -> torch.Tensor:
                return weights / 2

            def bounds(self) -> tuple[float, float]:
                return 0.0, 2.0

    assert warned[0].filename == __file__
    ones = torch.zeros(1, 1)
    assert Halved()(ones, ones, ones == 0).item() == 0.5  # type: ignore[abstract]


def test_an_engine_of_a_user_may_define_its_counts_by_their_old_names() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old\.(unfinished|written) is now Old\.count_(requests|tokens)"):

        class Old(GenerateEngine):
            def unfinished(self) -> int:
                return 0

            def written(self) -> dict[str, int]:
                return {}

    assert not {"count_requests", "count_tokens"} & Old.__abstractmethods__


def test_both_spellings_in_one_call_are_refused() -> None:
    with pytest.raises(TypeError, match="latest= and its old name freshest="):
        rg.feedback("w", depth=1, latest=True, freshest=True)  # type: ignore[call-arg]


def test_a_function_keeps_its_name_and_its_signature() -> None:
    @accept_old_names(old="new")
    def work(new: int) -> int:
        """Work."""
        return new

    assert (work.__name__, work.__doc__, work(1)) == ("work", "Work.", 1)
