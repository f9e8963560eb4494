"""A generator killed in the middle of conversations: they restart from their prompts, and each prompt is trained on exactly once.

On Ray the workers are killed in `test_resume.py`: how they are started knows nothing of conversations.
"""

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.digests import ITEMS, digest, run_here
from support.scripted_conversations import wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

pytestmark = pytest.mark.stage("kills")

STEPS = 4


@rg.node(reads="prompt_ids", writes="seen")
def places(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Tell which prompts a step has, in their order."""
    ids = batch["prompt_ids"]
    assert isinstance(ids, torch.Tensor)
    return {"seen": ids.float()}, {"places": digest([ids])}


@rg.node(reads="group_ids response_mask", writes="trained")
def groups(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Tell whose responses a step has, in their order."""
    ids, mask = batch["group_ids"], batch["response_mask"]
    assert isinstance(ids, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    return {"trained": ids.float()}, {"groups": digest([ids]), "rows": float(len(ids)), "silent": float((mask.sum(-1) == 0).sum())}


def loop(model: Path, notes: Path, kill: bool) -> rg.Graph:
    class Note:
        """Notes when it begins and ends; once, in the middle of the conversations of a step, it kills its process."""

        def __init__(self, answer: str) -> None:
            self.answer, self.turns = answer, 0

        async def reset(self) -> list[rg.agents.Message]:
            self.lease = rg.environments.lease(["/bin/sh", "-c", f"echo {self.answer} >> {notes}/freed"])
            with (notes / "begun").open("a") as file:
                file.write(f"{self.answer}\n")
            return [rg.agents.Message("user", self.answer)]

        async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
            self.turns += 1
            begun = len((notes / "begun").read_text().splitlines())
            if kill and self.turns == 2 and begun > 40 and not (notes / "killed").exists():
                (notes / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return rg.agents.Turn([rg.agents.Message("user", "more")], reward=float(len(said.content)), done=self.turns == 3)

        async def close(self) -> None:
            self.lease.end()

    turn = rg.Sampling(max_tokens=90, stop_token_ids=tuple(range(10, 60)))
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=turn, dtype="float32")
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=2e-3), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(ITEMS, count=4, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=4, agent=Note, max_turns=3, concurrency=6)
    step = policy.update(rollout, rg.advantages(rollout, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("kills", step.metrics, places(prompts), groups(rollout))


def test_conversations_restart_and_every_prompt_is_trained_on_once(tmp_path: Path) -> None:
    model = model_with(tmp_path / "qwen2_5", "qwen2_5")
    (notes := tmp_path / "notes").mkdir()
    (calm := tmp_path / "calm").mkdir()
    graph = loop(model, notes, kill=True)
    plan = compile_plan(graph, Cluster(cpus=2))
    with Job(graph, plan, dispatch_name="forked", deadline_s=120.0, recovery=Recovery(tmp_path / "checkpoints", 1, 2, 2)) as job:
        steps = list(job.steps(STEPS))
    assert (notes / "killed").exists()
    wanted = run_here(loop(model, calm, kill=False), STEPS)
    assert [step.index for step in steps] == list(range(STEPS))
    for name in ("places", "groups", "rows"):
        assert [step.metrics[name] for step in steps] == [step[name] for step in wanted], name
    assert all(step.metrics["silent"] == 0 for step in steps)
    begun, undisturbed = (Counter((folder / "begun").read_text().split()) for folder in (notes, calm))
    assert sum(begun.values()) > sum(undisturbed.values())  # some conversations began again
    wait_until(lambda: bool((notes / "freed").exists() and (notes / "freed").read_text()))  # what the killed ones held was freed
    assert not (calm / "freed").exists()
