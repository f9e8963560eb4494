"""What an update refuses to learn from, and that its weights are then those of before."""

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.tiny import WeightedLikelihood, batch_of, tiny_llama
from support.trainer_engines import fsdp_engine

import rlgraph as rg
from rlgraph import notices
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.errors import GraphError, GuardError
from rlgraph.nodes.training.guards import Guards, Outliers, UpdateGuard

FINE = {"actor/pg_loss": 0.1, "actor/grad_norm": 1.0, "actor/ppo_kl": 0.01}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def trained(model: Path, guards: Guards, *batches):
    """Return the metrics of an update on each batch, and the weights after all of them."""
    engine = fsdp_engine(PolicyHead(model), optimizer=rg.AdamW(lr=1e-3), dtype=torch.float32)
    guard = UpdateGuard("update", guards)
    found = []
    with closing(engine):
        for batch in batches:
            learnt = engine.update(batch, WeightedLikelihood(), guard=guard) if guard.batch(batch) else {}
            found.append({**learnt, **guard.metrics()})
        weights = {name: tensor.clone() for name, tensor in engine.weights().items()}
        return found, weights, len(engine._optimizer.state)


def poisoned(value: float):
    batch = batch_of([7, 2, 5, 5])
    batch["advantages"][1, 0] = value
    return batch


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_leaves_weights_and_moments_as_they_are_and_is_counted(model: Path, value: float) -> None:
    [found], weights, moments = trained(model, Guards(), poisoned(value))
    _, before, _ = trained(model, Guards())
    assert all(torch.equal(weights[name], before[name]) for name in before)
    assert moments == 0
    assert (found["guards/skipped"], found["guards/skipped_total"]) == (1, 1)


def test_a_run_goes_on_after_a_skipped_step_as_if_that_had_not_been(model: Path) -> None:
    good = batch_of([7, 2, 5, 5])
    found, weights, _ = trained(model, Guards(), poisoned(float("nan")), good)
    _, without, _ = trained(model, Guards(), good)
    assert all(torch.equal(weights[name], without[name]) for name in without)
    assert [metrics["guards/skipped"] for metrics in found] == [1, 0]
    assert found[1]["guards/skipped_total"] == 1


def test_stop_raises_before_the_weights_change(model: Path) -> None:
    with pytest.raises(GuardError, match=r"node 'update': actor/pg_loss is nan, actor/grad_norm is nan; the weights are unchanged"):
        trained(model, Guards(nonfinite="stop"), poisoned(float("nan")))
    assert not torch.distributed.is_initialized()


def test_an_empty_batch_is_skipped_and_counted(model: Path) -> None:
    batch = batch_of([7, 2, 5, 5])
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    [found], _, moments = trained(model, Guards(), batch)
    assert found["guards/skipped"] == 1
    assert moments == 0
    with pytest.raises(GuardError, match="no token to learn from"):
        trained(model, Guards(empty="stop"), batch)


def test_patience_ends_a_run_that_learns_nothing() -> None:
    guard = UpdateGuard("update", Guards(patience=3))
    bad = {**FINE, "actor/grad_norm": float("inf")}
    assert [guard(bad), guard(bad), guard(FINE), guard(bad), guard(bad)] == [False, False, True, False, False]
    with pytest.raises(GuardError, match="3 times in a row"):
        guard(bad)


def test_a_policy_far_from_the_one_that_sampled_is_warned_about_and_then_stopped(caplog: pytest.LogCaptureFixture) -> None:
    guard = UpdateGuard("update", Guards(warn_kl=0.1, stop_kl=0.5))
    with caplog.at_level(logging.WARNING, "rlgraph.guards"):
        assert guard({**FINE, "actor/ppo_kl": -0.2})
    assert "the policy is 0.2 nats a token from the one that sampled, and warn_kl is 0.1" in caplog.text
    with pytest.raises(GuardError, match=r"0\.6 nats a token .* stop_kl is 0\.5; the weights are unchanged"):
        guard({**FINE, "actor/ppo_kl": 0.6})
    with pytest.raises(GuardError):
        guard({**FINE, "actor/ppo_kl": float("nan")})


def test_log_probs_of_engine_and_trainer_that_differ_are_measured_over_the_tokens(caplog: pytest.LogCaptureFixture) -> None:
    mask = torch.tensor([[True, True, False]])
    batch = {
        "response_mask": mask,
        "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
        "rollout_log_probs": torch.tensor([[-1.5, -1.0, 9.0]]),
    }
    guard = UpdateGuard("update", Guards(warn_mismatch=0.7))
    with caplog.at_level(logging.WARNING, "rlgraph.guards"):
        assert guard.batch(batch)
    assert guard.metrics()["guards/mismatch"] == pytest.approx(0.75)
    assert guard.metrics()["guards/warnings"] == 1
    assert "differ by 0.75 on average" in caplog.text
    with pytest.raises(GuardError, match=r"stop_mismatch is 0\.5"):
        UpdateGuard("update", Guards(stop_mismatch=0.5)).batch(batch)


def test_a_limit_on_the_mismatch_asks_for_the_columns_it_needs() -> None:
    generator, policy = rg.Generator("m", pool=rg.Pool("a")), rg.Policy("m", pool=rg.Pool("b"))
    weights = rg.feedback("weights", depth=1)
    rollout = generator.rollout(rg.prompts([{"prompt": "1", "answer": "1"}], count=1), weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(lambda responses: [0.0] * len(responses), rollout), estimator=rg.GRPO())
    with pytest.raises(GraphError, match="old_log_probs"):
        policy.update(rollout, advantages, loss=rg.ClippedLoss(), guards=Guards(stop_mismatch=0.5))
    both = (rollout, advantages, policy.log_probs(rollout))
    for guards, measured in ((Guards(), True), (Guards(warn_mismatch=None), False)):
        step = policy.update(*both, loss=rg.ClippedLoss(), guards=guards)
        assert ({"rollout_log_probs", "old_log_probs"} <= {*step.metrics.node.reads}) == measured, "the default warns"
    with pytest.raises(GraphError, match=r"'update' has guards='stop'; guards is a Guards; write guards=rg\.options\.Guards"):
        policy.update(rollout, advantages, loss=rg.ClippedLoss(), guards="stop")
    with pytest.raises(GraphError, match="outliers=0"):
        rg.reward(lambda responses: [0.0], rollout, outliers=0)


@pytest.mark.parametrize("setting", [{"nonfinite": "ignore"}, {"patience": 0}, {"stop_kl": -1.0}, {"warn_mismatch": float("nan")}])
def test_settings_that_cannot_be_are_refused(setting) -> None:
    with pytest.raises(GraphError, match=r"Guards\(" + next(iter(setting))):
        Guards(**setting)


def test_a_reward_far_outside_of_those_before_is_an_outlier(caplog: pytest.LogCaptureFixture) -> None:
    outliers = Outliers("reward", 20.0)
    draw = torch.Generator().manual_seed(0)
    assert outliers.look(torch.tensor([1e6])) == 0  # nothing is known yet
    outliers = Outliers("reward", 20.0)
    assert [outliers.look(torch.rand(50, generator=draw)) for _ in range(4)] == [0, 0, 0, 0]
    with caplog.at_level(logging.WARNING, "rlgraph.guards"):
        assert outliers.look(torch.tensor([0.5, 1000.0, 0.2])) == 1
    assert "node 'reward': 1 of 3 rewards are outliers; response 1 got 1000" in caplog.text


def test_batches_whose_advantages_are_all_zero_are_measured_and_noticed_after_three() -> None:
    notices.here.forget()
    guard, equal, mixed = UpdateGuard("update", Guards()), batch_of([7, 2, 5, 5]), batch_of([7, 2, 5, 5])
    equal["advantages"] = torch.zeros_like(equal["advantages"])
    mixed["advantages"] = torch.zeros_like(mixed["advantages"])
    mixed["advantages"][0] = 1.0
    shares = []
    for batch in (equal, equal, mixed, equal, equal):
        guard.batch(batch)
        shares.append(guard.metrics()["critic/advantages/zero"])
    rows = len(mixed["advantages"])
    assert shares == [1.0, 1.0, pytest.approx(1 - 1 / rows), 1.0, 1.0]
    assert notices.here.list_all() == ()
    guard.batch(equal)
    assert "every advantage of 3 batches in a row is 0" in notices.here.list_all()[0]
