"""`rg.tune` over `recompute`: the least that fits, more where longer passes are faster. And costs of other settings of the layers."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.grpo import grpo_graph
from support.qwen3_shapes import QWEN3_8B

import rlgraph as rg
from rlgraph.plan.cost_functions import NodeCost, Passes, Setting
from rlgraph.plan.model_shapes import ModelShape
from rlgraph.plan.roofline import device_of, roofline
from rlgraph.settings import RECOMPUTE, Recompute

CLUSTER = rg.Cluster(gpus=4, gpu="H200", gpu_memory_bytes=141 * 10**9)


def loop(model: str, **settings: Any) -> rg.Graph:
    generator = rg.Generator(
        model, pool=rg.Pool("rollout", gpus=2), sampling=rg.Sampling(max_tokens=1024, ignore_eos=True), max_context=4096
    )
    policy = rg.Policy(model, pool=rg.Pool("train", gpus=2), **settings)
    return grpo_graph(generator, policy, [{"prompt": "1 + 1 ="}] * 16, name="loop", count=16, group_size=4)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def measured(recompute: Recompute | None, token_s: float = 1e-4, pass_s: float = 0.0, compiled: bool | None = None) -> rg.planning.Costs:
    passes = Passes(8192, recompute=recompute, compiled=compiled)
    update = NodeCost(token_s=token_s, pass_s=pass_s, measured=Setting(2, 2, 64, passes))
    nodes = dict.fromkeys(["prompts", "rollout", "reward", "advantages"], 0.1) | {"update": update}
    return rg.planning.Costs(nodes, source="measured", lengths=rg.planning.Lengths((0.0, 1.0), (1024.0, 1024.0), 8.0))


@pytest.mark.parametrize(("tokens", "least"), [(4096, False), (16384, "selective"), (65536, True)])
def test_the_least_recomputing_that_fits_is_best_and_what_does_not_fit_is_left_out(model: str, tokens: int, least: Recompute) -> None:
    found = rg.tune(lambda recompute: loop(model, recompute=recompute, micro_batch_tokens=tokens), CLUSTER, recompute=RECOMPUTE)
    assert found.best.settings == {"recompute": least}
    assert sum(found.left_out.values()) == RECOMPUTE.index(least)
    assert all("on a GPU of 'train'" in reason for reason in found.left_out)


def test_recomputing_is_chosen_where_the_long_passes_that_it_makes_room_for_take_less(model: str) -> None:
    def build(recompute: Recompute, micro_batch_tokens: int) -> rg.Graph:
        return loop(model, recompute=recompute, micro_batch_tokens=micro_batch_tokens)

    host_paced = measured(False, token_s=1e-5, pass_s=0.2)
    found = rg.tune(build, CLUSTER, host_paced, recompute=RECOMPUTE, micro_batch_tokens=(4096, 16384))
    assert found.best.settings == {"recompute": "selective", "micro_batch_tokens": 16384}
    assert rg.tune(build, CLUSTER, host_paced, recompute=RECOMPUTE, micro_batch_tokens=(4096,)).best.settings["recompute"] is False


def test_costs_of_a_run_are_scaled_to_what_a_graph_computes_again(model: str) -> None:
    def seconds(costs: rg.planning.Costs, recompute: Recompute) -> float:
        return rg.compile(loop(model, recompute=recompute, micro_batch_tokens=4096), CLUSTER, costs).node("update").seconds

    without = [seconds(measured(False), recompute) for recompute in RECOMPUTE]
    assert without[2] / without[0] == pytest.approx(4 / 3, rel=0.03), "8 operations per parameter for 6"
    assert 0.3 < (without[1] - without[0]) / (without[2] - without[0]) < 0.5, "gate and up alone"
    with_all = measured(True, token_s=1e-4 * without[2] / without[0])
    assert [seconds(with_all, recompute) for recompute in RECOMPUTE] == pytest.approx(without, rel=1e-3)
    assert len({round(seconds(measured(None), recompute), 6) for recompute in RECOMPUTE}) == 1, "an earlier version did not write it"


def test_a_plan_says_that_costs_were_measured_with_another_recompute(model: str, tmp_path: Path) -> None:
    plans = {again: rg.compile(loop(model, recompute=again, micro_batch_tokens=8192), CLUSTER, measured(False)) for again in (False, True)}
    assert any("measured with recompute=False" in said for said in plans[True].prediction.assumed)
    assert not any("recompute" in said for said in plans[False].prediction.assumed)
    assert plans[True].node("update").cost == "scaled"
    measured(False).to_file(tmp_path / "costs.yaml")
    kept = rg.planning.Costs.from_file(tmp_path / "costs.yaml").cost_of("update").measured
    assert kept is not None
    assert kept.passes is not None
    assert kept.passes.recompute is False


def test_costs_of_layers_that_were_not_compiled_are_scaled_as_estimates_are(model: str, tmp_path: Path) -> None:
    def planned(costs: rg.planning.Costs, compiled: bool) -> rg.Plan:
        return rg.compile(loop(model, compiled=compiled, micro_batch_tokens=8192), CLUSTER, costs)

    def seconds(costs: rg.planning.Costs, compiled: bool) -> float:
        return planned(costs, compiled).node("update").seconds

    def estimate(compiled: bool) -> float:
        device = device_of("H200")
        assert device is not None
        costs = roofline(loop(model, compiled=compiled, micro_batch_tokens=8192), device, {model: ModelShape.from_config(QWEN3_8B)})
        return costs.cost_of("update").token_s

    plain, estimated = measured(False, compiled=False), estimate(True) / estimate(False)
    assert 0.4 < estimated < 0.8
    assert seconds(plain, True) / seconds(plain, False) == pytest.approx(estimated, rel=0.02)
    assert seconds(measured(False, token_s=1e-4 * estimated, compiled=True), False) == pytest.approx(seconds(plain, False), rel=0.02)
    plan = planned(plain, True)
    assert plan.node("update").cost == "scaled"
    assert any("measured with compiled=False" in said for said in plan.prediction.assumed)
    assert not any("compiled" in said for said in planned(plain, False).prediction.assumed)
    assert seconds(measured(False), True) == seconds(measured(False), False), "an earlier version did not write it"
    plain.to_file(tmp_path / "costs.yaml")
    assert seconds(rg.planning.Costs.from_file(tmp_path / "costs.yaml"), True) == pytest.approx(seconds(plain, True))
