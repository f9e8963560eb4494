"""Dynamic sampling and streaming together, in whole runs: every bit repeats, each prompt is trained once, kills included."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.digests import ITEMS, DigestPolicy, plan, run_here, run_in_workers

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

pytestmark = pytest.mark.stage("kills")

LENGTHS = rg.Sampling(max_tokens=14, stop_token_ids=tuple(range(10, 50)))  # most responses are short, some are not
GROUPS = 4


def often_constant(response: str) -> float:
    return float(len(response) % 4 == 0)


@rg.node(reads="group_ids weight_version response_mask", writes="seen")
def seen(batch: rg.Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Tell the groups of the batch, the oldest token's version, and the share of responses that several versions wrote."""
    ids, versions, mask = (batch[name] for name in ("group_ids", "weight_version", "response_mask"))
    assert isinstance(ids, torch.Tensor)
    assert isinstance(versions, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    oldest, newest = versions.masked_fill(~mask, 99).min(-1).values, versions.masked_fill(~mask, -1).max(-1).values
    places = {f"group/{place}": float(group) for place, group in enumerate(dict.fromkeys(ids.tolist()))}
    return {"seen": newest.float()}, {**places, "oldest": float(oldest.min()), "mixed": (oldest < newest).float().mean().item()}


def loop(model: str, depth: int, **options: Any) -> rg.Graph:
    generator = rg.Generator(model, pool=rg.Pool("rollout"), engine="transformers", sampling=LENGTHS, dtype="float32")
    policy = DigestPolicy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=2e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth, buffers=2)
    prompts = rg.prompts(ITEMS, count=GROUPS, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=2, refill=rg.options.Refill(reward=often_constant), **options)
    advantages = rg.advantages(rollout, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_high=0.28, aggregation="token-mean"))
    weights.close(step.weights)
    return rg.Graph("streamed", step.metrics, seen(rollout))


def groups_of(steps: list[dict[str, float]]) -> list[int]:
    return [int(step[f"group/{place}"]) for step in steps for place in range(GROUPS)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def test_a_run_of_workers_equals_the_oracle_in_every_bit_and_keeps_the_bound(model: str) -> None:
    depth = 2
    found = run_in_workers(loop(model, depth, continuous=True), 5)
    assert found == run_here(loop(model, depth, continuous=True), 5)
    assert all(earlier < later for earlier, later in pairwise(groups_of(found)))
    for index, step in enumerate(found):
        assert max(0, index - depth) <= step["oldest"]
        assert step["staleness/max"] <= depth
    assert sum(step["mixed"] for step in found) > 0, "no response was under way at a change of weights: the test shows nothing"
    assert sum(step["dynamic_sampling/filtered_groups"] for step in found) > 0, "no group was constant: the test shows nothing"


def test_interrupts_and_the_next_batch_go_together_within_the_bound(model: str) -> None:
    found = run_in_workers(loop(model, 2, continuous=True, interrupt="keep"), 8)
    assert all(earlier < later for earlier, later in pairwise(groups_of(found)))
    assert all(index - 2 <= step["oldest"] for index, step in enumerate(found))


def test_killed_workers_train_no_prompt_twice_and_leave_none_out(model: str, tmp_path: Path) -> None:
    graph, found, killed = loop(model, 2, continuous=True), [], {4: "generator", 7: "policy"}
    recovery = Recovery(tmp_path, 3, 2, 2)
    with Job(graph, plan(graph), dispatch_name="forked", deadline_s=60.0, recovery=recovery) as running:
        for step in running.steps(10):
            found.append(dict(step.metrics))
            if step.index in killed:
                os.kill(running.pids[killed[step.index]], signal.SIGKILL)
    trained = groups_of(found)
    assert all(earlier < later for earlier, later in pairwise(trained)), "in the data order, and none twice"
    drawn = sum(step["dynamic_sampling/prompts"] for step in found)
    assert trained[-1] < drawn, "what is not trained was drawn and filtered: the batches lie side by side in the order"
    assert len(trained) + sum(step["dynamic_sampling/filtered_groups"] for step in found) == drawn
    assert all(max(0, index - 2) <= step["oldest"] for index, step in enumerate(found))
