"""A run with moments of 8 bits whose trainer is killed goes on from its checkpoint with the same bits."""

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers  # noqa: F401 (the dispatch of that name)
from support.grpo import grpo_graph
from support.tiny import tiny_qwen

import rlgraph as rg
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob

pytestmark = [
    pytest.mark.stage("ranks"),
    pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed"),
]


@rg.node(reads="responses", writes="rewards", by_group=True)
def small_tokens(batch: Any) -> dict[str, torch.Tensor]:
    return {"rewards": -batch["responses"].float().mean(-1) / 100}


def loop(model: str) -> rg.Graph:
    given: dict[str, Any] = {"engine": "transformers", "dtype": "float32", "max_context": 64, "sampling": rg.Sampling(max_tokens=6)}
    generator = rg.Generator(model, pool=rg.Pool("rollout", cpus=1), **given)
    adam = rg.AdamW(lr=1e-3, moments="8bit")
    policy = rg.Policy(model, pool=rg.Pool("train", cpus=1), optimizer=adam, dtype="float32", self_test=False)
    return grpo_graph(generator, policy, [{"prompt": "1 + 1 ="}, {"prompt": "2 + 3 ="}], name="eight_bits", rewards=small_tokens, count=2)


def learnt(step: Any) -> dict[str, float]:
    return {name: value for name, value in step.metrics.items() if name.startswith("actor/")}


def test_a_trainer_that_is_killed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    graph = loop(str(tiny_qwen(tmp_path, "qwen3", vocab=320, head=16)))
    plan = compile_plan(graph, rg.Cluster(cpus=2))
    with LocalJob(graph, plan) as job:
        whole = [learnt(step) for step in job.steps(5)]
    found = []
    recovery = Recovery(tmp_path / "saved", 2, 2, 1)
    with Job(graph, plan, dispatch_name="forked", deadline_s=60.0, recovery=recovery) as running:
        for step in running.steps(5):
            found.append(learnt(step))
            if step.index == 2:
                os.kill(running.pids["policy"], signal.SIGKILL)
    assert found == whole
    assert len({step["actor/grad_norm"] for step in whole}) == 5
