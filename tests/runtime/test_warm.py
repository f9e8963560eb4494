"""Jobs launched inside of `rg.runs.warm()`: each worker is forked from a process with its imports, and begins as a new one."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import fakes, forked_programs, forked_workers
from support.digests import clockless_metrics, digest_loop, run_here
from support.paths import PROGRAMS

import rlgraph as rg
from rlgraph.columns import Column, Columns
from rlgraph.engines.hf.pretrained import tiny_model
from rlgraph.errors import NodeError, PlanError, RlgraphError, WorkerDied
from rlgraph.runtime.driver import warm as warm_module
from rlgraph.runtime.driver.warm import Warm

pytestmark = pytest.mark.stage("jobs")

GONE_S = 30.0


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    with rg.runs.warm() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def launched(graph: rg.Graph, steps: int = 3) -> tuple[list[dict[str, float]], set[int]]:
    """Launch a plan; return the metrics of its steps that no clock is in, digests of weights included, and the parents of its workers."""
    with rg.compile(graph, rg.Cluster(cpus=2)).launch() as job:
        found = [clockless_metrics(step) for step in job.steps(steps)]
        return found, {parent(pid) for pid in job.pids.values()}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until(holds: Callable[[], bool], seconds: float = GONE_S) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_a_second_launch_forks_from_the_same_process_and_repeats_the_oracle_in_every_bit(warm: Warm, model: str) -> None:
    graph = digest_loop(model, "transformers")
    first, parents = launched(graph)
    assert first == run_here(graph, 3)
    assert launched(digest_loop(model, "transformers", depth=0))[0] != first  # another job in between
    assert launched(graph) == (first, parents)
    assert parents <= set(warm.pids)


@pytest.mark.usefixtures("warm")
def test_without_engines_none_is_kept(model: str) -> None:
    with rg.compile(digest_loop(model, "transformers"), rg.Cluster(cpus=2)).launch() as job:
        assert forked_workers.alive(pid := job.pids["generator"])
    assert wait_until(lambda: not forked_workers.alive(pid))


COUNTED: list[int] = []


@rg.node(reads="values group_ids", writes="rewards", by_group=True, trial=False)
def leaves_behind(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    """Reward as `fakes.score` does, and change the process."""
    before = {
        "left/counted": float(len(COUNTED)),
        "left/variable": float("LEFT_BEHIND" in os.environ),
        "left/threads": float(len(left_threads())),
    }
    COUNTED.append(1)
    os.environ["LEFT_BEHIND"] = "yes"
    threading.Thread(target=time.sleep, args=(60,), name="left behind", daemon=True).start()
    rewards, metrics = fakes.score.function(batch)
    return rewards, {**metrics, **before}


def left_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "left behind"]


@pytest.mark.usefixtures("warm")
def test_nothing_that_a_job_leaves_in_its_processes_is_there_in_the_next_one() -> None:
    graph = fakes.vector_loop(1, middle=leaves_behind)
    first, _ = launched(graph)
    assert [step["left/counted"] for step in first] == [0.0, 1.0, 2.0]
    assert launched(graph)[0] == first


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def fails(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    raise ZeroDivisionError("on purpose")


def test_a_job_that_fails_or_is_killed_ends_its_workers_alone_and_the_next_one_runs(warm: Warm) -> None:
    graph = fakes.vector_loop(1)
    expected, _ = launched(graph)
    processes = warm.pids
    with pytest.raises(NodeError, match="on purpose"):
        launched(fakes.vector_loop(1, middle=fails))
    with rg.compile(graph, rg.Cluster(cpus=2)).launch() as job:
        pids = list(job.pids.values())
        next(iter(job.steps(1)))
        os.kill(job.pids["policy"], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="'policy'"):
            list(job.steps(5))
    assert not any(forked_workers.alive(pid) for pid in pids)
    assert warm.pids == processes
    assert launched(graph)[0] == expected


def test_a_killed_worker_is_replaced_and_the_steps_go_on(warm: Warm, tmp_path: Path) -> None:
    graph = fakes.vector_loop(1)
    expected, _ = launched(graph, 8)
    found = []
    with rg.compile(graph, rg.Cluster(cpus=2)).launch(checkpoint=tmp_path / "checkpoints", every=2, restarts=1) as job:
        for step in job.steps(8):
            found.append(clockless_metrics(step))
            if step.index == 4:
                os.kill(job.pids["generator"], signal.SIGKILL)
    assert found == expected


def test_a_template_that_died_is_started_again(warm: Warm) -> None:
    expected, parents = launched(fakes.vector_loop(1))
    for pid in parents:
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda pid=pid: not forked_workers.alive(pid))
    again, others = launched(fakes.vector_loop(1))
    assert again == expected
    assert not others & parents


@rg.node(reads="values group_ids", writes="rewards", by_group=True)
def says_where(batch: Columns) -> tuple[dict[str, Column], dict[str, float]]:
    rewards, _ = fakes.score.function(batch)
    print("the worker's own words", flush=True)
    return rewards, {"folder": float(len(os.getcwd())), "known": float("ASKED_FOR" in os.environ), "path": float(sys.path[0] == "first")}


def test_a_worker_has_the_folder_the_path_the_variables_and_the_output_of_its_launch(
    warm: Warm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    graph = fakes.vector_loop(1, middle=says_where)
    launched(graph)
    capfd.readouterr()
    before = warm.pids
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("first")
    (step, *_), parents = launched(graph)
    assert parents <= set(before)
    assert (step["folder"], step["known"], step["path"]) == (len(str(tmp_path)), 0.0, 1.0)
    assert "the worker's own words" in capfd.readouterr().out
    monkeypatch.setenv("ASKED_FOR", "1")
    (step, *_), parents = launched(graph)
    assert step["known"] == 1.0
    assert not parents & set(before)  # what is imported may read variables


def test_the_processes_that_are_kept_are_few(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_module, "MOST_TEMPLATES", 1)
    monkeypatch.setenv("ASKED_FOR", "another")
    before = warm.pids
    launched(fakes.vector_loop(1))
    assert len(warm.pids) == 1
    assert not any(forked_workers.alive(pid) for pid in set(before) - set(warm.pids))


@pytest.mark.usefixtures("warm")
def test_what_warm_processes_cannot_serve_is_refused_before_anything_starts() -> None:
    graph = fakes.vector_loop(1)
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    with pytest.raises(PlanError, match=r"launch\(dispatch='calls'\) inside of rg.runs.warm\(\)"):
        plan.launch(dispatch="calls")
    with pytest.raises(PlanError, match=r"a transport that needs Ray inside of rg.runs.warm\(\)"):
        plan.launch(transport="ray")
    with pytest.raises(PlanError, match=r"a plan of 2 hosts inside of rg.runs.warm\(\)"):
        rg.compile(graph, rg.Cluster(cpus=4, hosts=2)).launch()
    with pytest.raises(RlgraphError, match=r"rg.runs.warm\(\) inside of rg.runs.warm\(\)"), rg.runs.warm():
        pass


def program(folder: Path, steps: int, train_s: float) -> forked_programs.Program:
    return forked_programs.Program(str(PROGRAMS / "warm_program.py"), str(steps), str(train_s), cwd=folder)


def test_leaving_the_block_ends_its_processes_and_a_job_cannot_be_entered_later(tmp_path: Path) -> None:
    with program(tmp_path, steps=2, train_s=0.1) as running:
        said = running.end()
    has, last = said.stdout.splitlines()
    assert "cannot be started: the block of rg.runs.warm() has ended" in last, said.stderr
    pids = [int(pid) for pid in has.split()[1:]]
    assert len(pids) >= 5
    assert not any(map(forked_workers.alive, pids))


@pytest.mark.parametrize(("number", "train_s"), [(signal.SIGKILL, 60.0), (signal.SIGTERM, 0.1)])
def test_a_program_that_is_ended_leaves_no_process(number: int, train_s: float, tmp_path: Path) -> None:
    with program(tmp_path, steps=1000, train_s=train_s) as running:
        pids = [int(pid) for pid in running.stdout.readline().split()[1:]]
        assert len(pids) >= 5
        time.sleep(3.0)  # by then, on a busy machine too, the trainer is in the middle of a firing, which SIGTERM waits for
        os.kill(running.pid, number)
        assert wait_until(lambda: not any(map(forked_workers.alive, pids)))
