"""Estimates where nothing was measured: against runs on H200s that the table of host times was not fitted to, and its derivation."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.grpo import grpo_graph

import rlgraph as rg
from benchmarks.peers import peer_job
from benchmarks.prediction import a_priori
from rlgraph.plan import estimates
from rlgraph.plan.cost_functions import Decode, Passes, Setting
from rlgraph.plan.model_shapes import ModelShape
from rlgraph.plan.roofline import TRAINING


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[a_priori.EstimatedRun]:
    return list(a_priori.compared(tmp_path_factory.mktemp("models")))


def test_a_step_that_nothing_measured_is_estimated_within_half_of_what_it_took(rows: list[a_priori.EstimatedRun]) -> None:
    assert {name.split(",")[0] for name in (row.name for row in rows)} >= {"135M", "0.6B", "4B"}  # and 8B where it was measured
    far = {row.name: row.ratio for row in rows if not 1 / 1.5 <= row.ratio <= 1.5}
    assert not far
    assert sum(row.held_out for row in rows) >= 12


def test_the_table_holds_what_its_sources_give() -> None:
    for name, value in a_priori.fit().items():
        assert getattr(estimates, name).value == pytest.approx(value, rel=0.1), name


def test_an_estimate_of_a_small_model_counts_the_host_that_no_gpu_shortens(tmp_path: Path) -> None:
    cfg = peer_job.Config(model=a_priori.folder("smollm2", tmp_path), engines_per_gpu=1)
    graph = peer_job.graph(cfg)
    plan = rg.compile(graph, a_priori.cluster(2))
    floor = 1024 * (estimates.DECODE_STEP_S.value + 1024 * estimates.DECODE_SEQUENCE_S.value)
    assert plan.node("rollout").seconds > floor
    assert plan.prediction.cost == "roofline"
    assert "nothing was measured" in str(plan)


def test_no_node_of_an_estimate_says_that_it_was_measured_elsewhere(tmp_path: Path) -> None:
    graph = peer_job.graph(peer_job.Config(mode="colocated", model=a_priori.folder("4B", tmp_path), prompts=32, engines_per_gpu=1))
    plan = rg.compile(graph, a_priori.cluster(2))
    assert {node.cost for node in plan.nodes} == {"roofline"}
    assert "scaled" not in str(plan)


def test_prompts_and_lengths_that_are_known_are_estimated_as_they_are(tmp_path: Path) -> None:
    graph = peer_job.graph(peer_job.Config(model=a_priori.folder("smollm2", tmp_path)))
    found = a_priori.priced_for(graph, a_priori.cluster(2), None, a_priori.shapes_of(graph)).lengths
    assert found is not None
    assert (found.mean, found.longest) == (1024, 1024)
    assert 5 < found.prompt_tokens < 22


@pytest.mark.parametrize(
    "changed", [{}, {"engines_per_gpu": 2}, {"prompts": 64, "response_tokens": 512}], ids=["as measured", "engines", "lengths"]
)
def test_costs_of_one_length_and_batch_size_are_those_of_another_plan_in_the_proportions_of_the_roofline(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    model = a_priori.folder("1.7B", tmp_path)
    job = {"mode": "colocated", "model": model, "prompts": 32, "micro_batch_tokens": 16384, "compiled": True}
    costs = rg.planning.Costs.from_file(a_priori.RESULTS.parent / "announced_costs/1.7b_one_engine.yaml")
    measured, other = (peer_job.graph(peer_job.Config(**job | {"engines_per_gpu": 1} | more)) for more in ({}, changed))
    plans = [rg.compile(graph, a_priori.cluster(1), given) for given in (costs, None) for graph in (measured, other)]
    (there, here), (estimated_there, estimated_here) = ([p.node("rollout").seconds for p in pair] for pair in (plans[:2], plans[2:]))
    assert there == pytest.approx(8.39, abs=0.1)
    assert here / there == pytest.approx(estimated_here / estimated_there, rel=0.05)
    assert plans[1].node("update").seconds == pytest.approx(plans[0].node("update").seconds, rel=0.03), "as many tokens but for prompts"
    assert any("as the roofline does" in said for said in plans[1].prediction.assumed) == bool(changed)


@pytest.mark.parametrize(
    ("longest", "most", "said"), [(1024.0, 2048, True), (1024.0, 1024, False), (1024.0, 512, False), (900.0, 900, False)]
)
def test_measured_lengths_end_where_the_graph_cuts_responses_off(tmp_path: Path, longest: float, most: int, said: bool) -> None:
    """Half of the responses were cut off at the longest."""
    generator = rg.Generator(a_priori.folder("1.7B", tmp_path), pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=most))
    graph = rg.Graph("generate", generator.rollout(rg.prompts([{"prompt": "1"}], count=2)))
    lengths = rg.planning.Lengths((0.0, 0.5, 1.0), (10.0, longest, longest), 5.0)
    costs = rg.planning.Costs(
        {"prompts": 0.1, "rollout": rg.planning.NodeCost(decode=Decode(step_s=0.01), measured=Setting(1, 1, 2))},
        source="measured",
        lengths=lengths,
    )
    priced = a_priori.priced_for(graph, a_priori.cluster(1), costs, a_priori.shapes_of(graph))
    assert priced.lengths is not None
    assert priced.lengths.longest == min(longest, most)
    assert any("was probably their limit" in line for line in rg.compile(graph, a_priori.cluster(1), costs).prediction.assumed) == said


def test_costs_of_empty_responses_are_left_as_they_are(tmp_path: Path) -> None:
    generator = rg.Generator(a_priori.folder("1.7B", tmp_path), pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=8))
    graph = rg.Graph("generate", generator.rollout(rg.prompts([{"prompt": "1"}], count=2)))
    rollout = rg.planning.NodeCost(decode=Decode(start_s=2.0), measured=Setting(1, 1, 2))
    costs = rg.planning.Costs(
        {"prompts": 0.1, "rollout": rollout}, source="measured", lengths=rg.planning.Lengths((0.0, 1.0), (0.0, 0.0), 0.0)
    )
    assert rg.compile(graph, a_priori.cluster(1), costs).node("rollout").seconds == pytest.approx(2.0)


def update_s(folder: str, micro_batch_tokens: int = 8192, **policy: Any) -> float:
    """The estimated seconds of an update of 8 sequences of 2,048 tokens on one H200."""
    generator = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=1536, ignore_eos=True))
    trained = rg.Policy(folder, pool=rg.Pool("train", gpus=1), micro_batch_tokens=micro_batch_tokens, fused_head=True, **policy)
    graph = grpo_graph(generator, trained, name="update", count=2, group_size=4)
    costs = a_priori.priced_for(graph, a_priori.cluster(2), None, a_priori.shapes_of(graph))
    assert costs.lengths is not None
    lengths = replace(costs.lengths, prompt_tokens=512.0)
    return float(costs.cost_of("update").seconds(Setting(1, 1, 8, Passes(micro_batch_tokens)), lengths, 1, 8)[0])


def test_updates_of_adapters_and_with_recomputing_are_estimated_as_measured(tmp_path: Path) -> None:
    parts = json.loads((a_priori.RESULTS / "small_gpu_h200.json").read_text())["parts"]
    lora, small = parts["lora_memory"]["runs"], parts["moments_8bit"]["runs"]
    eight, adapter = a_priori.folder("8B", tmp_path), rg.LoRA(rank=32)
    pairs = {
        "8B, adapter, recompute": (update_s(eight, adapter=adapter, recompute=True), lora["recompute"]["update_s"]),
        "8B, adapter": (update_s(eight, 4096, adapter=adapter), lora["activations kept"]["update_s"]),
        "1.7B, recompute": (update_s(a_priori.folder("1.7B", tmp_path), recompute=True), small["1.7B, 32bit"]["update_s"]),
        "4B, recompute": (update_s(a_priori.folder("4B", tmp_path), recompute=True), small["4B, 8bit"]["update_s"]),
    }
    runs, four = parts["moments"]["runs"], a_priori.folder("4B", tmp_path)
    pairs |= {
        "4B, moments on the GPU": (update_s(four, recompute=True), runs["4B, moments on the GPU"]["update_s"]),
        "4B, on the host": (update_s(four, recompute=True, offload="moments"), runs["4B, moments on the host"]["update_s"]),
    }
    far = {name: found for name, found in pairs.items() if not 1 / 1.3 <= found[0] / found[1] <= 1.3}
    assert not far


def test_a_compiled_update_is_estimated_within_a_tenth(rows: list[a_priori.EstimatedRun]) -> None:
    found = {row.name: row.ratio for row in rows if "compiled update" in row.name}
    assert len(found) == 2
    assert not {name: ratio for name, ratio in found.items() if not 0.9 < ratio < 1.1}


@pytest.mark.parametrize(("prompt", "keys"), [(600, 864.0), (2000, 2000)])
def test_a_prompt_that_responses_share_costs_a_call_of_attention_of_at_least_so_many_keys(tmp_path: Path, prompt: int, keys: float) -> None:
    folder, shape = a_priori.folder("1.7B", tmp_path), a_priori.shape_of("1.7B")
    generator = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=512, ignore_eos=True))
    token_s = []
    for group_size in (1, 4):
        policy = rg.Policy(folder, pool=rg.Pool("train", gpus=1), micro_batch_tokens=8192, compiled=True)
        graph = grpo_graph(
            generator, policy, [{"prompt": "x" * 3 * prompt}], count=2, group_size=group_size, estimator=rg.estimators.ReinforcePlusPlus()
        )
        costs = a_priori.priced_for(graph, a_priori.cluster(2), None, a_priori.shapes_of(graph))
        token_s.append(costs.cost_of("update").token_s)
    of_a_key = 12 * shape.layers * shape.heads * shape.head_dim / (a_priori.H200.flops * estimates.ATTENTION.value)
    assert token_s[1] - token_s[0] == pytest.approx(of_a_key * (keys - prompt / 2))


def test_recomputing_a_part_of_a_layer_costs_the_products_of_gate_and_up(tmp_path: Path) -> None:
    shape = ModelShape.from_config(a_priori.shape("4B"))
    assert shape is not None
    kept, part, whole = (update_s(a_priori.folder("4B", tmp_path), recompute=way) for way in (False, "selective", True))
    products = 2 * 2 * shape.layers * shape.hidden * shape.intermediate * 8 * 2048
    assert part - kept == pytest.approx(products / (a_priori.H200.flops * TRAINING), rel=1e-3)
    assert 0.3 < (part - kept) / (whole - kept) < 0.5


def test_moments_in_host_memory_cost_their_way_to_the_gpu_and_back(tmp_path: Path) -> None:
    folder = a_priori.folder("4B", tmp_path)
    shape = ModelShape.from_config(a_priori.shape("4B"))
    assert shape is not None
    seconds = 16 * shape.parameters / (estimates.MOMENTS_COPYING.value * a_priori.H200.host_link)
    assert update_s(folder, offload="moments") - update_s(folder) == pytest.approx(seconds)
    assert 1.1 < seconds < 1.2
