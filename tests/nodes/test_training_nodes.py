"""Policy, critic and reference where they are declared: settings without a meaning are refused, with the reason."""

from typing import Any

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.errors import GraphError, PlanError


def graph_parts() -> Any:
    pool = rg.Pool("train")
    policy, critic = rg.Policy("m", pool=pool), rg.Critic("m", pool=pool)
    prompts = rg.prompts([{"prompt": "?"}], count=3)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(prompts, group_size=2)
    return policy, critic, rollout, rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO())


def length(responses: list[str]) -> list[float]:
    return [float(len(r)) for r in responses]


def test_weights_of_a_critic_close_no_feedback() -> None:
    _, critic, rollout, _ = graph_parts()
    values = critic.values(rollout)
    targets = rg.advantages(rollout, rg.reward(length, rollout), values, estimator=rg.GAE())
    step = critic.update(rollout, values, targets, loss=rg.losses.ValueLoss())
    with pytest.raises(GraphError, match="closed with the weights of 'critic_update', a critic"):
        rg.feedback("weights", depth=0).close(step.weights)


def test_a_reference_follows_no_edge_whose_version_nobody_knows() -> None:
    _, _, rollout, _ = graph_parts()
    reference = rg.Reference("m", pool=rg.Pool("logp"))
    with pytest.raises(GraphError, match="uses the newest version: rollout and log-probs would use different ones"):
        reference.old_log_probs(rollout, weights=rg.feedback("weights", depth=1, latest=True))
    with pytest.raises(GraphError, match="pass what rlgraph"):
        reference.old_log_probs(rollout, weights="weights")


def test_a_reference_follows_no_rollout_whose_responses_run_through_several_versions() -> None:
    weights, prompts = rg.feedback("weights", depth=1), rg.prompts([{"prompt": "?"}], count=3)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(prompts, weights, group_size=2, interrupt="keep")
    reference = rg.Reference("m", pool=rg.Pool("logp"))
    with pytest.raises(GraphError, match="of 'rollout', whose responses run through several versions"):
        reference.old_log_probs(rollout, weights=weights)
    assert reference.old_log_probs(rollout, weights=rg.feedback("old", depth=0)).columns == ("old_log_probs",)


def test_old_log_probs_declared_after_the_update_are_refused() -> None:
    pool, weights = rg.Pool("train"), rg.feedback("weights", depth=0)
    policy, prompts = rg.Policy("m", pool=pool), rg.prompts([{"prompt": "?"}], count=3)
    rollout = rg.Generator("m", pool=rg.Pool("rollout")).rollout(prompts, weights, group_size=2)
    advantages = rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    with pytest.raises(GraphError, match="'old_log_probs' is declared after 'update', so it would see the updated weights"):
        rg.Graph("late", step.metrics, policy.log_probs(rollout))


def test_an_update_that_walks_its_batch_three_times_is_expected_to_take_three_times_as_long() -> None:
    def seconds(epochs: int) -> float:
        policy, _, rollout, advantages = graph_parts()
        step = policy.update(rollout, advantages, loss=rg.ClippedLoss(), epochs=epochs)
        return rg.compile(rg.Graph("walks", step.metrics), rg.Cluster(gpus=2, cpus=8)).node("update").seconds

    assert seconds(3) == pytest.approx(3 * seconds(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"engine": "transformers", "max_sequences": 8},
            "engine='transformers', max_sequences=8.: 'transformers' has no such setting; leave it out, or use engine='vllm'",
        ),
        ({"engine": "transformers", "memory": 0.5}, "engine='transformers', memory=0.5.: 'transformers' has no such setting"),
        ({"engine": "transformers", "tensor_parallel": 2}, "'transformers' has no such setting; leave it out, or use engine='vllm'"),
        ({"engine": "vllm", "self_test": False}, "'vllm' has no such setting; leave it out, or use engine='transformers'"),
        ({"memory": 0.5, "pool": rg.Pool("host", cpus=2)}, "memory is a share of a GPU's; leave it out on host cores"),
    ],
)
def test_settings_that_an_engine_would_not_look_at_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        rg.Generator("m", **{"pool": rg.Pool("p"), **settings})


def test_a_share_of_a_gpu_is_refused_where_the_cluster_has_none() -> None:
    graph = grpo_graph(rg.Generator("m", pool=rg.Pool("p"), memory=0.5), rg.Policy("m", pool=rg.Pool("t")))
    rg.compile(graph, rg.Cluster(gpus=2))
    with pytest.raises(PlanError, match=r"model of node 'rollout' has memory=0\.5, a share of a GPU's, but this cluster has no GPU"):
        rg.compile(graph, rg.Cluster(cpus=4))
