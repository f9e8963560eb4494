"""Weights and prompts that join responses under way, in whole runs: the same prompts a step, the bound for every token, and learning."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import ITEMS, DigestPolicy, digest, odd_tokens, plan, run_here, run_in_workers

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.runtime.worker.activity import Activity

LENGTHS = rg.Sampling(max_tokens=14, stop_token_ids=tuple(range(10, 50)))  # most responses are short, some are not


@rg.node(reads="prompts group_ids weight_version response_mask", writes="seen")
def seen(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Digest the prompts, and tell how many responses hold tokens of several versions."""
    prompts, ids, versions, mask = (batch[name] for name in ("prompts", "group_ids", "weight_version", "response_mask"))
    assert isinstance(versions, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    oldest, newest = versions.masked_fill(~mask, 99).min(-1).values, versions.masked_fill(~mask, -1).max(-1).values
    metrics = {
        "digest/prompts": digest([prompts, ids]),
        "oldest": float(oldest.min()),
        "newest": float(newest.max()),
        "mixed": (oldest < newest).float().mean().item(),
        "tokens": float(mask.sum()),
    }
    return {"seen": newest.float()}, metrics


def loop(model: Path, depth: int, *, buffers: int = 1, latest: bool = False, **options: Any) -> rg.Graph:
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=LENGTHS, dtype="float32")
    policy = DigestPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=2e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth, buffers=buffers, latest=latest)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4, seed=3), weights, group_size=4, **options)
    advantages = rg.advantages(rollout, odd_tokens(rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("joining", step.metrics, seen(rollout))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_continuous_run_has_the_prompts_of_one_batch_by_batch_and_keeps_the_bound(model: Path) -> None:
    depth = 2
    batchwise, continuous = run_here(loop(model, depth), 6), run_here(loop(model, depth, continuous=True), 6)
    assert [step["digest/prompts"] for step in continuous] == [step["digest/prompts"] for step in batchwise]
    for index, step in enumerate(continuous):
        assert max(0, index - depth) <= step["oldest"] <= step["newest"] <= index
    assert sum(step["mixed"] for step in continuous) > 0, "no response was under way at a change of weights: the test shows nothing"
    assert sum(step["mixed"] for step in batchwise) == 0


def test_a_rollout_that_weights_have_interrupted_is_said_to_run_again(model: Path) -> None:
    entered: list[Activity] = []
    with plan(loop(model, 2, continuous=True)).run_here() as job:
        job.progress["generator"].worker.on_enter = lambda step, activity: entered.append(activity)
        list(job.steps(6))
    running, pairs = Activity("fire", "rollout"), list(pairwise(entered))
    assert any(before == running and then.version for before, then in pairs), "no weights came within a firing: this shows nothing"
    assert {before for before, then in pairs if then.kind == "put" and before.kind != "put"} == {running}


def test_a_continuous_run_of_workers_equals_the_oracle_in_every_bit(model: Path) -> None:
    graph = loop(model, 1, continuous=True)
    assert run_in_workers(graph, 5) == run_here(graph, 5)


@pytest.mark.parametrize("options", [{"interrupt": "recompute"}, {"interrupt": "keep", "continuous": True}], ids=["interrupt", "both"])
def test_interrupted_runs_keep_the_bound_and_learn(model: Path, options: dict[str, Any]) -> None:
    batchwise, found = run_here(loop(model, 2), 4), run_in_workers(loop(model, 2, latest=True, **options), 30)
    assert [step["digest/prompts"] for step in found[:4]] == [step["digest/prompts"] for step in batchwise]
    for index, step in enumerate(found):
        assert max(0, index - 2) <= step["oldest"] <= step["newest"] <= index
        assert step["staleness/max"] <= 2
    odd = [step["odd"] for step in found]
    assert sum(odd[-5:]) / 5 > sum(odd[:5]) / 5 + 0.1


def test_an_interrupt_with_nothing_published_meanwhile_changes_no_bit(model: Path) -> None:
    # In one process nothing is published while a rollout decodes; with interrupts it begins with the newest version anyway.
    expected = run_here(loop(model, 1, latest=True), 4)
    assert run_here(loop(model, 1, latest=True, interrupt="keep"), 4) == expected
    assert run_here(loop(model, 1, interrupt="recompute"), 4) == expected


def test_a_continuous_rollout_shares_its_pool_with_no_other_model(model: Path) -> None:
    pool = rg.Pool("rollout")
    generator = rg.Generator(str(model), pool=pool)
    reference = rg.Reference(str(model), pool=pool)
    policy = rg.Policy(str(model), pool=rg.Pool("train"))
    weights = rg.feedback("weights", depth=1)
    rollout = generator.rollout(rg.prompts(ITEMS, count=4), weights, continuous=True)
    rewards = rg.stages.kl_shaped_rewards(rollout, odd_tokens(rollout), policy.log_probs(rollout), reference.log_probs(rollout), coef=0.1)
    step = policy.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    with pytest.raises(rg.RlgraphError, match=r"node 'rollout' has continuous=True.*run in the same pool 'rollout'"):
        rg.Graph("shared", step.metrics)
