"""The cluster that a program finds: hosts of a Ray as one cluster, what of them stays idle, and where a Ray is looked for."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import fakes

import rlgraph as rg
from rlgraph import notices
from rlgraph.errors import PlanError
from rlgraph.plan.cluster import Precision
from rlgraph.runtime.driver import discovery
from rlgraph.runtime.driver.hosts import RayHost

BF16, FP32 = Precision("bfloat16", "it has AMX"), Precision("float32", "it has none")


def host(name: str, gpus: int = 0, cores: int = 64, *, gpu: str | None = "H200", dtype: Precision = BF16, is_here: bool = False) -> RayHost:
    devices = rg.Cluster(gpus=gpus, cpus=64, gpu=gpu if gpus else None, host_memory_bytes=max(cores, 1) << 30, cpu_precision=dtype)
    return RayHost(f"id of {name}", name, gpus, cores, devices, is_here)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No Ray is named here; returns the file that `ray start` would write. What is said begins anew."""
    monkeypatch.delenv(discovery.ADDRESS, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if "ray" in sys.modules:  # of another test of this process, which may have connected it
        monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(discovery, "_asked", [])
    monkeypatch.setattr(discovery, "local_cluster", lambda: rg.Cluster(cpus=3))
    monkeypatch.setattr(notices, "here", notices.Notices())
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.fixture
def answering() -> Iterator[str]:
    """The address of something that answers, as Ray would."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def found_hosts(monkeypatch: pytest.MonkeyPatch, *hosts: RayHost) -> list[bool]:
    """Let the Ray at any address have these hosts; returns, for each question, whether the program was connected before."""
    from rlgraph.runtime.driver import ray_cluster

    asked: list[bool] = []
    monkeypatch.setattr(ray_cluster, "living_hosts", lambda *, connected: asked.append(connected) or list(hosts))
    return asked


def test_all_gpus_of_equal_hosts_are_one_cluster() -> None:
    found, idle = discovery.span([host("a", 8, is_here=True), host("b", 8, cores=32, dtype=FP32)])
    assert (found.gpus, found.gpus_per_node, found.hosts, found.gpu) == (16, 8, 2, "H200")
    assert (found.cpus, found.host_memory_bytes, found.cpu_precision) == (64, 32 << 30, FP32), "of each host what both have"
    assert not idle


@pytest.mark.parametrize(
    ("gpus", "found", "idle"),
    [
        ((8, 8, 4), (20, 8, 3), []),
        ((8, 4, 4), (12, 8, 2), ["4 of 4 GPUs of host2 (H200)"]),
        ((8, 2, 2, 2), (10, 8, 2), ["2 of 2 GPUs of host2 (H200)", "2 of 2 GPUs of host3 (H200)"]),
        ((4, 3, 3, 3), (12, 3, 4), ["1 of 4 GPUs of host0 (H200)"]),
    ],
)
def test_of_unequal_hosts_most_gpus_are_used_and_the_others_are_named(gpus, found, idle) -> None:
    cluster, left = discovery.span([host(f"host{n}", count, is_here=not n) for n, count in enumerate(gpus)])
    assert (cluster.gpus, cluster.gpus_per_node, cluster.hosts) == found
    assert left == idle


def test_gpus_of_another_kind_and_hosts_without_gpus_are_named_as_idle_but_not_the_host_that_drives() -> None:
    hosts = [host("head", is_here=True), host("a", 4), host("b", 4), host("c", 4, gpu="A100"), host("cores")]
    found, idle = discovery.span(hosts)
    assert (found.gpus, found.hosts, found.gpu) == (8, 2, "H200")
    assert idle == ["4 of 4 GPUs of c (A100)", "cores, which has no GPU"]


def test_gpus_of_one_other_host_are_planned_for_beside_the_host_that_drives() -> None:
    found, idle = discovery.span([host("head", cores=8, is_here=True), host("a", 8)])
    assert (found.gpus, found.hosts, found.gpus_per_node) == (8, 2, 8), "a plan of one host would be for this one, which has no GPU"
    assert not idle


def test_hosts_without_gpus_give_as_many_cores_as_each_has() -> None:
    found, idle = discovery.span([host("a", cores=2, is_here=True), host("b", cores=1), host("head", cores=0)])
    assert (found.gpus, found.cpus, found.hosts, idle) == (0, 2, 2, [])


def test_without_a_ray_this_machine_is_the_cluster_and_nothing_is_said(no_ray: Path) -> None:
    assert rg.cluster() == rg.Cluster(cpus=3)
    assert notices.here.list_all() == ()


def test_the_hosts_of_the_ray_that_the_environment_names_are_the_cluster(
    no_ray: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = found_hosts(monkeypatch, host("a", 8, is_here=True), host("b", 8), host("c", 4, gpu="A100"))
    no_ray.write_text("10.0.0.1:6379")
    monkeypatch.setenv(discovery.ADDRESS, answering)
    assert (rg.cluster().gpus, asked) == (16, [False])
    assert notices.here.list_all() == ("Ray has 2 hosts with 16 GPUs (H200) and 128 cores; idle: 4 of 4 GPUs of c (A100)",)


def test_the_ray_that_was_started_on_this_host_is_found_by_its_file(no_ray: Path, answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = found_hosts(monkeypatch, host("a", is_here=True), host("b"))
    no_ray.write_text(answering)
    assert (rg.cluster().hosts, asked) == (2, [False])
    monkeypatch.setenv(discovery.ADDRESS, "local")
    assert (rg.cluster().hosts, asked) == (1, [False]), "local is this machine"


def test_a_ray_of_this_host_alone_is_planned_for_as_this_machine(no_ray: Path, answering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found_hosts(monkeypatch, host("a", 8, is_here=True))
    no_ray.write_text(answering)
    assert rg.cluster() == rg.Cluster(cpus=3)


@pytest.mark.parametrize(
    ("named", "said"),
    [("127.0.0.1:1", r"RAY_ADDRESS=127.0.0.1:1: no Ray answers at 127.0.0.1:1 .*start it"), ("ray://head:10001", "with `ray job submit`")],
)
def test_a_named_ray_that_cannot_be_used_is_an_error(no_ray: Path, named: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.ADDRESS, named)
    with pytest.raises(PlanError, match=f"{said}.*RAY_ADDRESS=local to plan for this machine"):
        rg.cluster()


def test_a_file_that_a_ray_left_behind_is_said_once_and_this_machine_is_the_cluster(no_ray: Path) -> None:
    no_ray.write_text("127.0.0.1:1")
    assert rg.cluster() == rg.cluster() == rg.Cluster(cpus=3)
    (said,) = notices.here.list_all()
    assert "describes this machine only" in said
    assert "no Ray answers at 127.0.0.1:1" in said


def test_a_plan_for_this_machine_says_that_other_hosts_of_ray_stay_idle(
    no_ray: Path, answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fakes.vector_loop(1)
    plan = rg.compile(graph, rg.Cluster(cpus=2))
    plan.launch()
    assert not notices.here.list_all(), "no Ray is named"
    no_ray.write_text(answering)
    plan.launch()
    (said,) = notices.here.list_all()
    assert f"other hosts of the Ray at {answering} stay idle. Compile for rg.cluster()" in said


def test_a_plan_says_which_of_its_hosts_have_no_worker(no_ray: Path) -> None:
    rg.compile(fakes.vector_loop(1), rg.Cluster(cpus=6, hosts=3)).launch()
    (said,) = notices.here.list_all()
    assert "no worker on hosts [" in said
