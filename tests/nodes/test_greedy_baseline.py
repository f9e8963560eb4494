"""Two rollouts of one generator in a step: sampled responses and a greedy one beside them, on one feedback edge."""

from typing import Any

import pytest
import torch

import rlgraph as rg
from rlgraph.algorithms import Reinforce, ReMax
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.plan.events import load_event

ITEMS = [{"prompt": f"item {i}"} for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def versions(weight_version: torch.Tensor, responses: torch.Tensor) -> list[float]:
    return weight_version[:, 0].float().tolist()  # type: ignore[no-any-return]


def graph(model: str, depth: int = 1, latest: bool = False) -> rg.Graph:
    sampling, greedy = rg.Sampling(max_tokens=4), rg.Sampling(max_tokens=6, temperature=0)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine="transformers")
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3))
    weights = rg.feedback("weights", depth=depth, latest=latest)
    prompts = rg.prompts(ITEMS, count=2)
    rollout = generator.rollout(prompts, weights, group_size=3)
    baseline = rg.reward(
        versions, generator.rollout(prompts, weights, sampling=greedy, name="greedy"), writes="baseline_rewards", name="baseline"
    )
    advantages = rg.advantages(rollout, rg.reward(versions, rollout), baseline, estimator=ReMax())
    step = policy.update(rollout, advantages, loss=Reinforce())
    weights.close(step.weights)
    return rg.Graph("remax", step.metrics)


@pytest.mark.parametrize(("depth", "expected"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2])])
def test_both_use_the_version_of_the_step_and_load_it_once(model: str, depth: int, expected: list[int]) -> None:
    with rg.compile(graph(model, depth), rg.Cluster(cpus=2)).run_here() as job:
        loaded = count_loads(job.progress["generator"].worker.context.engine)
        found = [step.metrics for step in job.steps(4)]
    assert [step["critic/rewards/mean"] for step in found] == expected
    assert [step["critic/baseline_rewards/mean"] for step in found] == expected
    assert len(loaded) == expected[-1]


def count_loads(engine: Any) -> list[int]:
    loaded, load = [], engine.load_weights
    engine.load_weights = lambda weights, **how: (loaded.append(1), load(weights, **how))
    return loaded


def test_the_plan_certifies_both_and_loads_once_before_the_first(model: str) -> None:
    plan = rg.compile(graph(model), rg.Cluster(cpus=2))
    assert (plan.certificate.staleness_bound, plan.certificate.deadlock_free) == (1, True)
    assert [e.name for e in plan.schedule.events if e.kind == "load"] == [load_event("weights", "rollout")]
    waiting = {d.after for d in plan.schedule.dependencies if d.before == load_event("weights", "rollout") and d.reason == "loop"}
    assert waiting == {"rollout", "greedy"}


def test_with_the_latest_weights_too_both_use_one_version(model: str) -> None:
    with rg.compile(graph(model, latest=True), rg.Cluster(cpus=2)).run_here() as job:
        for step in job.steps(3):
            assert step.metrics["critic/rewards/mean"] == step.metrics["critic/baseline_rewards/mean"] == step.index
