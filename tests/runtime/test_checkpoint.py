"""Checkpoints: a run that goes on from one repeats the run that was never stopped, and what is no whole checkpoint is refused."""

from pathlib import Path

import fakes
import pytest

from rlgraph.graph import Graph
from rlgraph.planning.cluster import Cluster
from rlgraph.planning.compile import compile_plan
from rlgraph.runtime.checkpoint import Checkpoints, Recovery
from rlgraph.runtime.local import LocalJob

Bits = tuple[int, dict[str, float], int]


def job(graph: Graph, folder: Path | None, every: int = 3, **options: object) -> LocalJob:
    plan = compile_plan(graph, Cluster(cpus=2))
    recovery = Recovery(folder, every, **{"keep": 2, **options}) if folder else None  # type: ignore[arg-type]
    return LocalJob(graph, plan, Checkpoints(graph, plan, recovery) if recovery else None)


def run(graph: Graph, folder: Path | None, steps: int, every: int = 3, **options: object) -> list[Bits]:
    with job(graph, folder, every, **options) as running:
        return [bits(step) for step in running.steps(steps)]


def bits(step: object) -> Bits:
    return step.index, {k: v for k, v in step.metrics.items() if not k.startswith("timing_s/")}, step.staleness  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("stop", [1, 3, 4, 7])
def test_a_resumed_run_repeats_the_run_that_was_never_stopped(depth: int, stop: int, tmp_path: Path) -> None:
    whole = run(fakes.vector_loop(depth), None, 10)
    first = run(fakes.vector_loop(depth), tmp_path, stop)
    assert first + run(fakes.vector_loop(depth), tmp_path, 10) == whole
    assert [staleness for *_, staleness in whole] == [min(step, depth) for step in range(10)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_may_be_resumed_at_every_step(depth: int, tmp_path: Path) -> None:
    found = [bit for stop in range(1, 9) for bit in run(fakes.vector_loop(depth), tmp_path, stop)]
    assert found == run(fakes.vector_loop(depth), None, 8)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_run_whose_process_died_goes_on_from_the_last_whole_checkpoint(depth: int, tmp_path: Path) -> None:
    whole = run(fakes.vector_loop(depth), None, 10)
    died = job(fakes.vector_loop(depth), tmp_path)
    died.__enter__()
    assert [bits(step) for step in died.steps(8)] == whole[:8]
    died.checkpoints.close()  # type: ignore[union-attr]
    assert run(fakes.vector_loop(depth), tmp_path, 10) == whole[6:]
