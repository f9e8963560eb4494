"""A job over two Ray nodes of this machine: placed, equal to the oracle, stopped by the loss of a node, and started again, by
the user or by itself."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from support import fakes

from rlgraph.errors import PlanError, WorkerDied
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.ray_cluster import awaited_hosts
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step

STORE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def job(recovery: Recovery | None = None) -> Job:
    graph = fakes.vector_loop(1)
    return Job(graph, compile_plan(graph, Cluster(cpus=4, hosts=2)), dispatch_name=sys.argv[1], deadline_s=60, recovery=recovery)


def losses(running: Job | LocalJob) -> list[float]:
    return [step.metrics["loss"] for step in running.steps(5)]


def bits(step: Step) -> tuple[int, float, int]:
    return step.index, step.metrics["loss"], step.staleness


def goes_on_by_itself(cluster: RayCluster, other: object, folder: str) -> None:
    """A new job runs on what is there now. Its host is lost and another comes: it waits for it, and repeats what it would have been."""
    graph = fakes.vector_loop(1)
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        expected = [bits(step) for step in here.steps(60)]
    with contextlib.ExitStack() as hosts, job(Recovery(Path(folder), every=4, keep=2, restarts=1)) as running:
        steps = running.steps(60)  # many more than are under way when the host is lost
        found = [bits(next(steps)) for _ in range(6)]
        cluster.remove_node(other, allow_graceful=False)
        os.kill(running.pids["policy"], signal.SIGKILL)  # a host takes its processes along, a killed raylet leaves them for a while
        hosts.enter_context(late_host(cluster))
        found += [bits(step) for step in steps]
        assert running._restarts.used == 1
    assert found == expected, (found, expected)
    print("the job waited for another host")


@contextlib.contextmanager
def late_host(cluster: RayCluster) -> Iterator[None]:
    """A Ray node that joins in a while, when the job has found out that it lacks one."""
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block", "--num-cpus=1"]
    limited = [*ray_start, f"--object-store-memory={STORE['object_store_memory']}"]
    node = subprocess.Popen(["sh", "-c", 'sleep 5; exec "$@"', "sh", *limited], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(node.pid, signal.SIGKILL)  # asked politely, it drains for half a minute
        node.wait(60)


def node_of(actor: object) -> str:
    described = ray._private.state.actors(actor._actor_id.hex())  # type: ignore[attr-defined]
    found: str = described["Address"]["NodeID"]
    return found


def alive() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # not Ray's own: other jobs find a Ray by what lies there
        os.environ["RAY_TMPDIR"] = folder
        cluster = RayCluster(initialize_head=True, head_node_args={**STORE, "include_dashboard": False})
        try:
            run(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
    print("all as it should be")


def run(cluster: RayCluster) -> None:
    other = cluster.add_node(**STORE)
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    graph = fakes.vector_loop(1)
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        expected = losses(here)

    with job() as running:
        assert losses(running) == expected
        nodes = {worker.name: node_of(actor) for worker, actor in zip(running.plan.workers, running.session._actors, strict=True)}
        mine = ray.get_runtime_context().get_node_id()
        assert nodes == {"prompts": mine, "generator": mine, "score": mine, "policy": other.node_id}, nodes
        cluster.remove_node(other, allow_graceful=False)
        with pytest.raises(WorkerDied, match=r"worker 'policy' .* on host 1 \(|host 1 \(.*\) was lost, with worker 'policy'"):
            list(running.steps(100_000))
    print("the lost host was named")
    end = time.monotonic() + 60
    while alive() == 2 and time.monotonic() < end:  # Ray's own word comes later than ours, and there is nothing to wait on
        time.sleep(0.5)

    with pytest.raises(PlanError, match="the plan takes 2 hosts, Ray has 1"), job():
        pass
    with pytest.raises(PlanError, match=r"the plan takes 2 hosts, Ray has 1: .*; waited 1.5 s"):
        awaited_hosts(running.plan, 1.5)

    with tempfile.TemporaryDirectory() as folder:
        goes_on_by_itself(cluster, cluster.add_node(**STORE), folder)


if __name__ == "__main__":
    main()
