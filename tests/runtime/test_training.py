"""Real engines on a tiny model: a run on Ray repeats the oracle bit for bit, batches, losses and weights, at any depth."""

from pathlib import Path

import pytest
import torch
from support.digests import ITEMS, digest_loop, odd_tokens, run_here, run_in_workers, run_on_ray

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.graph.nodes import Feedback, Output
from rlgraph.nodes.base import tensor_of
from rlgraph.runtime.worker.executor import copy_views


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.usefixtures("ray_unless_forked")
@pytest.mark.parametrize(
    ("depth", "buffers", "dispatch"),
    [(1, 1, "forked"), pytest.param(2, 2, "compiled_graph", marks=[pytest.mark.ray, pytest.mark.stage("jobs")])],
)
def test_five_steps_of_workers_equal_the_oracle_in_every_bit(model: Path, depth: int, buffers: int, dispatch: str) -> None:
    graph = digest_loop(model, depth=depth, buffers=buffers)
    found = run_in_workers(graph, 5) if dispatch == "forked" else run_on_ray(graph, 5)
    assert found == run_here(graph, 5)
    assert [step["staleness/max"] for step in found] == [min(step, depth) for step in range(5)]
    assert len({step["digest/weights"] for step in found}) == 5


def test_depth_changes_what_is_learnt_and_only_after_it_begins_to_count(model: Path) -> None:
    on_policy, one_off = run_here(digest_loop(model, depth=0), 4), run_here(digest_loop(model, depth=1), 4)
    assert on_policy[0] == one_off[0]
    assert on_policy[1]["digest/batch"] != one_off[1]["digest/batch"]


def test_on_policy_ratios_are_one(model: Path) -> None:
    for step in run_here(digest_loop(model, depth=0), 3):
        assert abs(step["actor/ppo_kl"]) < 1e-6
        assert step["actor/pg_clipfrac"] == 0


def test_the_trainers_own_log_probs_give_the_same_step_as_the_engines_on_policy(model: Path) -> None:
    bypass, old = run_here(digest_loop(model, depth=0), 3), run_here(digest_loop(model, depth=0, old_log_probs=True), 3)
    for a, b in zip(bypass, old, strict=True):
        assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)


def apart(name: str, *inputs: Output) -> Output:
    """Measure how far the trainer's log-probs are from those that the responses were sampled with, as a metric of this name."""

    @rg.node(reads=["old_log_probs", "rollout_log_probs", "response_mask"], writes=name)
    def measure(batch: rg.Columns) -> tuple[rg.Columns, dict[str, float]]:
        old, sampled, mask = (tensor_of(batch, column) for column in ("old_log_probs", "rollout_log_probs", "response_mask"))
        return {name: old}, {name: ((old - sampled).abs() * mask).max().item()}

    return measure(*inputs, name=name)


def test_one_policy_scores_rollouts_of_two_temperatures_each_at_its_own(model: Path) -> None:
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights, prompts = rg.feedback("weights", depth=0), rg.prompts(ITEMS, count=2, seed=3)

    def rollout(name: str, temperature: float, **edge: Feedback) -> Output:
        generator = rg.Generator(str(model), pool=rg.Pool(f"{name} rollout"), engine="transformers", dtype="float32")
        sampling = rg.Sampling(max_tokens=6, temperature=temperature)
        return generator.rollout(prompts, group_size=2, sampling=sampling, name=f"{name} rollout", **edge)

    cool, hot = rollout("cool", 0.5, weights=weights), rollout("hot", 2.0)
    checks = [apart(name, policy.log_probs(of, name=f"old {name}"), of) for name, of in (("cool", cool), ("hot", hot))]
    step = policy.update(cool, rg.advantages(cool, odd_tokens(cool), estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    with rg.compile(rg.Graph("two", step.metrics, *checks), rg.Cluster(cpus=3)).run_here() as job:
        metrics = next(iter(job.steps(1))).metrics
    assert metrics["cool"] < 1e-4
    assert metrics["hot"] < 1e-4
    assert abs(metrics["actor/ppo_kl"]) < 1e-5, "the update's temperature is that of its own rollout"


def test_a_node_that_passes_an_input_on_gives_a_copy_of_it() -> None:
    read = {"values": torch.arange(6.0).view(2, 3), "texts": ["a", "b"]}
    written = copy_views({"same": read["values"], "part": read["values"][:, 1:], "new": torch.zeros(2), "texts": read["texts"]}, read)
    read["values"].zero_()  # type: ignore[union-attr]
    assert written["same"].tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[union-attr]
    assert written["part"].tolist() == [[1, 2], [4, 5]]  # type: ignore[union-attr]
    assert written["texts"] == ["a", "b"]


def test_the_reward_rises_though_weights_are_two_steps_old(model: Path) -> None:
    odd = [step["odd"] for step in run_here(digest_loop(model, depth=2), 30)]
    assert sum(odd[-5:]) / 5 > sum(odd[:5]) / 5 + 0.2
