"""A generate engine and a train engine of a user's own, one spec each, go the whole way: declare, compile, launch, update, resume."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.digests import ITEMS, odd_tokens
from support.grpo import grpo_graph
from support.tiny import tiny_llama
from support.unigram import ENGINE, TRAINER

import rlgraph as rg
from rlgraph.engines import registry
from rlgraph.errors import GraphError
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.measure import Step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both under their names, until the end of the test."""
    for table, spec in ((registry.ENGINES, ENGINE), (registry.TRAINERS, TRAINER)):
        monkeypatch.setattr(table, "_known", dict(table._known))
        table.register(spec)  # type: ignore[arg-type]
    return


def loop(model: str, engine: Any = ENGINE, trainer: Any = TRAINER, **pools: Any) -> rg.Graph:
    """Reward the share of odd tokens, at one step off."""
    rollout_pool, train_pool = (pools.get(name, rg.Pool(name)) for name in ("rollout", "train"))
    generator = rg.Generator(model, pool=rollout_pool, engine=engine, sampling=rg.Sampling(max_tokens=8), dtype="float32")
    policy = rg.Policy(model, pool=train_pool, trainer=trainer, optimizer=rg.AdamW(lr=60.0), dtype="float32")
    return grpo_graph(generator, policy, ITEMS, name="unigram", rewards=odd_tokens, seed=3, group_size=4, old_log_probs=True)


def bits(step: Step) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}


def oracle(graph: rg.Graph, steps: int) -> list[dict[str, float]]:
    with rg.compile(graph, Cluster(cpus=2)).run_here() as job:
        return [bits(step) for step in job.steps(steps)]


@pytest.mark.usefixtures("registered")
def test_engines_go_by_the_names_that_they_are_registered_under(model: str) -> None:
    graph = loop(model, "unigram", "unigram")
    found = oracle(graph, 20)
    assert found == oracle(loop(model), 20)
    assert found[-1]["steps"] == 20
    assert found[-1]["odd"] > found[0]["odd"] + 0.2  # it has learnt, so weights arrive


@pytest.mark.usefixtures("registered")
def test_workers_of_their_own_write_checkpoints_and_a_resumed_job_repeats_the_run(model: str, tmp_path: Path) -> None:
    graph, found = loop(model, "unigram", "unigram"), []
    plan = rg.compile(graph, Cluster(cpus=2))
    for steps in (4, 9):  # of the run as a whole
        with Job(graph, plan, dispatch_name="forked", deadline_s=60.0, recovery=Recovery(tmp_path, 3, 2)) as job:
            found += [bits(step) for step in job.steps(steps)]
    assert found == oracle(graph, 9)


def test_the_plan_asks_the_spec_what_an_engine_takes(model: str) -> None:
    pools = {"rollout": rg.Pool("rollout", gpus=1), "train": rg.Pool("train", gpus=1)}
    plan = rg.compile(loop(model, **pools), Cluster(gpus=2))
    parts = {need.pool: dict(need.parts) for need in plan.memory if need.pool is not None and not need.loading}
    assert parts["rollout"]["weights"] == 4 * 288
    assert "keys and values" not in parts["rollout"]
    assert "optimizer" not in parts["train"]


def test_an_unknown_name_lists_the_names(model: str) -> None:
    with pytest.raises(GraphError, match=r"engine='llama'.: engine is one of \['vllm', 'transformers', 'sglang'\] or an EngineSpec"):
        rg.Generator(model, pool=rg.Pool("p"), engine="llama")
    with pytest.raises(
        GraphError, match=r"trainer='fsdp2'.: trainer is one of \['fsdp', 'megatron', 'vllm'\] or a TrainerSpec; write trainer='fsdp'"
    ):
        rg.Critic(model, pool=rg.Pool("p"), trainer="fsdp2")


@pytest.mark.usefixtures("registered")
def test_a_registered_name_is_listed_and_belongs_to_one_spec(model: str) -> None:
    with pytest.raises(GraphError, match=r"one of \['vllm', 'transformers', 'sglang', 'unigram'\]"):
        rg.Generator(model, pool=rg.Pool("p"), engine="llama")
    registry.ENGINES.register(ENGINE)
    with pytest.raises(GraphError, match=r"EngineSpec.name='vllm'.*this name is taken"):
        registry.ENGINES.register(registry.EngineSpec(name="vllm", load=ENGINE.load))
