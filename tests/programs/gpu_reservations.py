"""GPUs of a Ray of three nodes, of which the driver's has none: who gets which. Ray counts them, and nobody computes there."""

import logging
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import ray
from ray.cluster_utils import Cluster as RayCluster
from support import fakes

from rlgraph.errors import PlanError
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.runtime.driver import ray_cluster, ray_dispatch
from rlgraph.runtime.driver.ray_cluster import awaited_hosts, ray_hosts
from rlgraph.runtime.driver.ray_dispatch import Reservation
from rlgraph.values.pool import Pool

STORE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        cluster = RayCluster(initialize_head=True, head_node_args={**STORE, "include_dashboard": False, "num_gpus": 0})
        try:
            small, large = (cluster.add_node(**STORE, num_gpus=gpus) for gpus in (2, 4))
            ray.init(address=cluster.address, logging_level=logging.ERROR)
            run(small.node_id, large.node_id)
            wait(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()
    print("all as it should be")


def run(small: str, large: str) -> None:
    here = ray.get_runtime_context().get_node_id()
    pools = Pool("rollout", gpus=4), Pool("train", gpus=2)
    plan = compile_plan(fakes.vector_loop(1, pools=pools), Cluster(gpus=6, gpus_per_node=4, cpus=8))
    found = ray_hosts(plan)
    assert [node for node, _ in found.hosts] == [large, small, here], found
    assert found.driver == 2

    ray_dispatch.RESERVE_S = 5.0
    first = Reservation(plan, found.hosts[:2])
    assert {node: sorted(gpus) for node, gpus in first.gpus.items()} == {large: ["0", "1", "2", "3"], small: ["0", "1"]}, first.gpus
    with pytest.raises(PlanError, match=r"the plan needs GPUs that other jobs hold: 4 of .*; 0 are free in all of Ray"):
        Reservation(plan, found.hosts[:2])
    first.free()

    held = ray.remote(Held).options(num_cpus=0, num_gpus=1).remote()  # a user's own work
    ray.get(held.ready.remote(), timeout=60)
    with pytest.raises(PlanError, match="5 are free in all of Ray"):
        Reservation(plan, found.hosts[:2])
    ray.kill(held)
    ray_dispatch.RESERVE_S = 30.0
    Reservation(plan, found.hosts[:2]).free()

    larger = replace(plan.cluster, gpus_per_node=8)
    with pytest.raises(PlanError, match="the plan needs 6 GPUs on its host 0; Ray's hosts have"):
        ray_hosts(compile_plan(fakes.vector_loop(1, pools=pools), replace(larger, hosts=2)))


def wait(cluster: RayCluster) -> None:
    """A plan takes one host more than there are; it comes after a while."""
    plan = compile_plan(
        fakes.vector_loop(1, pools=(Pool("rollout", gpus=4), Pool("train", gpus=8))), Cluster(gpus=12, gpus_per_node=4, cpus=8)
    )
    told: list[str] = []
    asked: list[list[dict[str, int]]] = []
    ray_cluster.request_resources = lambda bundles: asked.append(bundles)
    ray_cluster.TOLD_S = 2.0
    ray_cluster.log.warning = lambda text, *words: told.append(text % words)  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="no host with that many is left; waited 3 s"):
        awaited_hosts(plan, 3.0)
    assert told[0].endswith("s of 3 s: the plan takes hosts with [4, 4, 4] GPUs, Ray has hosts with [4, 2, 0]"), told
    assert asked == [[{"GPU": 4}, {"GPU": 4}, {"GPU": 4}], []]  # of what starts hosts on demand; nothing is asked for longer
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(awaited_hosts, plan, 200.0)
        joined = {cluster.add_node(**STORE, num_gpus=4).node_id for _ in range(2)}
        assert joined < {node for node, _ in found.result().hosts[:3]}


class Held:
    def ready(self) -> bool:
        return True


if __name__ == "__main__":
    main()
