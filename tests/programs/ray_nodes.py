"""Jobs over Ray nodes of this machine. A job is placed, equal to the oracle, and stopped by the loss of a node; another goes on by itself.
Ray counts GPUs that are not there, and nobody computes on them."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from support import fakes

from rlgraph.errors import PlanError, WorkerDied
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.plan import Plan, Replan
from rlgraph.plan.replan import Replanner
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver import ray_cluster, ray_dispatch
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.ray_cluster import awaited_hosts, ray_hosts
from rlgraph.runtime.driver.ray_dispatch import Reservation
from rlgraph.runtime.local import LocalJob
from rlgraph.runtime.measure import Step
from rlgraph.values.pool import Pool

Bits = tuple[int, float, int]
PREEMPTED = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
STORE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def job(dispatch: str, recovery: Recovery | None = None, replanner: Replanner | None = None) -> Job:
    graph = fakes.vector_loop(1)
    plan = compile_plan(graph, Cluster(cpus=4, hosts=2))
    return Job(graph, plan, dispatch_name=dispatch, deadline_s=60, recovery=recovery, replanner=replanner)


def bits(step: Step) -> Bits:
    return step.index, step.metrics["loss"], step.staleness


def node_of(actor: object) -> str:
    described = ray._private.state.actors(actor._actor_id.hex())  # type: ignore[attr-defined]
    found: str = described["Address"]["NodeID"]
    return found


def gpus() -> dict[str, int]:
    """The GPUs of each living node."""
    return {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:  # not Ray's own: other jobs find a Ray by what lies there
        os.environ |= {"RAY_TMPDIR": folder, "RAY_health_check_period_ms": "500"}  # it tells of a lost node after five of them
        cluster = RayCluster(initialize_head=True, head_node_args={**STORE, "include_dashboard": False, "num_gpus": 0})
        try:
            with contextlib.ExitStack() as hosts:
                run(cluster, hosts, Path(folder) / "checkpoints")
        finally:
            ray.shutdown()
            cluster.shutdown()
    print("all as it should be")


def run(cluster: RayCluster, hosts: contextlib.ExitStack, folder: Path) -> None:
    other = cluster.add_node(**STORE)
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    graph = fakes.vector_loop(1)
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        expected = [bits(step) for step in here.steps(60)]
    names_a_lost_host(cluster, other, expected[:5])
    goes_on_with_what_is_left(cluster, expected, folder / "left")
    goes_on_by_itself(cluster, hosts, expected, folder / "back")
    share_gpus(cluster)
    wait_for_gpus(cluster)


def names_a_lost_host(cluster: RayCluster, other: object, expected: list[Bits]) -> None:
    """A job runs on the nodes of its plan until one is lost; no other job starts on what is left."""
    with job("compiled_graph") as running:
        assert [bits(step) for step in running.steps(len(expected))] == expected
        nodes = {worker.name: node_of(actor) for worker, actor in zip(running.plan.workers, running.session._actors, strict=True)}
        mine = ray.get_runtime_context().get_node_id()
        assert nodes == {"prompts": mine, "generator": mine, "score": mine, "policy": other.node_id}, nodes  # type: ignore[attr-defined]
        cluster.remove_node(other, allow_graceful=False)
        with pytest.raises(WorkerDied, match=r"worker 'policy' .* on host 1 \(|host 1 \(.*\) was lost, with worker 'policy'"):
            list(running.steps(100_000))
    end = time.monotonic() + 60
    while len(gpus()) == 2 and time.monotonic() < end:  # Ray's own word comes later than ours, and there is nothing to wait on
        time.sleep(0.5)
    with pytest.raises(PlanError, match="the plan needs 2 hosts, Ray has 1"), job("compiled_graph"):
        pass
    with pytest.raises(PlanError, match=r"the plan needs 2 hosts, Ray has 1: .*; waited 1.5 s"):
        awaited_hosts(running.plan, 1.5)
    print("the lost host was named")


@contextlib.contextmanager
def late_host(cluster: RayCluster) -> Iterator[None]:
    """A Ray node with two GPUs that joins in a while, when the job has found out that it lacks one."""
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--block", "--num-cpus=1"]
    limited = [*ray_start, f"--object-store-memory={STORE['object_store_memory']}", "--num-gpus=2"]
    node = subprocess.Popen(["sh", "-c", 'sleep 5; exec "$@"', "sh", *limited], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(node.pid, signal.SIGKILL)  # asked politely, it drains for half a minute
        node.wait(60)


def goes_on_by_itself(cluster: RayCluster, hosts: contextlib.ExitStack, expected: list[Bits], folder: Path) -> None:
    """A new job runs on what is there now. Its host is lost and another comes: it waits for it, and repeats what it would have been.

    By calls: a Compiled Graph that ends while both hosts live may take a raylet along, with the node that the next ones need.
    """
    other = cluster.add_node(**STORE)
    with job("calls", Recovery(folder, every=4, keep=2, restarts=1)) as running:
        steps = running.steps(len(expected))  # many more than are under way when the host is lost
        found = [bits(next(steps)) for _ in range(6)]
        cluster.remove_node(other, allow_graceful=False)
        os.kill(running.pids["policy"], signal.SIGKILL)  # a host takes its processes along, a killed raylet leaves them for a while
        hosts.enter_context(late_host(cluster))
        found += [bits(step) for step in steps]
        assert running._restarts.used == 1
    assert found == expected, (found, expected)
    print("the job waited for another host")


def goes_on_with_what_is_left(cluster: RayCluster, expected: list[Bits], folder: Path) -> None:
    """A job that may change its plan goes on without its lost host, and without one that is announced to end."""
    other, shared = cluster.add_node(**STORE), Pool("shared")
    looks = Replanner(Replan(every=1000, graphs=(fakes.vector_loop(1, pools=(shared, shared)),)), lambda graph: {})
    with job("calls", Recovery(folder, every=4, keep=2, restarts=1), looks) as running:
        steps = running.steps(len(expected))
        found = [bits(next(steps)) for _ in range(6)]
        cluster.remove_node(other, allow_graceful=False)
        os.kill(running.pids["policy"], signal.SIGKILL)
        found += [bits(step) for step in steps]
        assert (running.plan.cluster.hosts, running._restarts.used) == (1, 1)
    assert found == expected, (found, expected)
    other = cluster.add_node(**STORE)
    with job("calls", Recovery(folder / "drained", every=1000, keep=2), looks) as running:
        found = []
        for step in running.steps(len(expected)):
            found.append(bits(step))
            if step.index == 5:
                told = "about to be taken back", int(1000 * time.time()) + 60_000
                assert ray._raylet.GcsClient(address=cluster.address).drain_node(other.node_id, PREEMPTED, *told)[0]
        assert running.plan.cluster.hosts == 1
    assert found == expected, (found, expected)
    cluster.remove_node(other, allow_graceful=False)
    print("the job went on with one host")


def share_gpus(cluster: RayCluster) -> None:
    """Of three nodes the driver's has no GPUs, and no GPU is two jobs' or a job's and a user's."""
    here = ray.get_runtime_context().get_node_id()
    large = cluster.add_node(**STORE, num_gpus=4).node_id
    [small] = [node for node, count in gpus().items() if count == 2]
    pools = Pool("rollout", gpus=4), Pool("train", gpus=2)
    plan = compile_plan(fakes.vector_loop(1, pools=pools), Cluster(gpus=6, gpus_per_node=4, cpus=8))
    found = ray_hosts(plan)
    assert [node for node, _ in found.hosts] == [large, small, here], found
    assert found.driver == 2

    first = Reservation(plan, found.hosts[:2])
    assert {node: sorted(gpus) for node, gpus in first.gpus.items()} == {large: ["0", "1", "2", "3"], small: ["0", "1"]}, first.gpus
    refused(plan, found.hosts[:2], r"the plan needs GPUs that other jobs hold: 4 of .*; 0 are free in all of Ray")
    first.free()

    held = ray.remote(Held).options(num_cpus=0, num_gpus=1).remote()  # a user's own work
    ray.get(held.ready.remote(), timeout=60)
    refused(plan, found.hosts[:2], "5 are free in all of Ray")
    ray.kill(held)
    Reservation(plan, found.hosts[:2]).free()

    larger = replace(plan.cluster, gpus_per_node=8)
    with pytest.raises(PlanError, match="the plan needs 6 GPUs on its host 0; Ray's hosts have"):
        ray_hosts(compile_plan(fakes.vector_loop(1, pools=pools), replace(larger, hosts=2)))


def refused(plan: Plan, hosts: Sequence[tuple[str, str]], said: str) -> None:
    """Reserve what others hold, with less patience than a job has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_dispatch, "RESERVE_S", 2.0)
        with pytest.raises(PlanError, match=said):
            Reservation(plan, hosts)


def wait_for_gpus(cluster: RayCluster) -> None:
    """A plan takes one host more than there are; it comes after a while."""
    pools = Pool("rollout", gpus=4), Pool("train", gpus=4)
    plan = compile_plan(fakes.vector_loop(1, pools=pools), Cluster(gpus=8, gpus_per_node=4, cpus=8))
    told: list[str] = []
    asked: list[list[dict[str, int]]] = []
    ray_cluster.request_resources = lambda bundles: asked.append(bundles)
    ray_cluster.TOLD_S = 2.0
    ray_cluster.log.warning = lambda text, *words: told.append(text % words)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="no host with that many is left; waited 3 s"):
        awaited_hosts(plan, 3.0)
    assert told[0].endswith("s of 3 s: the plan takes hosts with [4, 4] GPUs, Ray has hosts with [4, 2, 0]"), told
    assert asked == [[{"GPU": 4}, {"GPU": 4}], []]  # of what starts hosts on demand; nothing is asked for longer
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(awaited_hosts, plan, 200.0)
        assert cluster.add_node(**STORE, num_gpus=4).node_id in [node for node, _ in found.result().hosts[:2]]


class Held:
    def ready(self) -> bool:
        return True


if __name__ == "__main__":
    main()
