"""Which GPUs a worker sees."""

import pytest
from support.grpo import grpo_graph

import rlgraph as rg
from rlgraph.runtime.driver.hosts import worker_environment
from rlgraph.runtime.worker.spec import worker_specs


@pytest.mark.parametrize(("here", "expected"), [("", ("0,1", "2,3", "4")), ("3,4,5,6,7", ("3,4", "5,6", "7"))])
def test_a_worker_sees_the_gpus_of_its_plan_alone_as_the_driver_numbers_them(
    monkeypatch: pytest.MonkeyPatch, here: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", here)
    generator, policy = rg.Generator("m", pool=rg.Pool("a", gpus=4), tensor_parallel=2), rg.Policy("m", pool=rg.Pool("b", gpus=1))
    graph = grpo_graph(generator, policy, name="devices", reward=lambda responses: [0.0 for _ in responses])
    plan = rg.compile(graph, rg.Cluster(gpus=5))
    seen = {s.worker.name: worker_environment(s)["CUDA_VISIBLE_DEVICES"] for s in worker_specs(graph, plan, "folder", b"key", 1.0)}
    assert (seen["generator[0]"], seen["generator[1]"], seen["policy"]) == expected
    assert seen["prompts"] == "", "a worker on the host sees none"
    assert all("HF_HUB_OFFLINE" not in worker_environment(s) for s in worker_specs(graph, plan, "folder", b"key", 1.0)), (
        "a reward or a tool in any worker may ask a hub; engines load without one by themselves"
    )
