"""Which trainers of adapters hold one base together by the plan, and what its memory counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.adapter_loops import loops
from support.grpo import zero_reward
from support.qwen3_shapes import QWEN3_8B

import rlgraph as rg
from rlgraph.plan.estimates import PIECE_BYTES
from rlgraph.plan.memory import loading_peaks, shared_bases
from rlgraph.plan.model_shapes import AdapterSize, ModelShape
from rlgraph.runtime.worker.spec import worker_specs

SHAPE = ModelShape.from_config(QWEN3_8B)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path / "m")


def duel(model: str, other: str = "", second: dict[str, Any] | None = None, cpus: int | None = None, **given: Any) -> rg.Graph:
    """Two loops, each with a policy and a generator that have one pool with those of the other."""
    train, rollout, metrics = rg.Pool("train", cpus=cpus), rg.Pool("rollout", cpus=cpus), []
    for name, own in (("left", {}), ("right", {"path": other or model} | (second or {}))):
        settings = {"path": model, "adapter": rg.LoRA(rank=4), "dtype": "float32", "data_parallel": 1} | given | own
        path = settings.pop("path")
        generator = rg.Generator(path, pool=rollout, engine="transformers", max_context=512)
        policy, weights = rg.Policy(path, pool=train, **settings), rg.feedback(f"{name} weights", depth=1)
        prompts = rg.prompts([{"prompt": "1"}], count=2, name=f"{name} prompts")
        rollout_node = generator.rollout(prompts, weights, group_size=2, name=f"{name} rollout")
        rewards = rg.reward(zero_reward, rollout_node, name=f"{name} rewards")
        advantages = rg.advantages(rollout_node, rewards, estimator=rg.GRPO(), name=f"{name} advantages")
        step = policy.update(rollout_node, advantages, loss=rg.ClippedLoss(), name=f"{name} update")
        weights.close(step.weights)
        metrics.append(step.metrics)
    return rg.Graph("duel", *metrics)


def on(graph: rg.Graph, cluster: rg.Cluster) -> list[tuple[str, ...]]:
    """The models of each base that is shared."""
    return [base.models for base in shared_bases(graph, cluster, rg.compile(graph, cluster).workers)]


def test_models_of_a_host_that_train_adapters_of_one_folder_share_its_base(model: str) -> None:
    cores = rg.Cluster(cpus=4)
    assert on(duel(model), cores) == [("policy", "policy2")]
    assert on(duel(model, cpus=1), cores) == [("policy", "policy2")]
    assert on(loops(model, critic=True), cores) == [("policy", "critic", "policy2", "critic2")]
    assert on(loops(model, ["left"]), cores) == []


def test_a_base_is_not_shared_where_it_is_another_one(model: str, tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "config.json").write_text(json.dumps(QWEN3_8B))
    cores = rg.Cluster(cpus=4)
    assert on(duel(model, other=str(tmp_path / "n")), cores) == []
    assert on(duel(model, second={"dtype": "bfloat16"}), cores) == []
    assert on(duel(model, second={"adapter": None}), cores) == []
    assert on(duel(model, second={"data_parallel": 2}), cores) == []
    assert on(duel(model, adapter=rg.LoRA(rank=4, base="nf4"), data_parallel=None), cores) == []
    mine = rg.extend.TrainerSpec(name="mine", load=lambda model, place: None, settings=("adapter",))  # type: ignore[arg-type, return-value]
    assert on(duel(model, second={"trainer": mine}), cores) == []
    assert on(duel(model), rg.Cluster(gpus=2)) == []


def test_a_base_is_not_shared_between_hosts(model: str) -> None:
    graph = loops(model)
    cluster = rg.Cluster(cpus=4, hosts=2)
    workers = rg.compile(graph, cluster).workers
    assert {worker.host for worker in workers if worker.model in ("policy", "policy2")} == {0}
    moved = [w if w.model != "policy2" else type(w)(**{**vars(w), "host": 1}) for w in workers]
    assert [base.models for base in shared_bases(graph, cluster, workers)] == [("policy", "policy2")]
    assert shared_bases(graph, cluster, moved) == ()


def test_the_memory_of_a_host_counts_a_shared_base_once_and_prints_it(model: str, tmp_path: Path) -> None:
    assert SHAPE is not None
    (tmp_path / "n").mkdir()
    (tmp_path / "n" / "config.json").write_text(json.dumps(QWEN3_8B))
    cores = rg.Cluster(cpus=4)
    once, twice = (rg.compile(duel(model, other=other), cores) for other in ("", str(tmp_path / "n")))
    held, apart = (next(need for need in plan.memory if need.pool is None and not need.loading) for plan in (once, twice))
    base, own = 4 * SHAPE.parameters, 4 * AdapterSize.of(SHAPE, 4, "all-linear").parameters
    assert dict(held.parts)["base of policy, policy2"] == base
    assert dict(held.parts)["weights"] == 2 * own
    assert dict(apart.parts)["weights"] == 2 * own + 2 * base
    assert apart.peak_bytes - held.peak_bytes == base
    assert "base of policy, policy2 30.5 GiB" in " ".join(str(once).split())
    assert "base of" not in str(twice)


def test_a_shared_base_is_loaded_once(model: str) -> None:
    assert SHAPE is not None
    graph, cores = duel(model, cpus=1), rg.Cluster(cpus=4)
    (need,) = loading_peaks(graph, cores, rg.compile(graph, cores).workers, {model: SHAPE})
    own = 4 * AdapterSize.of(SHAPE, 4, "all-linear").parameters
    found = {what: size for what, size in need.parts if "generator" not in what}
    assert found == {
        "base of policy, policy2": 4 * SHAPE.parameters,
        **{f"weights of {name}": own for name in ("policy", "policy2")},
        **{f"pieces of files of {name}": PIECE_BYTES for name in ("policy", "policy2")},
    }


def test_only_workers_that_share_a_base_know_where_it_is(model: str) -> None:
    graph = loops(model, critic=True)
    specs = worker_specs(graph, rg.compile(graph, rg.Cluster(cpus=4)), "/job", b"", 1.0)
    found = {spec.worker.name: spec.shared_base for spec in specs if spec.shared_base}
    assert found == dict.fromkeys(("policy", "critic", "policy2", "critic2"), "/job/b0")
