"""Agent programs in whole jobs: the same seed gives the same bits, a run goes on in the middle, and kills lose and double nothing."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked_workers  # noqa: F401 (a way of dispatch)
from support.digests import ITEMS, DigestPolicy, clockless_metrics, digest, run_here
from support.templates import model_with

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

STEPS, PROMPTS, GROUP = 4, 2, 2
TURN = rg.Sampling(max_tokens=200, stop_token_ids=tuple(range(10, 60)))
COMMAND = """
import json, os, signal, sys, urllib.request
from pathlib import Path

prompt, notes, kill = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "kill"
messages = [{"role": "user", "content": prompt}]
for turn in range(3):
    with (notes / "calls").open("a") as file:
        file.write(f"{prompt} {turn}\\n")
    if kill and turn == 1 and len((notes / "calls").read_text().splitlines()) > 20 and not (notes / "killed").exists():
        (notes / "killed").touch()
        supervisor = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(supervisor[1]), signal.SIGKILL)  # the generator's worker
    head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    answer = urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, head))
    messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "more"}]
print(len(messages[-2]["content"] or ""))
"""


@rg.node(reads="prompt_ids", writes="seen")
def places(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Digest the prompts of a step, in their order."""
    ids = batch["prompt_ids"]
    assert isinstance(ids, torch.Tensor)
    return {"seen": ids.float()}, {"places": digest([ids])}


@rg.node(reads="group_ids responses response_mask weight_version", writes="trained")
def rows(batch: Columns) -> tuple[rg.Columns, dict[str, float]]:
    """Tell whose responses a step has, their tokens, and the versions that wrote them."""
    ids, tokens, mask, versions = (batch[name] for name in ("group_ids", "responses", "response_mask", "weight_version"))
    assert isinstance(ids, torch.Tensor)
    assert isinstance(tokens, torch.Tensor)
    assert isinstance(mask, torch.Tensor)
    assert isinstance(versions, torch.Tensor)
    found = {"groups": digest([ids]), "tokens": digest([tokens, mask]), "silent": float((mask.sum(-1) == 0).sum())}
    read = (~mask & (tokens != 0)).sum()
    return {"trained": ids.float()}, {**found, "rows": float(len(ids)), "read": float(read), "oldest": float(versions[mask].min())}


async def talk(client: rg.agents.AgentClient, prompt: str) -> float:
    """Take three turns by the official client."""
    from openai import AsyncOpenAI

    messages: list[Any] = [{"role": "user", "content": prompt}]
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as model:
        for _ in range(3):
            said = (await model.chat.completions.create(model="policy", messages=messages)).choices[0].message
            messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
    return float(len(said.content or ""))


def loop(model: Path, program: Any, **options: Any) -> rg.Graph:
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine="transformers", sampling=TURN, dtype="float32")
    policy = DigestPolicy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=2e-3), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    prompts = rg.prompts(ITEMS, count=PROMPTS, seed=3)
    rollout = generator.rollout(prompts, weights, group_size=GROUP, agent=program, **options)
    step = policy.update(rollout, rg.advantages(rollout, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("programs", step.metrics, places(prompts), rows(rollout))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_with(tmp_path_factory.mktemp("model") / "qwen2_5", "qwen2_5")


def job(graph: rg.Graph, folder: Path, restarts: int = 0, every: int = 1) -> Job:
    recovery = Recovery(folder, every, 2, restarts)
    return Job(graph, compile_plan(graph, Cluster(cpus=2)), dispatch_name="forked", deadline_s=120.0, recovery=recovery)


def clockless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith(("agent/seconds/", "agent/reply_s", "agent/idle_s"))}


def test_one_session_at_a_time_gives_the_same_bits_in_one_process_in_workers_and_after_a_resume(model: Path, tmp_path: Path) -> None:
    graph, found = loop(model, talk, concurrency=1), []
    wanted = [clockless(step) for step in run_here(graph, STEPS)]
    with job(graph, tmp_path) as first:
        found += [clockless(clockless_metrics(step)) for step in first.steps(2)]
    with job(graph, tmp_path) as second:
        found += [clockless(clockless_metrics(step)) for step in second.steps(STEPS)]
    assert found == wanted
    assert len({step["digest/weights"] for step in wanted}) == STEPS, "the policy was trained in each step"
    assert all(step["read"] > 0 for step in wanted), "sessions have several turns"


def test_a_worker_killed_in_the_middle_of_sessions_loses_and_doubles_nothing(model: Path, tmp_path: Path) -> None:
    (notes := tmp_path / "notes").mkdir()
    (calm := tmp_path / "calm").mkdir()
    (tmp_path / "agent.py").write_text(COMMAND)

    def graph(folder: Path, kill: bool) -> rg.Graph:
        command = [sys.executable, str(tmp_path / "agent.py"), "{prompt}", str(folder), "kill" if kill else "spare"]
        return loop(model, command, concurrency=3)

    with job(graph(notes, True), tmp_path / "checkpoints", restarts=2) as killed:
        steps = list(killed.steps(STEPS))
    assert (notes / "killed").exists()
    wanted = run_here(graph(calm, False), STEPS)
    assert [step.index for step in steps] == list(range(STEPS))
    for name in ("places", "groups", "rows"):
        assert [step.metrics[name] for step in steps] == [step[name] for step in wanted], name
    assert all(step.metrics["silent"] == step.metrics["agent/errors"] == 0 for step in steps)
    assert all(step.metrics["oldest"] >= step.index - 1 for step in steps)
    begun, undisturbed = (Counter((folder / "calls").read_text().splitlines()) for folder in (notes, calm))
    assert set(begun) >= set(undisturbed)
    assert sum(undisturbed.values()) == STEPS * PROMPTS * GROUP * 3
    assert sum(begun.values()) > sum(undisturbed.values()), "some sessions began again"


@pytest.mark.stage("jobs")
@pytest.mark.parametrize("options", [{"continuous": True}, {"continuous": True, "interrupt": "recompute"}], ids=json.dumps)
def test_the_staleness_bound_holds_for_every_token_of_a_session(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    with job(loop(model, talk, **options), tmp_path, every=STEPS) as running:
        steps = list(running.steps(STEPS))
    wanted = run_here(loop(model, talk), 1)
    assert [step.index for step in steps] == list(range(STEPS))
    assert all(step.metrics["oldest"] >= step.index - 1 for step in steps)
    assert all(step.metrics["silent"] == step.metrics["agent/errors"] == 0 for step in steps)
    assert steps[0].metrics["groups"] == wanted[0]["groups"]
    assert [step.metrics["staleness/max"] for step in steps[1:]] == [1.0] * (STEPS - 1) or "interrupt" in options
