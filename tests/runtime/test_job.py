"""A job gives the bits of the oracle; whatever fails is named, and nothing is left behind.

Workers are forked: on Ray, by both ways of dispatch, a job of `test_resume.py` does the same, and one of `test_ray_channels.py` fails.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from support import fakes, forked_workers
from support.forked_workers import alive
from support.paths import TESTS

from rlgraph.columns import Column, Columns
from rlgraph.errors import DispatchError, NodeError, RlgraphError, WorkerDied
from rlgraph.graph.graph import Graph
from rlgraph.nodes.base import node
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step
from rlgraph.values.pool import Pool


def job(graph: Graph, dispatch: str = "compiled_graph", deadline_s: float = 60.0) -> Job:
    return Job(graph, compile_plan(graph, Cluster(cpus=2)), dispatch_name=dispatch, deadline_s=deadline_s)


def bits(step: Step) -> tuple[int, float, float, int]:
    return step.index, step.metrics["loss"], step.metrics["weight"], step.staleness


def oracle(graph: Graph, steps: int) -> list[tuple[int, float, float, int]]:
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        return [bits(step) for step in here.steps(steps)]


def test_a_launch_without_a_temporary_folder_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(DispatchError, match=r"the job's folder cannot be written \(.*'/proc/none/.*set TMPDIR"):
        job(fakes.vector_loop(1), "forked").__enter__()


@pytest.mark.parametrize(
    ("dispatch", "depth", "buffers"), [("forked", 0, 1), ("forked", 2, 2), pytest.param("processes", 1, 1, marks=pytest.mark.stage("jobs"))]
)
def test_a_run_equals_the_oracle_bit_for_bit(dispatch: str, depth: int, buffers: int) -> None:
    graph = fakes.vector_loop(depth, buffers=buffers)
    with job(graph, dispatch) as running:
        held = running.session.shards("policy")
        running.recorder.request_samples(1.0)
        found, recorded = [], []
        for step in running.steps(4):
            found.append(bits(step))
            recorded.append(len(running.recorder.sampled_rows(step.index)) > 0)
        found += [bits(step) for step in running.steps(3)]
    assert found == oracle(graph, 7)
    assert [shards.step for shards in held] == [0], "workers answer before the first step, as an export there needs"
    assert recorded == [True] * 4, "what is asked for before the first step holds for it"

    assert [staleness for *_, staleness in found] == [min(step, depth) for step in range(7)]


def test_generator_ranks_change_nothing_in_the_batch() -> None:
    with forked_workers.job(fakes.vector_loop(1, ranks=2)) as running:
        found = [bits(step) for step in running.steps(4)]
    assert found == oracle(fakes.vector_loop(1), 4)


def test_latest_weights_keep_the_bound() -> None:
    with forked_workers.job(fakes.vector_loop(2, latest=True, generate_s=0.02)) as running:
        assert all(step.staleness <= min(step.index, 2) for step in running.steps(10))


def test_one_pool_never_runs_two_nodes_at_a_time() -> None:
    pool = Pool("shared")
    with forked_workers.job(fakes.vector_loop(0, pools=(pool, pool), generate_s=0.02, train_s=0.02)) as running:
        list(running.steps(4))
        busy = sorted((s.start_s, s.end_s) for s in running.spans() if s.name in ("rollout", "update") and s.kind == "fire")
    assert len(busy) == 8
    assert all(end <= start for (_, end), (start, _) in pairwise(busy))


@pytest.mark.stage("kills")
@pytest.mark.parametrize("worker", ["prompts", "policy"])
def test_a_killed_worker_is_named_and_its_peers_end(worker: str) -> None:
    with job(fakes.vector_loop(1, generate_s=0.05, train_s=0.05), "forked") as running:
        steps = running.steps(1000)
        next(steps)
        killed = time.monotonic()
        os.kill(running.pids[worker], signal.SIGKILL)
        with pytest.raises(WorkerDied, match=f"worker '{worker}'"):
            for _ in steps:
                pass
        raised = time.monotonic()
        pids = running.pids.values()
    assert raised - killed < 30  # a deadline is 60
    assert not any(alive(pid) for pid in pids)


@node(reads="values group_ids", writes="rewards")
def failing(batch: Columns) -> dict[str, Column]:
    if (batch["group_ids"] > 10).any():
        raise ValueError("no reward for item 11")
    return fakes.score.function(batch)


def test_a_node_that_raises_is_named_with_step_and_traceback() -> None:
    with forked_workers.job(fakes.vector_loop(1, middle=failing)) as running:
        with pytest.raises(
            NodeError, match="node 'failing' failed at step 2 in worker 'failing': ValueError: no reward for item 11"
        ) as raised:
            list(running.steps(10))
        assert 'raise ValueError("no reward for item 11")' in str(raised.value)
        folder = running.session.folder
        with pytest.raises(RlgraphError, match="closed"):
            next(running.steps(1))
    assert not Path(folder).exists()


@dataclass(frozen=True, eq=False, kw_only=True)
class Unloadable(fakes.VectorGenerator):
    def load(self, context: object) -> object:
        raise MemoryError("no room for the weights")


def test_an_engine_that_cannot_be_loaded_is_named_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "VectorGenerator", Unloadable)
    message = "failed before the first step in worker 'generator': MemoryError: no room"
    with pytest.raises(NodeError, match=message), forked_workers.job(fakes.vector_loop(1)):
        raise AssertionError("the job must not start")


def test_a_fork_of_the_program_takes_no_steps_keeps_no_signal_and_ends_nothing_of_the_job() -> None:
    graph = fakes.vector_loop(1)
    with job(graph, "forked") as running:
        steps = running.steps(4)
        found = [bits(next(steps))]
        pid = os.fork()
        if not pid:
            try:
                with running:  # as a child that leaves the block does
                    pass
            except RlgraphError:
                running.__exit__(None, None, None)
            try:
                running.session.check_runs()
            except RlgraphError as error:
                os._exit(7 if "this is a fork of it" in str(error) and _ends_by(signal.SIGTERM) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        found += [bits(step) for step in steps]
    assert found == oracle(graph, 4)


def _ends_by(number: int) -> bool:
    try:
        signal.raise_signal(number)
    except SystemExit as ends:
        return ends.code == 128 + number
    return False


def test_a_job_is_entered_once_and_its_steps_are_taken_inside() -> None:
    waiting = forked_workers.job(fakes.vector_loop(0))
    with pytest.raises(RlgraphError, match="has not been started: run its steps inside"):
        next(waiting.steps(1))
    running = forked_workers.job(fakes.vector_loop(0))
    with running:
        with pytest.raises(RlgraphError, match="already running"), running:
            raise AssertionError("it must not be entered again")
        assert [step.index for step in running.steps(2)] == [0, 1]
    with pytest.raises(RlgraphError, match="closed; launch the plan again"), running:
        raise AssertionError("it must not be entered again")


@pytest.mark.parametrize("where", ["forked", "here"])
def test_a_notebook_takes_the_steps_of_a_job_in_several_cells_and_leaves_loops_early(where: str) -> None:
    """A loop that is left early, as by an interrupt, asked for all of its steps: the next loop gave those that were left of it, too."""
    graph = fakes.vector_loop(1)
    running = LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) if where == "here" else forked_workers.job(graph)
    with pytest.raises(RlgraphError, match=r"job\.start\(\)"):
        next(running.steps(1))
    running.start()
    try:
        kept = running.steps(3)  # a generator that goes on later
        assert next(kept).index == 0
        for step in running.steps(50):
            if step.index == 4:
                break
        with contextlib.suppress(KeyboardInterrupt):
            for _ in running.steps(50):
                raise KeyboardInterrupt
        assert [step.index for step in kept] == []
        found = [bits(step) for step in running.steps(2)]
    finally:
        running.close()
    assert found == oracle(graph, 8)[6:]
    running.close()
    with pytest.raises(RlgraphError, match=r"closed|not running"):
        next(running.steps(1))


STOPPED_RAYLET = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from support import fakes
from rlgraph.api import compile
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.driver import ray_cluster, worker_group
from rlgraph.runtime.driver import ray_dispatch as dispatch

dispatch.RAY_S = ray_cluster.RAY_S = 4
worker_group.START_LEAST_S = 0.0
ray_cluster.start_ray()
[raylet] = [p for p in dispatch.ray._private.worker._global_node.all_processes["raylet"]]
os.kill(raylet.process.pid, signal.SIGSTOP)
since = time.monotonic()
try:
    with compile(fakes.vector_loop(1), Cluster(cpus=2)).launch(deadline_s=3):
        pass
except Exception as error:
    print("raised", type(error).__name__, str(error).splitlines()[0])
print("took", time.monotonic() - since, flush=True)
os.kill(raylet.process.pid, signal.SIGKILL)
dispatch.ray.shutdown()
"""


@pytest.mark.stage("kills")
@pytest.mark.ray
def test_a_start_keeps_its_deadline_though_ray_makes_no_actor() -> None:
    script = STOPPED_RAYLET.format(tests=str(TESTS))
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, check=False)
    assert re.search(r"raised (ChannelTimeout|WorkerDied) .*(workers \[|no actor)", run.stdout), run.stdout + run.stderr
    assert float(re.search(r"took ([\d.]+)", run.stdout)[1]) < 170  # type: ignore[index]


@node(reads="values group_ids", writes="rewards")
def overwriting(batch: Columns) -> dict[str, Column]:
    batch["values"].zero_()  # type: ignore[union-attr]
    return fakes.score.function(batch)


def test_a_node_that_changes_what_its_peers_read_is_named() -> None:
    stopped = pytest.raises(NodeError, match="node 'overwriting' failed at step 0")
    with forked_workers.job(fakes.vector_loop(1, middle=overwriting)) as running, stopped:
        list(running.steps(3))


@node(reads="values group_ids", writes="rewards")
def nameless(batch: Columns) -> dict[str, Column]:
    return {"reward": batch["values"].mean(-1)}


def test_a_node_that_writes_other_columns_than_declared_is_refused() -> None:
    with (
        forked_workers.job(fakes.vector_loop(0, middle=nameless)) as running,
        pytest.raises(NodeError, match=r"returned columns \['reward'\]; it declares \['rewards'\]"),
    ):
        list(running.steps(1))
