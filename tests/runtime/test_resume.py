"""A job on Ray goes on from its checkpoints as if it had never stopped, whoever is killed."""

import os
import signal
from pathlib import Path

import fakes
import pytest

from rlgraph.graph import Graph
from rlgraph.planning.cluster import Cluster
from rlgraph.planning.compile import compile_plan
from rlgraph.runtime.checkpoint import Recovery
from rlgraph.runtime.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_here")]

Bits = tuple[int, dict[str, float], int]


def job(graph: Graph, folder: Path, *, every: int = 3, restarts: int = 0, dispatch: str = "compiled_graph") -> Job:
    plan = compile_plan(graph, Cluster(cpus=2))
    return Job(graph, plan, dispatch_name=dispatch, deadline_s=60.0, recovery=Recovery(folder, every, 2, restarts))


def bits(step: Step) -> Bits:
    return step.index, {name: value for name, value in step.metrics.items() if not name.startswith("timing_s/")}, step.staleness


def oracle(graph: Graph, steps: int) -> list[Bits]:
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        return [bits(step) for step in here.steps(steps)]


@pytest.mark.parametrize(("depth", "buffers", "dispatch"), [(0, 1, "calls"), (1, 1, "compiled_graph"), (2, 2, "compiled_graph")])
def test_a_job_that_was_left_goes_on_where_it_was(depth: int, buffers: int, dispatch: str, tmp_path: Path) -> None:
    graph = fakes.vector_loop(depth, buffers=buffers)
    with job(graph, tmp_path, dispatch=dispatch) as first:
        found = [bits(step) for step in first.steps(4)]
    with job(graph, tmp_path, dispatch=dispatch) as second:
        found += [bits(step) for step in second.steps(10)]
    assert found == oracle(graph, 10)


@pytest.mark.parametrize("worker", ["generator", "policy"])
def test_a_killed_worker_is_replaced_and_the_steps_go_on(worker: str, tmp_path: Path) -> None:
    graph = fakes.vector_loop(1, generate_s=0.02, train_s=0.02)
    found = []
    with job(graph, tmp_path, restarts=1) as running:
        for step in running.steps(12):
            found.append(bits(step))
            if step.index in (4, 9):
                os.kill(running.pids[worker], signal.SIGKILL)
    assert found == oracle(graph, 12)
