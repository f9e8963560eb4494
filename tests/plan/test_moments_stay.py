"""Moments that stay on a GPU which other models share: no time and no host memory for them, and an error where nobody shares it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.grpo import grpo_graph
from support.qwen3_shapes import QWEN3_8B

import rlgraph as rg
from rlgraph.errors import PlanError
from rlgraph.plan.cost_functions import SleepCost
from rlgraph.plan.model_shapes import shapes_of
from rlgraph.plan.roofline import priced_for

GPU = rg.Cluster(gpus=4, gpu="H200")


def loop(folder: Path, *, offload: Any = None, shared: bool = True, cpus: int | None = None) -> rg.Graph:
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": 8}))
    together = rg.Pool("gpu", cpus=cpus)
    generator = rg.Generator(str(folder), pool=together, sampling=rg.Sampling(max_tokens=64), max_context=128)
    policy = rg.Policy(str(folder), pool=together if shared else rg.Pool("train", cpus=cpus), offload=offload)
    return grpo_graph(generator, policy, name="loop", group_size=4, depth=0)


def sleeps(plan: rg.Plan) -> dict[str, tuple[float, int | None]]:
    return {each.model: (each.wake_s + each.sleep_s, each.bytes) for each in plan.sleeps}


def asleep(plan: rg.Plan) -> int:
    return next(dict(need.parts)["asleep"] for need in plan.memory if need.place == "host")


def test_they_cost_no_time_and_no_host_memory(tmp_path: Path) -> None:
    away, stay = (rg.compile(loop(tmp_path, offload=offload), GPU) for offload in (None, "never"))
    before, after = sleeps(away), sleeps(stay)
    assert after["policy"] == (0.0, 0)
    assert after["generator"] == before["generator"]
    moved_s, moved = before["policy"]
    assert moved
    assert away.prediction.step_s - stay.prediction.step_s == pytest.approx(moved_s, rel=0.01)
    assert asleep(away) - asleep(stay) == 4 * moved


def test_costs_of_a_run_whose_moments_slept_are_not_taken_for_them(tmp_path: Path) -> None:
    graph = loop(tmp_path, offload="never")
    costs = priced_for(graph, GPU, None, shapes_of(graph))
    slept = replace(costs, sleep={**costs.sleep, "policy": SleepCost(1.0, 2.0, 1 << 30)})
    assert sleeps(rg.compile(graph, GPU, slept))["policy"] == (0.0, 0)
    graph = loop(tmp_path)
    assert sleeps(rg.compile(graph, GPU, slept))["policy"] == (3.0, 1 << 30)


@pytest.mark.parametrize(
    ("given", "cluster", "says"),
    [
        ({"shared": False}, GPU, "no other model uses the pool 'train'"),
        ({"cpus": 1}, rg.Cluster(cpus=4), "offload='never', for moments that leave a GPU to others, but it trains on the host"),
    ],
)
def test_what_has_no_effect_is_an_error(tmp_path: Path, given: dict[str, Any], cluster: rg.Cluster, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        rg.compile(loop(tmp_path, offload="never", **given), cluster)
