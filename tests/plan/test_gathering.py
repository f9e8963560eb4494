"""What ranks gather and reduce in each pass: bytes and seconds by hand, whom they are counted for, and recorded updates of two GPUs."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.grpo import grpo_graph
from support.qwen3_shapes import QWEN3_8B, QWEN3_30B_A3B

import rlgraph as rg
from benchmarks.prediction import predicted_runs
from rlgraph.graph.nodes import Node
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan import estimates
from rlgraph.plan.cost_functions import NodeCost, Passes, Setting, Shards
from rlgraph.plan.estimates import Device
from rlgraph.plan.model_shapes import ModelShape
from rlgraph.plan.roofline import shards_of

DEVICE = Device(flops=1e15, bandwidth=1e12 / 0.6, memory_bytes=1, host_link=1e9, peer_link=1e11 / 0.7)  # 1 ns for 1,000 bytes, or 100
PASS, CLUSTER = 4096, rg.Cluster(gpus=4, gpu="H200")


def loop(model: str, gpus: int = 2, **settings: Any) -> rg.Graph:
    generator = rg.Generator(model, pool=rg.Pool("rollout", gpus=1), max_context=4096, sampling=rg.Sampling(max_tokens=PASS - 1))
    policy = rg.Policy(model, pool=rg.Pool("train", gpus=gpus), micro_batch_tokens=PASS, **settings)
    return grpo_graph(generator, policy, [{"prompt": "1"}] * 8, name="loop", count=8, group_size=4, estimator=rg.RLOO())


def node(graph: rg.Graph, name: str = "update") -> Node:
    return next(node for node in graph.nodes if node.name == name)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    found = ModelShape.from_config(config)
    assert found is not None
    return found


def folder(path: Path, config: Mapping[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def test_a_pass_gathers_twice_in_the_dtype_of_passes_and_reduces_once_in_float32() -> None:
    shape = shape_of(QWEN3_8B)
    (found,) = shards_of(node(loop("m")), shape, DEVICE)
    copied = 2 * (4 + 10 / 2) + (6 + 12 / 2)  # bytes of memory traffic for each parameter, by two ranks
    sent = (2 * 2 + 4) / 2  # of two ranks each gets the half of the other
    assert found.seconds(Setting(2, 2)) == pytest.approx(shape.parameters * (copied / 1e12 + sent / 1e11))
    more = 2 * (4 + 10 / 8) + (6 + 12 / 8), (2 * 2 + 4) * 7 / 8
    assert found.seconds(Setting(8, 8)) == pytest.approx(shape.parameters * (more[0] / 1e12 + more[1] / 1e11))
    assert found.seconds(Setting(1, 1)) == 0
    (again,) = shards_of(node(loop("m", recompute=True)), shape, DEVICE)
    assert again == found, "layers compute again with what is gathered for the backward pass"


def test_ranks_that_share_matrices_or_experts_gather_none_of_each_other() -> None:
    dense, mixture = shape_of(QWEN3_8B), shape_of(QWEN3_30B_A3B)
    (cut,) = shards_of(node(loop("m", 4, tensor_parallel=2)), dense, DEVICE)
    (whole,) = shards_of(node(loop("m")), dense, DEVICE)
    assert cut.seconds(Setting(2, 2, passes=Passes(PASS, tensor=2))) == 0
    assert cut.seconds(Setting(4, 4)) == pytest.approx(whole.seconds(Setting(2, 2)) / 2)
    rest, experts = shards_of(node(loop("m", expert_parallel=2)), mixture, DEVICE)
    assert experts.seconds(Setting(2, 2)) == 0 < rest.seconds(Setting(2, 2))
    apart = shards_of(node(loop("m")), mixture, DEVICE)
    assert sum(each.seconds(Setting(2, 2)) for each in apart) > 10 * rest.seconds(Setting(2, 2))


def test_an_engine_that_gathers_nothing_in_a_pass_has_no_such_seconds() -> None:
    assert shards_of(node(loop("m", trainer="megatron")), shape_of(QWEN3_8B), DEVICE) == ()


def test_an_adapter_gathers_all_and_reduces_only_its_own_gradients() -> None:
    shape = shape_of(QWEN3_8B)
    (whole,), (adapter,) = (shards_of(node(loop("m", **more)), shape, DEVICE) for more in ({}, {"adapter": rg.LoRA(rank=8)}))
    gathered = shape.parameters * (2 * (4 + 10 / 2) / 1e12 + 2 * 2 / 2 / 1e11)
    assert gathered < adapter.seconds(Setting(2, 2)) < 1.01 * gathered < whole.seconds(Setting(2, 2))


@pytest.mark.parametrize(("measured", "predicted", "passes"), [(1, 2, 1), (2, 1, -2), (2, 2, 0), (1, 1, 0)])
def test_seconds_are_those_of_measured_ranks_and_what_others_gather_more_or_less(measured: int, predicted: int, passes: int) -> None:
    shards = (Shards(whole_s=0.1, own_s=0.2, sent_s=0.2),)
    cost = NodeCost(token_s=0.001, measured=Setting(measured, measured, 2, Passes(1000)), shards=shards)
    setting = Setting(predicted, predicted, 2, Passes(1000))
    found = cost.seconds(setting, rg.planning.Lengths((0.0, 1.0), (991.0, 991.0), 10.0), 1, 2).item()
    assert found == pytest.approx(2 * 1000 * 0.001 / predicted + passes * 0.3, rel=2e-3), (
        "two passes, which one rank has, or each of two has one"
    )


def test_a_plan_from_the_costs_of_one_rank_counts_gathering_and_says_so(tmp_path: Path) -> None:
    model = folder(tmp_path / "m", QWEN3_8B)
    graph = loop(model)
    names = [each.name for each in graph.nodes]
    lengths = rg.planning.Lengths((0.0, 1.0), (PASS - 1.0, PASS - 1.0), 1.0)
    seconds = {}
    for ranks in (1, 2):
        update = NodeCost(token_s=1e-4, measured=Setting(ranks, ranks, 32, Passes(PASS)))
        plan = rg.compile(
            graph, CLUSTER, rg.planning.Costs(dict.fromkeys(names, 0.1) | {"update": update}, source="measured", lengths=lengths)
        )
        seconds[ranks] = plan.node("update").seconds
        assert any("gathering shards" in said for said in plan.prediction.assumed) == (ranks == 1)
    parameters = shape_of(QWEN3_8B).parameters
    each = parameters * (30 / (4.8e12 * 0.6) + 4 / (450e9 * 0.7))
    assert seconds[1] - seconds[2] == pytest.approx(16 * each, rel=1e-3), "each of two ranks has 16 passes"


def test_estimates_with_nothing_measured_add_the_gathering_of_experts_that_a_token_does_not_take() -> None:
    dense, mixture = shape_of(QWEN3_8B), shape_of(QWEN3_30B_A3B)
    assert shards_of(node(loop("m")), dense, DEVICE, idle_alone=True) == ()
    (idle,) = shards_of(node(loop("m")), mixture, DEVICE, idle_alone=True)
    (_, experts) = shards_of(node(loop("m")), mixture, DEVICE)
    assert idle.whole_s == pytest.approx(experts.whole_s * 120 / 128)


def test_the_host_launches_a_layer_with_experts_as_long_as_two_dense_ones() -> None:
    again = ModelTraits(recompute=True)
    dense = shape_of(QWEN3_8B)
    mixture = replace(dense, experts=8, experts_used=2)
    for sharded in (False, True):
        assert estimates.launch_s(mixture, again, sharded=sharded) == 2 * estimates.launch_s(dense, again, sharded=sharded)


@pytest.fixture(scope="module")
def recorded() -> list[predicted_runs.PredictedRun]:
    return list(predicted_runs.compared())


def test_updates_of_data_parallel_ranks_are_predicted_from_one_rank_within_a_tenth(recorded: list[predicted_runs.PredictedRun]) -> None:
    found = {run.name: run for run in recorded if run.from_one_rank_s is not None and ":dp2" in run.spec}
    assert len(found) >= 3
    assert not {name: run for name, run in found.items() if abs(run.error_from_one_rank) > 0.1}
    assert not {name: run for name, run in found.items() if abs(run.error_from_one_rank) > abs(run.error_without_gathering) / 2 + 0.03}


def test_updates_of_two_ranks_with_nothing_measured(recorded: list[predicted_runs.PredictedRun]) -> None:
    found = {run.name: run.error for run in recorded if run.ranks == 2 and "tp2" not in run.spec}
    assert len(found) >= 18
    far = {name for name, error in found.items() if abs(error) > 0.27}
    assert far == {"30B-A3B:ep2:offload, large_30b_a3b_h200", "1.7B:cp2, parallel_16k_h100"}
    mixtures = {name: error for name, error in found.items() if "A3B" in name}
    assert len(mixtures) >= 5


def test_compiled_updates_of_data_parallel_ranks_with_nothing_measured(recorded: list[predicted_runs.PredictedRun]) -> None:
    with_more_threads = "4B:dp2:compiled, parallel_compiled_h200"  # than workers have
    found = {run.name: run.error for run in recorded if ":dp2:compiled" in run.spec and run.name != with_more_threads}
    assert len(found) >= 5
    assert not {name: error for name, error in found.items() if not -0.01 < error < 0.1}, "estimated with the share of FlashAttention 2"


def test_the_table_of_predicted_updates_is_that_of_the_present_code(recorded: Iterator[predicted_runs.PredictedRun]) -> None:
    written = json.loads((predicted_runs.RESULTS / predicted_runs.FILE).read_text(encoding="utf-8"))["runs"]
    assert written == predicted_runs.rounded(recorded), "run python benchmarks/prediction/predicted_runs.py --json"
