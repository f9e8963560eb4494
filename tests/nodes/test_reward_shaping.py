"""Rewards on their way to the advantages: the KL coefficient that follows the KL, and the penalty of responses too long."""

from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.algorithms import AdaptiveKL, OverlongPenalty
from rlgraph.errors import GraphError
from rlgraph.nodes.base import Context

COLUMNS = {
    "rewards": torch.tensor([1.0]),
    "response_mask": torch.tensor([[True, True, False]]),
    "old_log_probs": torch.tensor([[-1.0, -2.0, 9.0]]),
    "ref_log_probs": torch.tensor([[-2.0, -2.0, 0.0]]),
}


def rollout_and_rewards() -> tuple[rg.Output, rg.Output]:
    rollout = rg.Generator("m", pool=rg.Pool("p")).rollout(rg.prompts([{"prompt": "?"}], count=2), group_size=2)
    return rollout, rg.reward(lambda response_mask: [0.0], rollout)


def kl_stage(**settings: Any) -> Any:
    rollout, rewards = rollout_and_rewards()
    old, ref = rg.Policy("m", pool=rg.Pool("t")).log_probs(rollout), rg.Reference("m", pool=rg.Pool("r")).log_probs(rollout)
    return rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, **settings).node.operation.start(Context())


def test_the_coefficient_follows_the_kl_and_a_batch_has_the_one_from_before_it() -> None:
    stage, controller = kl_stage(coef=AdaptiveKL(0.5, target=0.1, horizon=10)), AdaptiveKL(0.5, target=0.1, horizon=10)
    found, expected = [], []
    for step in range(3):
        columns, metrics = stage(step, COLUMNS)
        torch.testing.assert_close(columns["token_rewards"], torch.tensor([[-controller.coef, 1.0, 0.0]]))
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
        found.append(metrics["actor/reward_kl_penalty_coeff"])
        expected.append(controller.coef)
        controller = controller.advance(0.5, rows=1)
    assert found == expected
    assert found[0] < found[1] < found[2]


def test_a_fixed_coefficient_stays() -> None:
    stage = kl_stage(coef=0.5)
    assert [stage(step, COLUMNS)[1]["actor/reward_kl_penalty_coeff"] for step in range(3)] == [0.5] * 3


def test_a_node_that_is_started_again_begins_with_the_coefficient_it_was_given() -> None:
    operation_state = kl_stage(coef=AdaptiveKL(0.5, horizon=10))
    operation_state(0, COLUMNS)
    assert kl_stage(coef=AdaptiveKL(0.5, horizon=10))(0, COLUMNS)[1]["actor/reward_kl_penalty_coeff"] == 0.5


def test_a_coefficient_goes_on_from_its_state() -> None:
    first, second = (kl_stage(coef=AdaptiveKL(0.5, target=0.1, horizon=10)) for _ in range(2))
    first(0, COLUMNS)
    second.load_state(first.state())
    assert second(1, COLUMNS)[1] == first(1, COLUMNS)[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coef": -1}, "a number of at least 0, or AdaptiveKL"),
        ({"coef": "big"}, "or AdaptiveKL"),
        ({"coef": 1, "estimator": "full"}, "estimator is one of"),
    ],
)
def test_wrong_settings_are_refused_when_declared(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        kl_stage(**settings)


def test_responses_that_run_into_the_buffer_lose_reward_and_the_metrics_say_how_much() -> None:
    rollout, rewards = rollout_and_rewards()
    output = rg.stages.shaped_rewards(rollout, rewards, by=OverlongPenalty(max_tokens=4, buffer_tokens=2), name="overlong")
    mask = torch.arange(4)[None] < torch.tensor([[1], [3], [4]])
    columns, metrics = output.node.operation.start(Context())(0, {"rewards": torch.ones(3), "response_mask": mask})
    assert columns["rewards"].tolist() == [1.0, 0.5, 0.0]
    assert metrics == {"critic/overlong/mean": -0.5, "critic/overlong/fraction": pytest.approx(2 / 3)}


def test_a_penalty_that_no_response_is_long_enough_for_is_refused() -> None:
    rollout, rewards = rollout_and_rewards()
    most = rollout.node.operation.sampling.max_tokens
    rg.stages.shaped_rewards(rollout, rewards, by=OverlongPenalty(max_tokens=most + 4, buffer_tokens=5))
    with pytest.raises(GraphError, match=rf"more than {most} tokens, but 'rollout' writes at most {most}.*max_tokens={most}"):
        rg.stages.shaped_rewards(rollout, rewards, by=OverlongPenalty(max_tokens=most + 4, buffer_tokens=4), name="late")


def test_what_is_shaped_may_lie_in_another_column() -> None:
    rollout, _ = rollout_and_rewards()
    accuracy = rg.reward(lambda response_mask: [0.0], rollout, writes="accuracy")
    output = rg.stages.shaped_rewards(rollout, accuracy, of="accuracy", by=OverlongPenalty(max_tokens=4, buffer_tokens=2))
    assert output.node.reads == ("accuracy", "response_mask")
    columns, _ = output.node.operation.start(Context())(0, {"accuracy": torch.ones(1), "response_mask": torch.ones(1, 4, dtype=torch.bool)})
    assert columns["rewards"].tolist() == [0.0]


@pytest.mark.parametrize("by", [OverlongPenalty, None, rg.GRPO])
def test_what_does_not_shape_rewards_is_refused(by: Any) -> None:
    with pytest.raises(GraphError, match="pass an object that maps rewards"):
        rg.stages.shaped_rewards(*rollout_and_rewards(), by=by)
