"""A job whose policy computes with the experts that its engine chose, and graphs that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.digests import ITEMS, odd_tokens
from support.grpo import grpo_graph
from support.tiny import tiny_llama, tiny_moe

import rlgraph as rg
from rlgraph.columns import concat_rows
from rlgraph.errors import GraphError
from rlgraph.plan.cluster import Cluster


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_moe(tmp_path_factory.mktemp("model")))


async def asks(client: rg.agents.AgentClient) -> float:
    return 0.0


def loop(model: str, *, routes: bool = True, replay: bool = True, other: str | None = None, **given: Any) -> rg.Graph:
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        sampling=rg.Sampling(max_tokens=12, ignore_eos=True),
        engine="transformers",
        dtype="float32",
        max_context=64,
        routes=routes,
    )
    policy = rg.Policy(other or model, pool=rg.Pool("train"), dtype="float32", optimizer=rg.AdamW(lr=1e-2), router_replay=replay)
    return grpo_graph(
        generator, policy, ITEMS, name="replay", rewards=odd_tokens, seed=3, group_size=4, old_log_probs=True, **{"depth": 0, **given}
    )


@pytest.mark.parametrize("given", [{}, {"chunks": 2, "depth": 1}], ids=str)
def test_each_step_replays_every_token_of_its_rollout(given: dict[str, Any], model: str) -> None:
    plan = rg.compile(loop(model, **given), Cluster(cpus=2))
    with plan.run_here() as job:
        found = [step.metrics for step in job.steps(3)]
    assert [metrics["moe/routes_replayed"] for metrics in found] == [1.0] * 3
    assert found[0]["moe/route_agreement"] == pytest.approx(1.0, abs=0.02)  # the engine's weights are the trainer's
    agree = [metrics["moe/route_agreement"] for metrics in found[1:]]
    assert min(agree) > 0.95 if not given else min(agree) < 0.99  # at depth 1 they are a step apart
    assert all(metrics["actor/grad_norm"] > 0 for metrics in found)
    assert [metrics["actor/ppo_kl"] for metrics in found] == pytest.approx([0.0] * 3, abs=1e-6)  # old log-probs have the same experts


def test_the_plan_counts_the_bytes_of_routes(model: str) -> None:
    with_routes, without = (rg.compile(loop(model, routes=on, replay=on), Cluster(cpus=2)) for on in (True, False))
    sizes = [max(channel.bytes or 0 for channel in plan.channels if channel.writer == "rollout") for plan in (with_routes, without)]
    assert sizes[0] - sizes[1] == 16 * (64 - 12 + 12) * 2 * 2 * 2  # rows, tokens, layers, experts, bytes


def test_a_writer_without_rows_adds_none_to_routes() -> None:
    rows, none = torch.zeros(2, 3, 4, 2, dtype=torch.int16), torch.zeros(0, 0, 0, 0, dtype=torch.int16)
    assert concat_rows([{"routes": none}, {"routes": rows}])["routes"].shape == rows.shape


def test_routes_that_nobody_reads_or_nobody_writes_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="node 'rollout' samples with routes=True, and nothing reads the routes"):
        loop(model, replay=False)
    with pytest.raises(
        GraphError, match="do not carry the experts that the engine chose; make the generator of 'rollout' with routes=True"
    ):
        loop(model, routes=False)
    with pytest.raises(GraphError, match="samples conversations, and its generator has routes=True"):
        loop(model, agent=asks)
    dense = str(tiny_llama(tmp_path))
    with pytest.raises(GraphError, match="has no experts; leave out routes"):
        rg.compile(loop(dense), Cluster(cpus=2)).run_here().__enter__()
