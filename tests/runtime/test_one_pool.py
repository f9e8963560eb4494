"""One pool for rollout and update: with a depth the next rollout comes before the update, so that a reward on the host hides behind it."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import fakes, forked_workers  # noqa: F401 (the dispatch of that name)
from support.simulated_stages import Loop

import rlgraph as rg
from rlgraph.columns import Columns
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step

Bits = tuple[int, dict[str, float], int]


@dataclass(frozen=True)
class Begun:
    """Leaves a file when a rollout begins."""

    folder: Path

    def __call__(self, step: int) -> None:
        (self.folder / f"begun {step}").touch()


def scored_once_the_next_has_begun(folder: Path) -> Any:
    @rg.node(reads="values group_ids", writes="rewards", by_group=True)
    def patient(batch: Columns) -> Any:
        step = len(list(folder.glob("scored *")))
        until_s = time.monotonic() + 60
        while not (folder / f"begun {step + 1}").exists():
            assert time.monotonic() < until_s, f"rollout {step + 1} waits for the reward of batch {step}"
            time.sleep(0.005)
        (folder / f"scored {step}").touch()
        return fakes.score.function(batch)

    return patient


def one_pool(depth: int, **changed: Any) -> rg.Graph:
    pool = rg.Pool("shared")
    return fakes.vector_loop(depth, pools=(pool, pool), **changed)


def job(graph: rg.Graph, folder: Path | None = None, *, restarts: int = 0) -> Job:
    recovery = Recovery(folder, 3, 2, restarts) if folder is not None else None
    return Job(graph, compile_plan(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=30.0, recovery=recovery)


def bits(step: Step) -> Bits:
    return step.index, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}, step.staleness


def here(graph: rg.Graph, steps: int) -> list[Bits]:
    with LocalJob(graph, compile_plan(graph, rg.Cluster(cpus=2))) as running:
        return [bits(step) for step in running.steps(steps)]


@pytest.mark.parametrize(("depth", "buffers"), [(1, 2), (3, 1)])
def test_one_pool_gives_the_bits_of_two_pools_and_of_one_process_at_the_same_depth(depth: int, buffers: int) -> None:
    graph = one_pool(depth, buffers=buffers)
    with job(graph) as running:
        found = [bits(step) for step in running.steps(5)]
        found += [bits(step) for step in running.steps(3)]
    assert found == here(graph, 8) == here(fakes.vector_loop(depth, buffers=buffers), 8)
    assert [staleness for _, _, staleness in found] == [min(step, depth) for step in range(8)]


def test_a_rollout_decodes_while_the_reward_of_the_batch_before_is_at_work_and_never_beside_an_update(tmp_path: Path) -> None:
    graph = one_pool(1, train_s=0.02, middle=scored_once_the_next_has_begun(tmp_path), begun=Begun(tmp_path))
    with job(graph) as running:
        assert len(list(running.steps(5))) == 5
        spans = running.spans()
    at = {(span.name, span.step): span for span in spans if span.kind == "fire"}
    for step in range(4):
        assert at["rollout", step + 1].end_s <= at["update", step].start_s
        assert step == 3 or at["update", step].end_s <= at["rollout", step + 2].start_s


@pytest.mark.parametrize(("depth", "stop"), [(1, 3), (3, 4)])
def test_a_job_in_one_pool_goes_on_from_its_checkpoint(depth: int, stop: int, tmp_path: Path) -> None:
    graph = one_pool(depth)
    found = []
    for steps in (stop, 9):
        with job(graph, tmp_path) as running:
            found += [bits(step) for step in running.steps(steps)]
    assert found == here(graph, 9)


def test_workers_of_one_pool_that_are_killed_are_replaced(tmp_path: Path) -> None:
    graph = one_pool(1, generate_s=0.02, train_s=0.02)
    found, killed = [], {4: "generator", 8: "policy"}
    with job(graph, tmp_path, restarts=2) as running:
        for step in running.steps(12):
            found.append(bits(step))
            if step.index in killed:
                os.kill(running.pids[killed[step.index]], signal.SIGKILL)
    assert found == here(graph, 12)


@pytest.mark.parametrize(
    "loop", [Loop(depth=1, reference="train"), Loop(depth=2, shared=True, reference="train")], ids=["apart", "one pool"]
)
def test_turns_are_taken_up_again_after_a_checkpoint_where_a_reference_is_ahead_of_the_trainer(loop: Loop, tmp_path: Path) -> None:
    for steps in (4, 8):
        with job(loop.graph(), tmp_path) as running:
            assert [step.staleness for step in running.steps(steps)][-1] == loop.depth
