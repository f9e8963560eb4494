"""A job goes on from its checkpoints as if it had never stopped, whoever is killed."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import fakes, forked_programs, forked_workers
from support.paths import PROGRAMS
from support.scripted_conversations import wait_until

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.nodes.base import Context, Fired, Stage
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver import session
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step

Bits = tuple[int, dict[str, float], int]


def job(graph: Graph, folder: Path, *, every: int = 3, restarts: int = 0, dispatch: str = "forked") -> Job:
    plan = compile_plan(graph, Cluster(cpus=2))
    return Job(graph, plan, dispatch_name=dispatch, deadline_s=60.0, recovery=Recovery(folder, every, 2, restarts))


def bits(step: Step) -> Bits:
    return step.index, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}, step.staleness


def oracle(graph: Graph, steps: int) -> list[Bits]:
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        return [bits(step) for step in here.steps(steps)]


@pytest.mark.parametrize(("depth", "buffers"), [(0, 1), (1, 1), (2, 2)])
def test_a_job_that_was_left_goes_on_where_it_was(depth: int, buffers: int, tmp_path: Path) -> None:
    graph = fakes.vector_loop(depth, buffers=buffers)
    with job(graph, tmp_path) as first:
        found = [bits(step) for step in first.steps(4)]
    with job(graph, tmp_path) as second:
        found += [bits(step) for step in second.steps(10)]
    assert found == oracle(graph, 10)


def test_a_loop_that_is_left_early_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    graph, found = fakes.vector_loop(1), []
    with job(graph, tmp_path) as first:
        for step in first.steps(1000):
            found.append(bits(step))
            if step.index % 3 == 1 and any(tmp_path.glob("step-*")):
                break  # steps that nobody has seen are at work: there is no point to save the run at
    newest = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    assert 0 < newest < len(found)
    with job(graph, tmp_path) as second:
        again = [bits(step) for step in second.steps(len(found) + 2)]
    assert found[:newest] + again == oracle(graph, len(found) + 2)


def test_a_loop_left_at_a_checkpoint_has_it_though_later_steps_are_at_work(tmp_path: Path) -> None:
    with job(fakes.vector_loop(1), tmp_path) as left:
        for step in left.steps(1000):
            if step.index == 2:
                break
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


class SlowDisk(fakes.Vector):
    """Writes a checkpoint for as long as an idle worker has to end."""

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        write = super().save(folder, deadline_s)
        return lambda: (time.sleep(0.5), write())[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class SlowlySaved(fakes.VectorPolicy):
    def load(self, context: object) -> SlowDisk:
        return SlowDisk()


def test_a_loop_left_while_a_checkpoint_is_written_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "VectorPolicy", SlowlySaved)
    monkeypatch.setattr(session, "GOODBYE_S", 0.01)
    with job(fakes.vector_loop(1), tmp_path) as left:
        for step in left.steps(1000):
            if step.index == 3:
                break
        assert not any(tmp_path.glob("step-*"))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_signal_lets_depth_plus_two_steps_finish_and_saves_them(depth: int, tmp_path: Path) -> None:
    given = []

    def run() -> None:
        with job(fakes.vector_loop(depth), tmp_path, every=100) as running:
            for step in running.steps(50):
                given.append(step.index)
                if step.index == 5:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 128 + signal.SIGTERM
    assert given == list(range(len(given)))
    assert 6 <= len(given) <= 6 + depth + 2
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{len(given):08d}"]


@pytest.mark.usefixtures("ray_unless_forked")
@pytest.mark.parametrize(
    ("worker", "dispatch"),
    [
        ("generator", "forked"),
        pytest.param("policy", "compiled_graph", marks=pytest.mark.ray),
        pytest.param("policy", "calls", marks=[pytest.mark.ray, pytest.mark.stage("jobs")]),
    ],
)
def test_a_killed_worker_is_replaced_and_the_steps_go_on(worker: str, dispatch: str, tmp_path: Path) -> None:
    graph = fakes.vector_loop(2, buffers=2, generate_s=0.02, train_s=0.02)
    found, pids = [], set[int]()
    with job(graph, tmp_path, restarts=1, dispatch=dispatch) as running:
        nice = {os.getpriority(os.PRIO_PROCESS, pid) for pid in running.pids.values()}
        for step in running.steps(12):
            found.append(bits(step))
            pids |= set(running.pids.values())
            if step.index in ((4, 9) if dispatch == "forked" else (4,)):
                os.kill(running.pids[worker], signal.SIGKILL)
        folder = running.session.folder
    assert found == oracle(graph, 12)
    assert nice == {os.getpriority(os.PRIO_PROCESS, 0)}  # else any other process of the machine would starve the workers
    assert forked_workers.traces(folder, pids) == []


@dataclass(frozen=True)
class Deadly(Operation):
    """A reward that kills its own process whenever a certain item is in the batch."""

    item: str

    def start(self, context: Context) -> Stage:
        def fire(step: int, columns: Columns) -> Fired:
            if self.item in columns["prompt_texts"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"rewards": torch.ones(len(columns["values"]))}

        return fire


def test_a_prompt_that_kills_its_worker_twice_is_set_aside_and_the_others_keep_their_order(tmp_path: Path) -> None:
    source: Any = fakes.vector_loop(1).node("prompts").operation
    position = 9  # in step 2

    def deadly(rollout: Output) -> Output:
        reads = ("values", "prompt_texts")
        return Output(
            declare("deadly", Deadly(source.item(position)["prompt"]), (rollout, rollout.node.inputs[0]), reads=reads, writes=("rewards",))
        )

    with job(fakes.vector_loop(1, middle=deadly), tmp_path, restarts=3) as running:
        steps = [step.index for step in running.steps(5)]
        assert tuple(running.set_aside) == (position,)
    assert steps == list(range(5))
    assert source.positions(2, (position,)) == [8, 10, 11, 12]


DRIVER = PROGRAMS / "killed_driver.py"


def start(folder: Path, *more: str) -> forked_programs.Program:
    return forked_programs.Program(str(DRIVER), str(folder), "1000", *more, cwd=folder)


def until(driver: forked_programs.Program, step: int) -> None:
    """Read what a program says until it has done a step."""
    for line in driver.stdout:
        what, *numbers = line.split()
        if what == "did" and int(numbers[0]) >= step:
            return
    raise AssertionError(driver.end().stderr)


def recorded(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.stage("kills")
@pytest.mark.ray
def test_a_killed_program_goes_on_and_a_terminated_one_saves_what_it_did(tmp_path: Path) -> None:
    with start(tmp_path) as killed:
        until(killed, done := 6)
        while not saved(tmp_path):  # it is written beside the steps, and a busy disk takes its time
            done += 1
            until(killed, done)
        family = {killed.pid, *(child.pid for child in psutil.Process(killed.pid).children(recursive=True))}
        os.kill(killed.pid, signal.SIGKILL)
        killed.end()
    wait_until(lambda: forked_workers.traces(tmp_path / "none", family) == [], 20.0)  # Ray's processes and semaphores are gone too
    last = saved(tmp_path)[-1]

    with start(tmp_path, "forked") as terminated:
        until(terminated, 9)
        os.kill(terminated.pid, signal.SIGTERM)
        ended = terminated.end()
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert f"resuming from the checkpoint after {last} steps" in ended.stderr
    assert "finishing the steps in flight" in ended.stderr
    done = len(recorded(tmp_path))
    assert (tmp_path / "checkpoints" / f"step-{done:08d}").is_dir()

    graph = fakes.vector_loop(1, generate_s=0.05, train_s=0.05)  # that of the program
    with job(graph, tmp_path / "checkpoints") as finishing:
        assert finishing.finished_steps == done
        list(rg.record(finishing, done + 3, tmp_path))
    assert recorded(tmp_path) == list(range(done + 3))
    assert not list((tmp_path / "checkpoints").glob(".part-*"))
