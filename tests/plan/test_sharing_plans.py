"""Plans for trainers whose ranks share a pass: whole groups on one host, their text and picture, their passes, memory and times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.grpo import grpo_graph
from support.qwen3_shapes import QWEN3_8B, QWEN3_30B_A3B

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan.cost_functions import NodeCost, Passes, Setting
from rlgraph.plan.estimates import Device, exchange_s, fully_sharded_memory, model_parallel
from rlgraph.plan.model_shapes import SCORE_COPIES, SCORED_AT_ONCE, ModelShape, Workload


def folder(path: Path, config: dict[str, Any] = QWEN3_8B) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def loop(train: rg.Pool, model: str = "m", rollout_gpus: int = 2, **settings: object) -> rg.Graph:
    generator = rg.Generator(model, pool=rg.Pool("rollout", gpus=rollout_gpus), max_context=4096)
    policy = rg.Policy(model, pool=train, **settings)  # type: ignore[arg-type]
    return grpo_graph(generator, policy, [{"prompt": "1 + 1 ="}] * 8, name="loop", count=8, group_size=4)


def passes_of(plan: rg.Plan) -> Passes | None:
    return plan.node("update").passes


def test_a_plan_says_how_ranks_share_passes_in_its_text_and_its_picture(tmp_path: Path) -> None:
    plan = rg.compile(loop(rg.Pool("train", gpus=4), tensor_parallel=2, micro_batch_tokens=1000), rg.Cluster(gpus=6))
    assert [w.gpus for w in plan.workers if w.model == "policy"] == [(2,), (3,), (4,), (5,)]
    assert "tp 2 × dp 2" in str(plan)
    plan.draw(tmp_path / "plan.svg")
    assert "tp 2 × dp 2" in (tmp_path / "plan.svg").read_text()
    assert passes_of(plan) == Passes(1000, tensor=2, group=4)
    both = rg.compile(
        loop(rg.Pool("train", gpus=8), tensor_parallel=2, context_parallel=2, micro_batch_tokens=1000),
        rg.Cluster(gpus=10, gpus_per_node=10),
    )
    assert "tp 2 × cp 2 × dp 2" in str(both)
    assert passes_of(both) == Passes(2000, tensor=2, context=2, group=4)
    assert " tp " not in str(rg.compile(loop(rg.Pool("train", gpus=4)), rg.Cluster(gpus=6)))


def test_pairs_share_their_prompt_in_a_plan_and_a_trainer_that_shares_none_has_passes_of_own_prompts() -> None:
    policy = rg.Policy("m", pool=rg.Pool("train"), micro_batch_tokens=1000)
    pairs = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, policy)
    reference = rg.Reference("m", pool=rg.Pool("reference"))
    graph = rg.Graph("pairs", policy.update(pairs, reference.log_probs(pairs), loss=rg.DPO()).metrics)
    assert passes_of(rg.compile(graph, rg.Cluster(gpus=2))) == Passes(1000, group=2)
    plan = rg.compile(loop(rg.Pool("train", gpus=2), trainer="megatron", micro_batch_tokens=1000), rg.Cluster(gpus=4))
    assert passes_of(plan) == Passes(1000)


def test_a_pipeline_waits_for_its_stages_and_may_lie_on_several_hosts() -> None:
    ranks = {"trainer": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_tokens": 1000}
    plan = rg.compile(loop(rg.Pool("train", gpus=8), **ranks), rg.Cluster(gpus=12, gpus_per_node=6, hosts=2))
    assert "tp 2 × pp 2 × dp 2" in str(plan)
    hosts = [worker.host for worker in plan.workers if worker.model == "policy"]
    assert hosts[:4] == [0, 0, 0, 0]
    passes = Passes(1000, tensor=2, pipeline=2)
    assert passes_of(plan) == passes
    found = passes.of_a_rank(np.array([[700.0, 600.0, 500.0]]), 1.0, 4)
    assert sorted(found[0].tolist()) == [125, 150, 175, 175], "three passes, each cut in four, and a longest one in which a stage waits"


def test_ranks_of_megatron_share_rows_of_as_many_tokens_as_all_of_them_take() -> None:
    ranks = {"trainer": "megatron", "context_parallel": 2, "pipeline_parallel": 2, "micro_batch_tokens": 1000}
    plan = rg.compile(loop(rg.Pool("train", gpus=8), **ranks), rg.Cluster(gpus=10, gpus_per_node=10))
    assert "cp 2 × pp 2 × dp 2" in str(plan)
    assert passes_of(plan) == Passes(2000, context=2, pipeline=2)


def test_ranks_that_share_experts_come_in_whole_groups() -> None:
    ranks = {"trainer": "megatron", "tensor_parallel": 2, "expert_parallel": 4, "micro_batch_tokens": 1000}
    plan = rg.compile(loop(rg.Pool("train", gpus=8), **ranks), rg.Cluster(gpus=10, gpus_per_node=10))
    assert "tp 2 × dp 4 (ep 4)" in str(plan)
    with pytest.raises(PlanError, match=r"has its passes and experts on 4 GPUs \(tp 2 \(ep 4\)\).* has 6; .* multiple of 4"):
        rg.compile(loop(rg.Pool("train", gpus=6), **ranks), rg.Cluster(gpus=8))
    generator, policy = rg.Generator("m", pool=rg.Pool("a")), rg.Policy("m", pool=rg.Pool("b"), trainer="megatron", expert_parallel=2)
    on_host = rg.compile(grpo_graph(generator, policy, [{"prompt": "1"}] * 2, name="host", count=2), rg.Cluster(cpus=4))
    assert sum(w.model == "policy" for w in on_host.workers) == 2, "a host without GPUs runs one group"


def test_a_pool_without_a_share_gets_whole_groups() -> None:
    plan = rg.compile(loop(rg.Pool("train"), tensor_parallel=4), rg.Cluster(gpus=8))
    assert [pool.gpus for pool in plan.pools] == [(0, 1), (2, 3, 4, 5)]
    on_host = rg.compile(loop(rg.Pool("train"), rollout_gpus=1, tensor_parallel=2, data_parallel=2), rg.Cluster(gpus=5))
    assert sum(w.model == "policy" for w in on_host.workers) == 4


def test_a_host_without_gpus_runs_one_group() -> None:
    generator, policy = rg.Generator("m", pool=rg.Pool("a")), rg.Policy("m", pool=rg.Pool("b"), context_parallel=2)
    plan = rg.compile(grpo_graph(generator, policy, [{"prompt": "1"}] * 2, name="host", count=2), rg.Cluster(cpus=4))
    assert sum(w.model == "policy" for w in plan.workers) == 2


@pytest.mark.parametrize(
    ("pool", "cluster", "settings", "said"),
    [
        (rg.Pool("train", gpus=3), rg.Cluster(gpus=5), {"tensor_parallel": 2}, r"each pass on 2 GPUs \(tp 2\).*has 3.*multiple of 2"),
        (
            rg.Pool("train", gpus=4),
            rg.Cluster(gpus=6, gpus_per_node=3, hosts=2),
            {"tensor_parallel": 2},
            r"policy\[0\] to policy\[1\] compute each pass together.*hosts \[0, 1\]",
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(pool: rg.Pool, cluster: rg.Cluster, settings: dict[str, int], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        rg.compile(loop(pool, **settings), cluster)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({"tensor_parallel": 16}, "num_key_value_heads=8, which tensor_parallel=16"),
        ({"tensor_parallel": 3}, "num_attention_heads=32, which tensor_parallel=3"),
        (
            {"trainer": "megatron", "tensor_parallel": 4, "context_parallel": 16},
            r"num_attention_heads=32, which tensor_parallel=4 × context_parallel=16",
        ),
    ],
)
def test_a_model_that_its_ranks_do_not_divide_is_refused_where_its_shape_is_known(tmp_path: Path, ranks: dict[str, Any], said: str) -> None:
    pool = rg.Pool("train", gpus=64 if "context_parallel" in ranks else 48)
    with pytest.raises(PlanError, match=said):
        rg.compile(loop(pool, folder(tmp_path / "m"), **ranks), rg.Cluster(gpus=66, gpus_per_node=66))


def test_ranks_that_heads_do_not_divide_share_a_row_by_a_ring(tmp_path: Path) -> None:
    pool = rg.Pool("train", gpus=64)
    plan = rg.compile(
        loop(pool, folder(tmp_path / "m"), tensor_parallel=4, context_parallel=16), rg.Cluster(gpus=66, gpus_per_node=66, gpu="H100")
    )
    assert "tp 4 × cp 16 (ring 2) × dp 1" in str(plan), "32 heads by 4 leave 8, which 8 of 16 ranks exchange"


def test_a_plan_names_no_ring_where_heads_are_enough_or_are_not_known(tmp_path: Path) -> None:
    pool, cluster = rg.Pool("train", gpus=4), rg.Cluster(gpus=6, gpu="H100")
    assert "cp 2 × dp 2" in str(rg.compile(loop(pool, folder(tmp_path / "m"), context_parallel=2), cluster))
    assert "cp 2 × dp 2" in str(rg.compile(loop(pool, context_parallel=2), cluster))
    nine = folder(tmp_path / "nine", QWEN3_8B | {"num_attention_heads": 9, "num_key_value_heads": 3})
    assert "cp 2 (ring 2) × dp 2" in str(rg.compile(loop(pool, nine, context_parallel=2), cluster))


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (QWEN3_8B, 2, "has no experts, which expert_parallel=2 shares; leave it out"),
        (QWEN3_30B_A3B, 3, "has 128 experts, which expert_parallel=3 does not divide; .* a divisor of 128"),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_where_their_shape_is_known(
    tmp_path: Path, config: dict[str, object], ranks: int, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        rg.compile(loop(rg.Pool("train", gpus=6), folder(tmp_path / "m", config), expert_parallel=ranks), rg.Cluster(gpus=8))


def test_a_ring_passes_on_keys_and_values_and_the_gradients_of_both_in_float32() -> None:
    shape = ModelShape.from_config(QWEN3_8B | {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "num_hidden_layers": 5})
    assert shape is not None
    device = Device(flops=1e12, bandwidth=1e12, memory_bytes=1, host_link=1e9, peer_link=1e9)
    block = 5 * 2 * 3 * 64 / 4 / (0.7e9)  # numbers a hop by the link, of each token of the pass
    ring = ModelTraits(context_parallel=4)
    assert exchange_s(shape, device, ring, trains=False) == pytest.approx(3 * 2 * block)
    assert exchange_s(shape, device, ring, trains=True) == pytest.approx((2 * 3 * 2 + 4 * 4) * block)
    assert exchange_s(shape, device, replace(ring, recompute=True), trains=True) == pytest.approx((3 * 3 * 2 + 4 * 4) * block)


def test_ranks_that_share_a_pass_take_its_activations_and_logits_apart() -> None:
    shape = ModelShape.from_config(QWEN3_8B)
    assert shape is not None
    work = Workload(shape=shape, itemsize=2, workers=4, width=1.0, rows=64, longest=4096, usual=4096)
    given = {"micro_batch_tokens": 8192, "fused_head": False}
    traits = [ModelTraits(**given, **ranks) for ranks in ({}, {"tensor_parallel": 2}, {"context_parallel": 2})]
    alone, tensor, context = (fully_sharded_memory(replace(work, trained=True, traits=each)).runs for each in traits)
    gathered = shape.layers * 2 * shape.hidden * 2 * 8192  # tokens behind both norms, of which each rank keeps all
    assert tensor["activations"] == (alone["activations"] + gathered) // 2
    assert tensor["gathered layers"] == alone["gathered layers"] // 2
    copies = SCORE_COPIES * 4 * SCORED_AT_ONCE  # of logits that are scored without the kernel of one rank
    assert tensor["logits"] - copies == alone["logits"] // 2
    assert context == alone, "micro_batch_tokens bounds the tokens of a rank"


def test_ranks_that_share_experts_never_gather_those_of_others() -> None:
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    assert shape is not None
    work = Workload(shape=shape, itemsize=2, workers=8, width=1.0, rows=64, longest=4096, usual=4096, trained=True)
    all_experts, own = fully_sharded_memory(work), fully_sharded_memory(replace(work, traits=ModelTraits(expert_parallel=4)))
    of_a_layer = 128 * 3 * 768 * 2048
    gathered = [need.instants["backward of a layer"]["gathered layers"] for need in (all_experts, own)]
    assert gathered[0] - gathered[1] == 2 * 2 * of_a_layer * 3 // 4
    assert own.stays == all_experts.stays


CUT = ModelTraits(tensor_parallel=2, pipeline_parallel=2, micro_batch_tokens=0)


def test_groups_of_a_model_that_is_cut_alike_share_its_float32_weights_and_moments() -> None:
    shape = ModelShape.from_config(QWEN3_8B)
    assert shape is not None
    work = Workload(shape=shape, itemsize=2, workers=8, width=1.0, rows=64, longest=4096, usual=4096, trained=True, traits=CUT)
    own, owned = shape.parameters // 4, shape.parameters // 8
    assert model_parallel(work).stays == {"weights": 2 * own + 4 * owned, "optimizer": 8 * owned, "gradients": 4 * own}
    assert model_parallel(replace(work, workers=4)).stays == {"weights": 6 * own, "optimizer": 8 * own, "gradients": 4 * own}
    assert model_parallel(replace(work, itemsize=4)).stays["weights"] == 4 * own, "passes compute with the weights themselves"
    of_rows = replace(work, traits=replace(CUT, context_parallel=2))
    assert model_parallel(of_rows) == model_parallel(work), "ranks of a row share them as groups do"
    assert model_parallel(replace(work, workers=64)).stays["optimizer"] == 8 * shape.vocab * shape.hidden // 2, "an embedding has one owner"


def test_ranks_that_share_experts_hold_their_own_and_all_of_the_rest() -> None:
    shape = ModelShape(layers=4, hidden=8, heads=2, kv_heads=2, head_dim=4, intermediate=16, vocab=32, experts=4, experts_used=2)
    experts = 4 * 4 * 3 * 8 * 16
    assert shape.own_parameters(1, 1, 1) == shape.parameters
    assert shape.own_parameters(1, 1, 2) == shape.parameters - experts // 2
    assert shape.own_parameters(2, 2, 4) == (shape.parameters - experts) // 4 + experts // 8


@pytest.mark.parametrize("of_a_pass", [1 << 20, 1 << 11])
def test_measured_costs_are_taken_to_shared_passes_by_the_links_of_the_gpus(of_a_pass: int, tmp_path: Path) -> None:
    model, cluster = folder(tmp_path / "m"), rg.Cluster(gpus=4, gpu="H100")
    graphs = {ranks: loop(rg.Pool("train", gpus=2), model, tensor_parallel=ranks, micro_batch_tokens=of_a_pass) for ranks in (1, 2)}
    plans = {ranks: rg.compile(graph, cluster) for ranks, graph in graphs.items()}  # by the roofline
    names = [node.name for node in plans[1].nodes]
    measured = NodeCost(token_s=1e-4, pass_s=1e-9, measured=Setting(2, 2, 32, Passes(of_a_pass)))
    lengths = rg.planning.Lengths((0.0, 1.0), (100.0, 100.0))
    costs = rg.planning.Costs(dict.fromkeys(names, 0.1) | {"update": measured}, source="measured", lengths=lengths)
    seconds = {ranks: rg.compile(graph, cluster, costs).node("update").seconds for ranks, graph in graphs.items()}
    tokens = 32 * 100
    exchanged = 2 * 36 * 4 * 4096 * 2 / 2 / (450e9 * 0.7)  # forward and backward, four times a layer, half of the numbers, two bytes each
    waits = 2 * 36 * 4 * 20e-6 / of_a_pass  # of each call, in a full pass
    assert seconds[2] - seconds[1] == pytest.approx(tokens * (exchanged + waits), rel=1e-3)
    if of_a_pass == 1 << 20:  # else two ranks also cut other passes than one
        assert plans[2].node("update").seconds > plans[1].node("update").seconds > 0
    assert any("measured with tensor_parallel=1" in said for said in rg.compile(graphs[2], cluster, costs).prediction.assumed)
    assert not any("tensor_parallel" in said for said in rg.compile(graphs[1], cluster, costs).prediction.assumed)


def test_measured_costs_are_taken_to_shared_experts_by_the_links_of_the_gpus(tmp_path: Path) -> None:
    model, cluster = folder(tmp_path / "m", QWEN3_30B_A3B), rg.Cluster(gpus=4, gpu="H200")
    given = {"micro_batch_tokens": 1 << 14, "recompute": True, "offload": "moments"}
    graphs = {ranks: loop(rg.Pool("train", gpus=2), model, expert_parallel=ranks, **given) for ranks in (1, 2)}
    measured = NodeCost(token_s=1e-4, measured=Setting(2, 2, 32, Passes(1 << 14)))
    lengths = rg.planning.Lengths((0.0, 1.0), (100.0, 100.0))
    costs = rg.planning.Costs(
        dict.fromkeys([node.name for node in graphs[1].nodes], 0.1) | {"update": measured}, source="measured", lengths=lengths
    )
    seconds = {}
    for ranks, graph in graphs.items():
        seconds[ranks] = rg.compile(graph, cluster, costs).node("update").seconds
    sent = 3 * 48 * 2 * 8 * 2048 / 2 * 2 / (450e9 * 0.7)  # forward twice, backward; there and back to 8 experts, half of them on this rank
    assert seconds[2] - seconds[1] == pytest.approx(16 * 100 * sent, rel=0.1)
    assert any("expert_parallel=1: its exchanges" in said for said in rg.compile(graphs[2], cluster, costs).prediction.assumed)


def test_ranks_that_share_matrices_alone_gather_no_shards_and_launch_a_pass_as_one_rank_does() -> None:
    cost = NodeCost(token_s=1e-6, pass_s=1.0, sharded_pass_s=3.0)
    lengths = rg.planning.Lengths((0.0, 1.0), (100.0, 100.0), 10.0)

    def seconds(ranks: int, **sharing: int) -> float:
        return float(cost.seconds(Setting(ranks, ranks, 4, Passes(1000, **sharing)), lengths, 1, 4)[0])

    assert seconds(1) == seconds(2, tensor=2) == 1.0, "one pass each"
    assert seconds(4, tensor=2) == seconds(2, context=2) == 3.0, "FSDP gathers shards of ranks that share no matrices"


def test_measured_costs_that_are_taken_to_shared_passes_count_the_hosts_time_to_launch_them(tmp_path: Path) -> None:
    model, cluster = folder(tmp_path / "m"), rg.Cluster(gpus=4, gpu="H100")
    lengths = rg.planning.Lengths((0.0, 1.0), (1000.0, 1000.0))

    def seconds(ranks: int, pass_s: float = 0.0) -> float:
        graph = loop(rg.Pool("train", gpus=2), model, tensor_parallel=ranks, micro_batch_tokens=1000, recompute=True)
        names = [node.name for node in rg.compile(graph, cluster).nodes]
        measured = NodeCost(token_s=1e-6, pass_s=pass_s, measured=Setting(2, 2, 32, Passes(1000)))
        costs = rg.planning.Costs(dict.fromkeys(names, 0.1) | {"update": measured}, source="measured", lengths=lengths)
        return rg.compile(graph, cluster, costs).node("update").seconds

    assert seconds(1) == pytest.approx(16 * 1e-3), "a GPU that sets the pace shows no time of its host"
    assert seconds(2) == pytest.approx(32 * 36 * 7.75e-3 * 4 / 3), "each pass of both ranks, its 36 layers launched forward twice"
    assert seconds(2, pass_s=0.25) == pytest.approx(32 * 0.25), "what was measured counts"
