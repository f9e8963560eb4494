"""How kept engines end: with their block, with their program, and where nothing is kept; and what a process is set to again."""

import os
import random
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support import forked_programs, forked_workers
from support.digests import clockless_metrics, run_here
from support.engine_reuse import renewable_loop, run_job, wait_until_gone
from support.paths import PROGRAMS

import rlgraph as rg
from rlgraph import notices
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.warm import ForkedProcesses, ProcessRequirements
from rlgraph.runtime.worker import warm_worker
from rlgraph.runtime.worker.executor import ProcessState

pytestmark = pytest.mark.stage("jobs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_leaving_the_block_ends_what_is_kept(model: Path) -> None:
    with rg.runs.warm(engines=True):
        _, pid = run_job(renewable_loop(model))
        assert forked_workers.alive(pid)
    assert wait_until_gone(pid)


def test_a_process_that_opens_gpus_as_it_imports_is_a_worker_itself(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ForkedProcesses._requirements

    def alone(self: ForkedProcesses, spec: object) -> ProcessRequirements:
        found = wanted(self, spec)  # type: ignore[arg-type]
        return replace(found, opens_gpus=found.engine is not None)

    monkeypatch.setattr(ForkedProcesses, "_requirements", alone)
    with rg.runs.warm(engines=True) as warm:
        first, pid = run_job(renewable_loop(model))
        assert first == run_here(renewable_loop(model), 3)
        assert pid in warm.pids
        assert run_job(renewable_loop(model)) == (first, pid)
        _, other = run_job(renewable_loop(model, seed=1))
        assert wait_until_gone(pid)
        os.kill(other, signal.SIGKILL)
        assert run_job(renewable_loop(model))[0] == first
        last = warm.pids
    assert all(map(wait_until_gone, last))


@pytest.mark.parametrize("alone", [False, True])
def test_a_program_that_is_killed_leaves_no_kept_engine(alone: bool, model: Path, tmp_path: Path) -> None:
    script = str(PROGRAMS / "engine_reuse_program.py")
    with forked_programs.Program(script, str(model), "alone" if alone else "forked", cwd=tmp_path) as running:
        kept = int(running.stdout.readline().split()[1])
        assert forked_workers.alive(kept)
        os.kill(running.pid, signal.SIGKILL)
        assert wait_until_gone(kept)


def test_the_state_of_the_process_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> tuple[float, ...]:
        return random.random(), np.random.random(), torch.rand(()).item()

    state = ProcessState.now()
    first = drawn()
    monkeypatch.setenv("LEFT_BEHIND", "yes")
    monkeypatch.setenv("PATH", "nowhere")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    state.restore()
    assert drawn() == first
    assert "LEFT_BEHIND" not in os.environ
    assert os.environ["PATH"] != "nowhere"
    assert torch.get_num_threads() == threads


def test_modules_of_libraries_stay_and_those_of_the_user_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "editable"):
        (tmp_path / f"{name}_by_test.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine_by_test", "editable_by_test"):
        __import__(name)
    others = [name for name, module in sys.modules.items() if warm_worker.is_users(module)]
    libraries = {name.partition(".")[0] for name in others} - {"mine_by_test"}  # of this program, which goes on
    warm_worker.forget_modules(libraries)
    assert "mine_by_test" not in sys.modules
    assert {"editable_by_test", "torch", "os"} <= sys.modules.keys()
    assert not warm_worker.is_users(torch)
    assert not warm_worker.is_users(os)


def test_what_an_engine_said_as_it_loaded_is_said_in_each_job_and_nothing_else() -> None:
    said = notices.Notices()
    said.carried = True
    said.say("loaded slowly")
    said.take_new()
    said.forget()
    said.say("loaded slowly")
    assert said.take_new() == ["loaded slowly"]


@pytest.mark.vllm
def test_an_engine_of_vllm_is_kept_and_its_jobs_are_those_of_engines_started_anew(model: Path, tmp_path: Path) -> None:
    mine, other = shutil.copytree(model, tmp_path / "mine"), tiny_model(tmp_path / "other", seed=5)
    with rg.runs.warm(engines=True):
        first, pid = run_job(renewable_loop(mine, "vllm"))
        longer, same = run_job(renewable_loop(mine, "vllm", depth=0, max_tokens=9), 2)
        assert run_job(renewable_loop(mine, "vllm")) == (first, pid)
        shutil.copy(other / "model.safetensors", mine / "model.safetensors")
        changed = run_job(renewable_loop(mine, "vllm"))
        assert same == changed[1] == pid
    with rg.runs.warm():
        assert run_job(renewable_loop(mine, "vllm"))[0] == changed[0] != first
    shutil.copy(model / "model.safetensors", mine / "model.safetensors")
    graph = renewable_loop(mine, "vllm", depth=0, max_tokens=9)
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=240.0) as job:  # its worker imports vLLM
        assert [clockless_metrics(step) for step in job.steps(2)] == longer
