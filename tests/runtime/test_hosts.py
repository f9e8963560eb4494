"""Several hosts: workers where the plan says, channels over TCP, the same bits; a host that is lost is named."""

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from support import fakes, forked_workers
from support.paths import PROGRAMS

from rlgraph.api import compile
from rlgraph.errors import PlanError
from rlgraph.plan.channels import check_encrypted
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.render.text import text
from rlgraph.runtime.local import LocalJob
from rlgraph.values.pool import Pool

pytestmark = pytest.mark.stage("hosts")

TWO = Cluster(cpus=4, hosts=2)


def bits(step):
    return step.index, step.metrics["loss"], step.metrics["weight"], step.staleness


def oracle(graph, steps):
    with LocalJob(graph, compile_plan(graph, Cluster(cpus=2))) as here:
        return [bits(step) for step in here.steps(steps)]


def test_pools_side_by_side_fill_one_host_after_another_and_channels_between_them_are_tcp() -> None:
    plan = compile_plan(fakes.vector_loop(1), TWO)
    assert {worker.name: worker.host for worker in plan.workers} == {"prompts": 0, "generator": 0, "score": 0, "policy": 1}
    assert {channel.name: channel.transport for channel in plan.channels} == {
        "prompts": "shm",
        "rollout": "shm",
        "rollout (tcp)": "tcp",
        "score (tcp)": "tcp",
    }
    assert [loop.transport for loop in plan.loops] == ["tcp"]
    printed = str(compile(fakes.vector_loop(1), TWO))
    assert printed.startswith("vector on 4 cores of 2 hosts: ")
    assert re.search(r"policy +1 +2 threads, host 1 ", printed)


def test_gpus_say_how_many_hosts_there_are_and_a_worker_never_spans_two() -> None:
    assert Cluster(gpus=20, cpus=64).hosts == 3
    assert Cluster(gpus=4, cpus=8).hosts == 1
    plan = compile_plan(fakes.vector_loop(1, pools=(Pool("rollout", gpus=8), Pool("train", gpus=8))), Cluster(gpus=16, cpus=64))
    assert {worker.host for worker in plan.workers if worker.pool == "rollout"} == {0}
    assert {worker.host for worker in plan.workers if worker.pool == "train"} == {1}
    assert [loop.transport for loop in plan.loops] == ["nccl"]
    assert {channel.transport for channel in plan.channels} <= {"local", "shm", "tcp"}  # batches lie in host memory
    assert "1 buffer, nccl" in text(plan)


def test_more_hosts_than_cores_are_refused() -> None:
    with pytest.raises(PlanError, match=r"Cluster\(hosts=3, cpus=2\): each host has at least one core"):
        Cluster(cpus=2, hosts=3)


@pytest.mark.parametrize(("depth", "buffers"), [(1, 1), (2, 2)])
def test_a_run_over_two_hosts_equals_the_oracle_bit_for_bit(depth: int, buffers: int) -> None:
    graph = fakes.vector_loop(depth, buffers=buffers)
    with forked_workers.job(graph, hosts=2) as running:
        found = [bits(step) for step in running.steps(7)]
    assert found == oracle(graph, 7)


def test_large_batches_cross_between_hosts() -> None:
    graph = fakes.vector_loop(1, count=12)
    with forked_workers.job(graph, hosts=2) as running:
        assert len(list(running.steps(20))) == 20


def test_what_processes_without_ray_cannot_serve_is_refused_before_anything_starts() -> None:
    graph = fakes.vector_loop(1)
    with pytest.raises(PlanError, match=r"a transport that needs Ray with launch\(dispatch='processes'\)"):
        compile(graph, Cluster(cpus=2)).launch(dispatch="processes", transport="ray")
    with pytest.raises(PlanError, match=r"a plan of 2 hosts with launch\(dispatch='processes'\)"):
        compile(graph, TWO).launch(dispatch="processes")


def test_a_plan_of_one_host_waits_for_no_other() -> None:
    plan = compile(fakes.vector_loop(1), Cluster(cpus=2))
    with pytest.raises(PlanError, match=r"launch\(wait_for_hosts_s=60\): the plan runs only on this host"):
        plan.launch(wait_for_hosts_s=60)


def test_what_cannot_be_encrypted_is_refused_before_anything_starts() -> None:
    with pytest.raises(PlanError, match=r"launch\(encrypt=True\): the plan runs only on this host and sends nothing to another"):
        compile(fakes.vector_loop(1), Cluster(cpus=2)).launch(encrypt=True)
    check_encrypted(compile_plan(fakes.vector_loop(1), TWO))
    on_gpus = compile_plan(fakes.vector_loop(1, pools=(Pool("rollout", gpus=8), Pool("train", gpus=8))), Cluster(gpus=16, cpus=64))
    with pytest.raises(PlanError, match=r"'weights' goes from host to host by 'nccl', which does not encrypt"):
        check_encrypted(on_gpus)


def test_ranks_on_several_hosts_cannot_be_encrypted() -> None:
    plan = compile_plan(fakes.vector_loop(1), TWO)
    spread = replace(plan, workers=tuple(replace(worker, model="vector") for worker in plan.workers))
    with pytest.raises(PlanError, match="the ranks of 'vector' are on several hosts, and PyTorch's collectives do not encrypt"):
        check_encrypted(spread)


@pytest.mark.ray
@pytest.mark.timeout(600)  # jobs on two nodes, each with a start of its own
def test_workers_run_on_the_ray_nodes_of_the_plan_a_lost_host_is_named_and_no_gpu_is_shared_with_other_work_on_ray() -> None:
    script = PROGRAMS / "ray_nodes.py"  # in a process of its own, since the other tests share a Ray of one node
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=560, check=False)
    assert run.stdout.splitlines()[-1:] == ["all as it should be"], run.stdout + run.stderr
