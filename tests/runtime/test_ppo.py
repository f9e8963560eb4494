"""PPO with a critic and a reference: equal to the oracle in every bit, the order of passes and updates, turns, ranks, and learning."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support import forked_workers
from support.digests import ITEMS, DigestCritic, DigestPolicy, clockless_metrics, digest, odd_tokens, plan, run_here, run_in_workers

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Span
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


class TwoEngines(rg.Generator):
    """A generator of two engines, each with its part of the prompts."""

    @property
    def ranks(self) -> int | None:
        return 2


def ppo(
    model: Path,
    *,
    depth: int = 0,
    generator: type[rg.Generator] = rg.Generator,
    policy: type[rg.Policy] = DigestPolicy,
    ranks: int | None = None,
    epochs: int = 1,
    mini_batches: int = 1,
    critic_warmup: int = 0,
    chunks: int = 1,
) -> rg.Graph:
    path, train_pool, score_pool = str(model), rg.Pool("train"), rg.Pool("score")
    sampling = rg.Sampling(max_tokens=6, temperature=0.9)
    writer = generator(path, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    trained = policy(path, pool=train_pool, optimizer=rg.AdamW(lr=1e-3, eps=1e-4), dtype="float32", data_parallel=ranks)
    critic = DigestCritic(path, pool=train_pool, optimizer=rg.AdamW(lr=3e-3, eps=1e-4), dtype="float32", data_parallel=ranks)
    reference = rg.Reference(path, pool=score_pool, dtype="float32")
    weights = rg.feedback("weights", depth=depth)

    prompts = rg.prompts(ITEMS, count=8, seed=3)
    rollout = writer.rollout(prompts, weights, group_size=2, chunks=chunks)
    old, ref, values = trained.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout)
    shaped = rg.stages.kl_shaped_rewards(rollout, odd_tokens(rollout), old, ref, coef=0.01)
    targets = rg.advantages(rollout, shaped, values, estimator=rg.GAE(gamma=1.0, lam=0.95))
    walks = {"epochs": epochs, "mini_batches": mini_batches}
    step = trained.update(rollout, old, targets, loss=rg.ClippedLoss(), critic_warmup=critic_warmup, **walks)
    critic_step = critic.update(rollout, values, targets, loss=rg.losses.ValueLoss(), **walks)
    weights.close(step.weights)
    return rg.Graph("ppo", step.metrics, critic_step.metrics)


@dataclass(frozen=True)
class Run:
    steps: Sequence[Step]
    spans: Sequence[Span]
    plan: Plan


@pytest.fixture(scope="module")
def run(model: Path) -> Run:
    """A run of workers: one step behind, four optimizer steps a batch, the policy still in the first step."""
    with forked_workers.job(ppo(model, depth=1, epochs=2, mini_batches=2, critic_warmup=1)) as job:
        return Run(list(job.steps(4)), job.spans(), job.plan)


def test_values_returns_and_both_updates_equal_the_oracle_in_every_bit(run: Run, model: Path) -> None:
    expected = run_here(ppo(model, depth=1, epochs=2, mini_batches=2, critic_warmup=1), 4)
    assert [clockless_metrics(step) for step in run.steps] == expected
    assert len({step["digest/critic"] for step in expected}) == 4
    assert {"critic/values/mean", "critic/returns/mean", "critic/vf_loss", "critic/grad_norm", "critic/lr"} <= expected[0].keys()


def test_several_optimizer_steps_are_one_version(run: Run) -> None:
    assert [step.staleness for step in run.steps] == [0, 1, 1, 1]
    published = [span.version for span in run.spans if span.kind == "publish"]
    assert published == [1, 2, 3, 4]


def test_nodes_of_one_pool_take_turns(run: Run) -> None:
    fired = [span for span in run.spans if span.kind == "fire"]
    for one, other in combinations(fired, 2):
        pool = run.plan.node(one.name).pool
        if pool is not None and pool == run.plan.node(other.name).pool:
            assert one.end_s <= other.start_s or other.end_s <= one.start_s, (one, other)


def test_the_reference_runs_on_a_pool_of_its_own(run: Run) -> None:
    pools = {name: run.plan.node(name).pool for name in ("rollout", "old_log_probs", "ref_log_probs", "values", "update", "critic_update")}
    assert pools == {
        "rollout": "rollout",
        "old_log_probs": "train",
        "ref_log_probs": "score",
        "values": "train",
        "update": "train",
        "critic_update": "train",
    }
    order = [d for d in run.plan.schedule.dependencies if d.reason == "order"]
    assert not [d for d in order if "ref_log_probs" in (d.before, d.after)]


def test_the_policy_stays_as_it_is_while_its_critic_warms_up(model: Path) -> None:
    steps = run_here(ppo(model, critic_warmup=2), 4)
    assert ["digest/weights" in step for step in steps] == [False, False, True, True]
    assert len({step["digest/critic"] for step in steps}) == 4
    assert all("actor/pg_loss" not in step for step in steps[:2])
    assert steps[2]["actor/lr"] == 1e-3


class Remembering(rg.Policy):
    """A policy that notes whether its log-probs were those of the weights at the start of the update."""

    def load(self, context: Any) -> Any:
        engine = super().load(context)
        scores, update, seen = engine.scores, engine.update, []

        def remembered(batch: Columns, **settings: Any) -> Any:
            seen.append(digest(engine.weights().values()))
            return scores(batch, **settings)

        def compared(batch: Columns, loss: Any, **settings: Any) -> dict[str, float]:
            same = seen[-1] == digest(engine.weights().values())
            return {**update(batch, loss, **settings), "passes": float(len(seen)), "same": float(same), "seen": seen[-1]}

        engine.scores, engine.update = remembered, compared
        return engine


@pytest.mark.parametrize("depth", [0, 2])
def test_old_log_probs_are_those_of_the_weights_at_the_start_of_the_update(model: Path, depth: int) -> None:
    steps = run_here(ppo(model, depth=depth, policy=Remembering), 4)
    assert [step["passes"] for step in steps] == [1, 2, 3, 4]
    assert [step["same"] for step in steps] == [1] * 4
    assert len({step["seen"] for step in steps}) == 4
    assert [abs(step["actor/ppo_kl"]) < 1e-6 for step in steps] == [True] * 4


def test_a_rollout_in_chunks_changes_neither_values_nor_what_is_learnt(model: Path) -> None:
    whole, parts = run_here(ppo(model, depth=1), 3), run_here(ppo(model, depth=1, chunks=4), 3)
    for a, b in zip(whole, parts, strict=True):
        assert a["digest/tokens"] == b["digest/tokens"]
        for name in ("critic/values/mean", "critic/returns/mean", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-4, abs=1e-6), name


def followed(model: Path, depth: int, edge: str, policy: type[rg.Policy] = rg.Policy) -> rg.Graph:
    """GRPO with old log-probs by the policy itself (`edge=""`), or on a pool of their own by the weights of an edge."""
    path, weights = str(model), rg.feedback("weights", depth=depth)
    sampling = rg.Sampling(max_tokens=6, temperature=0.9)
    generator = rg.Generator(path, pool=rg.Pool("rollout"), engine="transformers", sampling=sampling, dtype="float32")
    trained = policy(path, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3, eps=1e-4), dtype="float32")
    follower = rg.Reference(path, pool=rg.Pool("logp"), dtype="float32")
    rollout = generator.rollout(rg.prompts(ITEMS, count=8, seed=3), weights, group_size=2)
    edges = {"rollout's": weights, "at the update": rg.feedback("old", depth=0)}
    old = follower.old_log_probs(rollout, weights=edges[edge]) if edge else trained.log_probs(rollout)
    advantages = rg.advantages(rollout, odd_tokens(rollout), gap(rollout, old), estimator=LookedAt())
    step = trained.update(rollout, old, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    if edge == "at the update":
        edges[edge].close(step.weights)
    return rg.Graph("followed", step.metrics)


@rg.node(reads="old_log_probs rollout_log_probs response_mask", writes="old_gap")
def gap(batch: Columns) -> tuple[dict[str, Any], dict[str, float]]:
    """Measure how far old log-probs are from those that the tokens were sampled with."""
    old, sampled, mask = batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"]
    distance = ((old - sampled) * mask).abs().amax(-1)  # type: ignore[operator]
    return {"old_gap": distance}, {"gap": distance.max().item()}


class LookedAt(rg.GRPO):
    """GRPO that also reads the gap, so that its node is part of the graph."""

    reads = (*rg.GRPO.reads, "old_gap")


def test_old_log_probs_on_a_pool_of_their_own_equal_the_trainers_in_what_is_learnt(model: Path) -> None:
    own, trainers = run_here(followed(model, 1, "at the update"), 4), run_here(followed(model, 1, ""), 4)
    assert [step["gap"] > 1e-3 for step in own] == [False, True, True, True]
    for a, b in zip(own, trainers, strict=True):
        assert a["digest/tokens"] == b["digest/tokens"]
        assert abs(a["actor/ppo_kl"]) < 1e-6
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-5)


def test_old_log_probs_that_follow_the_rollouts_edge_are_those_it_sampled_with(model: Path) -> None:
    steps = run_here(followed(model, 2, "rollout's"), 4)
    assert all(step["gap"] < 1e-4 for step in steps)
    assert [abs(step["actor/ppo_kl"]) > 1e-4 for step in steps] == [False, True, True, True]
    assert [step["staleness/max"] for step in steps] == [0, 1, 2, 2]


def test_workers_that_follow_equal_the_oracle_in_every_bit(model: Path) -> None:
    graph = followed(model, 1, "at the update", DigestPolicy)
    assert run_in_workers(graph, 4) == run_here(graph, 4)


def saved(graph: rg.Graph, folder: Path, steps: int) -> list[dict[str, float]]:
    """Run up to `steps` steps, from the checkpoint in the folder if there is one, and leave one there."""
    planned = plan(graph)
    with LocalJob(graph, planned, Checkpoints(graph, planned, Recovery(folder, 2, 2))) as job:
        return [clockless_metrics(step) for step in job.steps(steps)]


@pytest.mark.parametrize("kind", ["critic", "follower"])
def test_a_resumed_run_goes_on_with_critic_moments_and_followed_weights_as_they_were(model: Path, kind: str, tmp_path: Path) -> None:
    def graph() -> rg.Graph:
        if kind == "critic":
            return ppo(model, depth=1, mini_batches=2, critic_warmup=1)
        return followed(model, 1, "at the update", DigestPolicy)

    first = saved(graph(), tmp_path / "run", 2)
    assert first + saved(graph(), tmp_path / "run", 4) == run_here(graph(), 4)


def test_two_engines_and_two_ranks_of_policy_and_critic_do_what_one_of_each_does(model: Path) -> None:
    one, two = run_here(ppo(model, depth=1), 2), run_in_workers(ppo(model, depth=1, generator=TwoEngines, ranks=2), 2)
    for a, b in zip(one, two, strict=True):
        assert a["digest/tokens"] == b["digest/tokens"]
        for name in ("odd", "actor/grad_norm", "critic/grad_norm", "critic/vf_loss", "critic/values/mean", "critic/returns/mean"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-6), name


def test_the_reward_rises_and_the_value_loss_falls(model: Path) -> None:
    steps = run_here(ppo(model, epochs=2, mini_batches=2, critic_warmup=2), 24)

    def mean(name: str, part: Sequence[dict[str, float]]) -> float:
        return sum(step[name] for step in part) / 4

    assert mean("odd", steps[-4:]) > mean("odd", steps[:4]) + 0.2
    assert mean("critic/vf_loss", steps[-4:]) < 0.5 * mean("critic/vf_loss", steps[:4])
