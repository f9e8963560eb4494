"""Several optimizer steps on a batch: which rows each takes and how often, what metrics become, and what is refused."""

from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.errors import GraphError
from rlgraph.nodes.mini_batches import Walks

BATCH = {"responses": torch.arange(8)[:, None], "texts": [str(i) for i in range(8)]}


class Recorder:
    """An engine that notes the rows of each optimizer step."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def update(self, batch: Columns, loss: Any) -> dict[str, float]:
        responses = batch["responses"]
        assert isinstance(responses, torch.Tensor)
        assert list(batch["texts"]) == [str(i) for i in responses[:, 0].tolist()]
        self.rows.append(responses[:, 0].tolist())
        return {"step": float(len(self.rows))} | ({"first": 1.0} if len(self.rows) == 1 else {})


def rows_of(walks: Walks) -> list[list[int]]:
    engine = Recorder()
    walks.update(engine, BATCH, None)
    return engine.rows


def test_a_batch_is_one_optimizer_step_unless_said_otherwise() -> None:
    assert rows_of(Walks()) == [list(range(8))]


def test_parts_are_rows_side_by_side_and_each_walk_repeats_them() -> None:
    assert rows_of(Walks(epochs=2, mini_batches=2)) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_a_metric_is_the_mean_over_the_optimizer_steps_that_have_it() -> None:
    assert Walks(epochs=2, mini_batches=2).update(Recorder(), BATCH, None) == {"step": 2.5, "first": 1.0}


def graph_parts() -> Any:
    pool = rg.Pool("train")
    policy, critic = rg.Policy("m", pool=pool), rg.Critic("m", pool=pool)
    prompts = rg.prompts([{"prompt": "?"}], count=3)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(prompts, group_size=2)
    return policy, critic, rollout, rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO())


def length(responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mini_batches": 4}, "has mini_batches=4 of a batch of 6 rows; the parts are to be equally large"),
        ({"mini_batches": 0}, "mini_batches is a whole number of at least 1"),
        ({"epochs": 1.5}, "epochs is a whole number of at least 1"),
        ({"critic_warmup": -1}, "critic_warmup is a whole number of at least 0"),
        ({"critic_warmup": 2}, "has critic_warmup=2, but no critic's values lead to it"),
    ],
)
def test_settings_without_a_meaning_are_refused_where_they_are_declared(settings: dict[str, Any], message: str) -> None:
    policy, _, rollout, advantages = graph_parts()
    with pytest.raises(GraphError, match=message):
        policy.update(rollout, advantages, loss=rg.ClippedLoss(), **settings)


def test_weights_of_a_critic_close_no_feedback() -> None:
    _, critic, rollout, _ = graph_parts()
    values = critic.values(rollout)
    targets = rg.advantages(rollout, rg.reward(length, rollout), values, estimator=rg.GAE())
    step = critic.update(rollout, values, targets, loss=rg.ValueLoss())
    with pytest.raises(GraphError, match="closed with the weights of 'critic_update', a critic"):
        rg.feedback("weights", depth=0).close(step.weights)


def test_a_reference_follows_no_edge_whose_version_nobody_knows() -> None:
    _, _, rollout, _ = graph_parts()
    reference = rg.Reference("m", pool=rg.Pool("logp"))
    with pytest.raises(GraphError, match="takes the newest version there is: rollout and log-probs would use different ones"):
        reference.old_log_probs(rollout, weights=rg.feedback("weights", depth=1, freshest=True))
    with pytest.raises(GraphError, match="as weights; pass what rlgraph"):
        reference.old_log_probs(rollout, weights="weights")


def test_a_reference_takes_no_optimizer() -> None:
    with pytest.raises(TypeError, match="optimizer"):
        rg.Reference("m", pool=rg.Pool("logp"), optimizer=rg.AdamW())


def test_old_log_probs_declared_after_the_update_are_refused() -> None:
    pool, weights = rg.Pool("train"), rg.feedback("weights", depth=0)
    policy, prompts = rg.Policy("m", pool=pool), rg.prompts([{"prompt": "?"}], count=3)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    with pytest.raises(GraphError, match="'old_log_probs' is declared after 'update' and would see the weights that it leaves"):
        rg.Graph("late", step.metrics, policy.log_probs(rollout))
