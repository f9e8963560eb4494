"""Engines that stay loaded from one launch to the next inside of `rg.runs.warm(engines=True)`: a job cannot tell one from a new engine."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fakes, forked_workers
from support.digests import ITEMS, clockless_metrics, run_here
from support.engine_reuse import renewable_loop, run_job, wait_until_gone
from support.renewable_engine import ENGINE
from support.templates import model_with

import rlgraph as rg
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import NodeError

pytestmark = pytest.mark.stage("jobs")


@pytest.fixture(scope="module", autouse=True)
def warm() -> Iterator[None]:
    with rg.runs.warm(engines=True):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_an_engine_is_kept_and_each_job_with_it_repeats_the_oracle_in_every_bit(model: Path) -> None:
    first, pid = run_job(renewable_loop(model))
    assert first == run_here(renewable_loop(model), 3)
    longer = renewable_loop(model, max_tokens=9, depth=0)
    assert run_job(longer) == (run_here(longer, 3), pid)
    assert run_job(renewable_loop(model)) == (first, pid)


def test_an_engine_begins_with_the_weights_that_its_folder_has_now(model: Path, tmp_path: Path) -> None:
    mine, other = shutil.copytree(model, tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5)
    first, pid = run_job(renewable_loop(mine))
    shutil.copy(other / "model.safetensors", mine / "model.safetensors")
    second = run_job(renewable_loop(mine))
    assert second == (run_here(renewable_loop(mine), 3), pid)
    assert second[0] != first


def test_an_engine_of_another_make_is_another_one_and_what_a_launch_does_not_take_ends_before_it_starts(model: Path) -> None:
    _, pid = run_job(renewable_loop(model))
    _, other = run_job(renewable_loop(model, seed=1))
    assert other != pid
    assert not forked_workers.alive(pid)
    with rg.compile(fakes.vector_loop(1), rg.Cluster(cpus=2)).launch():
        assert not forked_workers.alive(other)


@rg.node(reads="responses", writes="rewards")
def fails(batch: rg.Columns) -> rg.Columns:
    raise ZeroDivisionError("on purpose")


def test_a_job_that_fails_keeps_no_engine(model: Path) -> None:
    first, pid = run_job(renewable_loop(model))
    with pytest.raises(NodeError, match="on purpose"):
        run_job(renewable_loop(model, rewards=fails))
    assert wait_until_gone(pid)
    again, other = run_job(renewable_loop(model))
    assert again == first
    assert other != pid


def test_an_engine_that_died_while_it_was_kept_or_at_work_is_replaced(model: Path, tmp_path: Path) -> None:
    expected, pid = run_job(renewable_loop(model), 5)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone(pid)
    again, pid = run_job(renewable_loop(model), 5)
    assert again == expected
    found = []
    with rg.compile(renewable_loop(model), rg.Cluster(cpus=2)).launch(checkpoint=tmp_path / "checkpoints", every=2, restarts=1) as job:
        assert job.pids["generator"] == pid
        for step in job.steps(5):
            found.append(clockless_metrics(step))
            if step.index == 1:
                os.kill(pid, signal.SIGKILL)
    assert found == expected


def test_a_job_resumes_from_a_checkpoint_with_a_kept_engine(model: Path, tmp_path: Path) -> None:
    expected, pid = run_job(renewable_loop(model), 6)
    half, _ = run_job(renewable_loop(model), 3, checkpoint=tmp_path / "checkpoints", every=3)
    rest, same = run_job(renewable_loop(model), 6, checkpoint=tmp_path / "checkpoints", every=3)
    assert (half + rest, same) == (expected, pid)


def test_an_engine_that_cannot_be_kept_is_said_to_start_anew(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, pid = run_job(renewable_loop(model, "transformers"), 1)
    assert "rg.runs.warm(engines=True) does not keep the engine of 'generator', which each launch starts again" in caplog.text
    assert wait_until_gone(pid)


AGENT = """
import rlgraph as rg

class Tells:
    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def reset(self) -> list[rg.agents.Message]:
        print("said by an agent", flush=True)
        return [rg.agents.Message("user", self.answer)]

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        return rg.agents.Turn([], reward=WORTH, done=True)

    async def close(self) -> None:
        pass
"""


def conversations(model: Path, agent: object) -> rg.Graph:
    turn = rg.Sampling(max_tokens=90, stop_token_ids=tuple(range(10, 60)))
    generator = rg.Generator(str(model), pool=rg.Pool("rollout"), engine=ENGINE, sampling=turn, dtype="float32")
    policy = rg.Policy(str(model), pool=rg.Pool("train"), optimizer=rg.AdamW(lr=1e-3), dtype="float32")
    weights = rg.feedback("weights", depth=1)
    rollout = generator.rollout(rg.prompts(ITEMS, count=2, seed=3), weights, group_size=2, agent=agent, max_turns=2)  # type: ignore[arg-type]
    step = policy.update(rollout, rg.advantages(rollout, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("conversations", step.metrics)


def test_modules_folder_and_output_are_those_of_each_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = model_with(tmp_path / "model", "qwen2_5")
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards, pids = [], []
    for worth in (0.25, 0.5):
        (tmp_path / "my_agent.py").write_text(f"WORTH = {worth}\n{AGENT}")
        sys.modules.pop("my_agent", None)
        capfd.readouterr()
        (step,), pid = run_job(conversations(model, __import__("my_agent").Tells), 1)
        assert "said by an agent" in capfd.readouterr().out
        rewards.append(step["critic/rewards/mean"])
        pids.append(pid)
    assert rewards == [0.25, 0.5]
    assert len(set(pids)) == 1
