"""A streamed update: the passes of an update on the same chunks at once, begun while the rollout still decodes."""

import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
from support import digests, forked_workers
from support.digests import ITEMS, DigestCritic, DigestPolicy

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import GraphError
from rlgraph.nodes.base import tensor_of
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

LOSS = rg.ClippedLoss(clip_high=0.28, kl_coef=0.1)
GAE = rg.GAE(lam=0.95, whiten=False)


class LargestError(rg.losses.ValueLoss):
    """A value loss of a user's, which may compare rows."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def graph(
    model: str,
    *,
    chunks: int = 4,
    depth: int = 1,
    loss: Any = LOSS,
    estimator: Any = None,
    order: Literal["data", "finish"] = "data",
    old: bool = True,
    value_loss: Any = rg.losses.ValueLoss(),  # noqa: B008 (a frozen value)
    critic_warmup: int = 0,
    reference_pool: str = "reference",
    tokens: int = 6,
    **update: Any,
) -> rg.Graph:
    """GRPO with a reference, or PPO for the estimator GAE; the updates are streamed unless they say otherwise."""
    pools = {name: rg.Pool(name) for name in ("rollout", "train", "reference", "critic")}
    sampling = rg.Sampling(max_tokens=tokens, temperature=0.9, stop_token_ids=tuple(range(1, 12)))
    generator = rg.Generator(model, pool=pools["rollout"], engine="transformers", sampling=sampling, dtype="float32")
    policy = DigestPolicy(model, pool=pools["train"], optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=depth)
    prompts = rg.prompts(ITEMS, count=8, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=2, chunks=chunks, order=order)
    rewards = rg.reward(length_and_letters, rollout, *([prompts] if order == "data" else []))
    reference = rg.Reference(model, pool=pools[reference_pool], dtype="float32")
    critic = DigestCritic(model, pool=pools["critic"], optimizer=rg.AdamW(lr=3e-3), dtype="float32")
    values = [critic.values(rollout)] if isinstance(estimator, rg.GAE) else []
    advantages = rg.advantages(rollout, rewards, *values, estimator=estimator or rg.GRPO())
    inputs = [rollout, advantages, reference.log_probs(rollout), *([policy.log_probs(rollout)] if old else [])]
    update = {"streamed": True, **update}
    step = policy.update(*inputs, loss=loss, critic_warmup=critic_warmup, **update)
    weights.close(step.weights)
    read = [rollout, advantages, *(values if value_loss.clip else [])]
    learnt = [critic.update(*read, loss=value_loss, **update).metrics] if values else []
    return rg.Graph("tiny", step.metrics, *learnt, sorted_by_length(rollout))


def length_and_letters(response: str, prompt: str, answer: str) -> float:
    return (len(response) + 0.1 * len(set(response))) * int(answer) - 0.01 * len(prompt)


@rg.node(reads="response_mask", writes="rows")
def sorted_by_length(batch: Columns) -> tuple[Columns, dict[str, float]]:
    """Tell whether the longest responses of the groups, of two each, grow."""
    longest = tensor_of(batch, "response_mask").sum(-1).view(-1, 2).amax(-1)
    return {"rows": longest.repeat_interleave(2)}, {"sorted": float(bool((longest.diff() >= 0).all()))}


@pytest.mark.parametrize(
    ("settings", "update"),
    [
        ({}, {}),
        ({"depth": 0}, {}),
        ({"old": False, "depth": 2}, {"mini_batches": 2}),
        ({"loss": rg.ClippedLoss(kl_coef=0.1, entropy_coef=0.01, aggregation="seq-mean-token-sum"), "old": False, "depth": 2}, {}),
        ({"loss": rg.losses.GSPO(kl_coef=0.1)}, {}),
        ({"loss": rg.ClippedLoss(kl_coef=0.1, aggregation="token-sum")}, {}),
        ({"estimator": GAE, "depth": 0}, {}),
        ({"estimator": GAE, "value_loss": rg.losses.ValueLoss(aggregation="seq-mean-token-mean"), "critic_warmup": 1}, {}),
    ],
    ids=["one step off", "on-policy", "mini-batches", "means over rows", "means of means", "sums", "critic", "warm-up"],
)
def test_it_learns_what_an_update_on_whole_batches_learns(model: str, settings: dict[str, Any], update: dict[str, Any]) -> None:
    streamed = digests.run_here(graph(model, **settings, **update), 3)
    whole = digests.run_here(graph(model, **settings, **update, streamed=False), 3)
    for ours, theirs in zip(streamed, whole, strict=True):
        assert ours.keys() == theirs.keys()
        found = [{name: value for name, value in step.items() if not name.startswith("digest")} for step in (ours, theirs)]
        assert found[0] == pytest.approx(found[1], rel=2e-4, abs=2e-6)


def test_groups_in_the_order_in_which_they_finish_are_the_same_batch(model: str) -> None:
    found = [digests.run_here(graph(model, order=order, tokens=60, depth=0), 3) for order in ("data", "finish")]
    for ours, theirs in zip(*found, strict=True):
        assert (ours.pop("sorted"), theirs.pop("sorted")) == (0, 1)
        same = [{name: value for name, value in step.items() if not name.startswith("digest")} for step in (ours, theirs)]
        assert same[0] == pytest.approx(same[1], rel=2e-4, abs=2e-6)


@pytest.mark.parametrize(
    ("depth", "order", "estimator"), [(0, "finish", None), (1, "data", None), (2, "finish", None), (0, "data", GAE), (1, "finish", GAE)]
)
def test_workers_learn_from_a_chunk_while_others_decode_and_equal_one_process_in_every_bit(
    model: str, depth: int, order: Literal["data", "finish"], estimator: Any
) -> None:
    made = graph(model, depth=depth, tokens=200, order=order, estimator=estimator)
    with forked_workers.job(made) as job:
        found = [digests.clockless_metrics(step) for step in job.steps(4)]
        spans = {(span.name, span.step): span for span in job.spans() if span.kind == "fire"}
        assert job.run().bubbles.residual <= 0.01  # the share of the time that no row explains
    assert found == digests.run_here(made, 4)
    for update in ("update", *(["critic_update"] if estimator else [])):
        assert depth or any(spans[f"{update} 1/4", step].start_s < spans["rollout 4/4", step].end_s for step in range(4))


def test_a_trainer_killed_within_a_batch_goes_on_as_if_it_had_not_been(model: str, tmp_path: Path) -> None:
    made = graph(model, tokens=100)
    plan, found = digests.plan(made), []
    with Job(made, plan, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(tmp_path, 1, 2, 2)) as job:
        for step in job.steps(7):
            found.append(digests.clockless_metrics(step))
            if step.index in (2, 4):
                os.kill(job.pids["policy"], signal.SIGKILL)
    assert found == digests.run_here(made, 7)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunks": 1}, "0 rollouts with chunks"),
        ({"estimator": rg.estimators.ReinforcePlusPlusBaseline()}, "estimates by ReinforcePlusPlusBaseline, which needs the whole batch"),
        ({"estimator": rg.GAE()}, "'advantages' estimates by GAE, which needs the whole batch unless whiten=False"),
        ({"loss": rg.losses.KlCov(kl_coef=0.1)}, "loss=KlCov"),
        (
            {"value_loss": LargestError(), "estimator": GAE},
            "LargestError(…), which does not add up over chunks; use a loss such as rg.losses.",
        ),
        ({"epochs": 2}, "epochs=2"),
        ({"mini_batches": 2}, "'old_log_probs' would score later chunks"),
        (
            {"mini_batches": 2, "old": False, "estimator": GAE, "value_loss": rg.losses.ValueLoss(clip=None)},
            "'values' would score later chunks with weights that earlier ones have trained. Leave out mini_batches",
        ),
        ({"mini_batches": 8, "old": False}, "mini_batches=8 of a batch in 4 chunks"),
        ({"mini_batches": 2, "old": False, "order": "finish"}, "earlier optimizer steps would learn from shorter responses"),
        ({"reference_pool": "train"}, "'ref_log_probs'] of another model would take turns"),
        ({"reference_pool": "rollout"}, "'ref_log_probs' runs in its pool 'rollout', so only after it"),
    ],
)
def test_what_needs_the_whole_batch_is_refused(model: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(GraphError, match="streamed=True") as refused:
        graph(model, **settings)
    assert said in str(refused.value)


def test_an_order_that_has_no_effect_or_that_other_rows_do_not_have_is_refused(model: str) -> None:
    prompts, weights = rg.prompts(ITEMS, count=8), rg.feedback("weights", depth=1)
    generator, policy = rg.Generator(model, pool=rg.Pool("rollout")), rg.Policy(model, pool=rg.Pool("train"))
    with pytest.raises(GraphError, match="one chunk, so it has no effect"):
        generator.rollout(prompts, weights, order="finish")
    with pytest.raises(GraphError, match="depends on the clock"):
        generator.rollout(prompts, weights, chunks=2, order="finish", continuous=True)
    rollout = generator.rollout(prompts, weights, chunks=2, order="finish")
    other = generator.rollout(prompts, weights, sampling=rg.Sampling(max_tokens=4, temperature=0.0), name="greedy")
    rewards = rg.reward(length_and_letters, rollout)
    baseline = rg.reward(length_and_letters, other, prompts, writes="baseline_rewards", name="baseline")
    advantages = rg.advantages(rollout, rewards, baseline, estimator=rg.estimators.ReMax())
    weights.close(policy.update(rollout, advantages, loss=rg.ClippedLoss()).weights)
    with pytest.raises(GraphError, match="'advantages' joins rows of 'reward', in the order in which groups of 'rollout' finish"):
        rg.Graph("two orders", advantages)
