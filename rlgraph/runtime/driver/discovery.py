"""Describe the cluster that a program runs in: all hosts of the Ray that was started for it, or this machine."""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlgraph import notices
from rlgraph.errors import PlanError
from rlgraph.plan.cluster import Cluster, Precision
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import RayHost, local_cluster

ADDRESS = "RAY_ADDRESS"  # Ray's own name
HERE = "local"  # its value for a Ray that only this program uses
REACH_S = 3.0


class RayAddress(NamedTuple):
    """The address at which a Ray may run, and the variable or file that names it."""

    address: str
    source: str


def ray_address() -> RayAddress | None:
    """Find the Ray in which this program runs: `RAY_ADDRESS` names it, else the file that `ray start` wrote on this host."""
    named = os.environ.get(ADDRESS, "auto")
    if named not in ("", "auto"):
        return None if named == HERE else RayAddress(named, f"{ADDRESS}={named}")
    file = address_file()
    with contextlib.suppress(OSError):
        return RayAddress(found, str(file)) if (found := file.read_text(encoding="utf-8").strip()) else None
    return None


def address_file() -> Path:
    """The file in which `ray start` writes the address of its Ray for programs on this host."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"


def cluster() -> Cluster:
    """Describe the GPUs and cores of all hosts of the Ray in which this program runs, or of this machine if there is none.

    The environment variable `RAY_ADDRESS` names the Ray; else it is the one that `rlgraph cluster start`, `rlgraph cluster join` or `ray
    start` started on this host. With `RAY_ADDRESS=local` it describes this machine only. A line on standard error lists the hosts and
    devices that Ray has, and the idle ones.

    Raises PlanError if the Ray of `RAY_ADDRESS` does not answer or refuses this program's token, or if a host does not answer.

    >>> import rlgraph as rg
    >>> rg.cluster().hosts  # doctest: +SKIP
    2
    """
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    at = None if connected else ray_address()
    if not connected and at is None:
        return local_cluster()
    from rlgraph.runtime.driver.ray_cluster import living_hosts

    try:
        if at is not None:
            _reach(at)
        hosts = living_hosts(connected=connected)
    except PlanError as error:
        if at is None or at.source.startswith(ADDRESS):
            raise
        notices.here.say(f"rg.cluster() describes this machine only: {error}")
        return local_cluster()
    _asked.append(True)
    if len(hosts) == 1 and hosts[0].is_here:
        return local_cluster()
    found, idle = span(hosts)
    notices.here.say(f"Ray has {describe(found)}; idle: {', '.join(idle) or 'none'}")
    return found


_asked: list[bool] = []  # set once this program knows the hosts of its Ray


def describe(found: Cluster) -> str:
    """Count the hosts and devices of a cluster in words.

    >>> describe(Cluster(gpus=16, cpus=128, gpu="NVIDIA H200")), describe(Cluster(cpus=6, hosts=3))
    ('2 hosts with 16 GPUs (NVIDIA H200) and 128 cores', '3 hosts with 6 cores')
    """
    gpus = f"{found.gpus} GPUs{f' ({found.gpu})' if found.gpu else ''} and " if found.gpus else ""
    return f"{found.hosts} hosts with {gpus}{found.cpus} cores"


def say_idle_hosts(plan: Plan) -> None:
    """Print a notice if a plan leaves hosts idle: hosts without a worker, or other hosts of a Ray that the program did not ask for."""
    without = sorted(set(range(plan.cluster.hosts)) - {worker.host for worker in plan.workers})
    if without:
        notices.here.say(f"the plan has no worker on hosts {without} of {plan.cluster.hosts}, which stay idle; give its pools more devices")
    at = ray_address()
    if at is None or _asked or plan.cluster.hosts > 1:
        return
    with contextlib.suppress(PlanError):
        _reach(at)
        notices.here.say(
            f"the plan is for this machine only; other hosts of the Ray at {at.address} stay idle. Compile for rg.cluster() to use them"
        )


def _reach(at: RayAddress) -> None:
    """Raise PlanError unless a process listens at the address; Ray itself would wait for minutes."""
    host, _, port = at.address.rpartition(":")
    if "/" in at.address or not host or not port.isdigit():
        raise PlanError(
            f"{at.source}: rlgraph needs HOST:PORT of a Ray that runs on this host too; run the program there, e.g. with `ray job submit`, "
            f"or set {ADDRESS}={HERE} to plan for this machine"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise PlanError(
            f"{at.source}: no Ray answers at {at.address} ({error.strerror or error}); start it, or set {ADDRESS}={HERE} to plan for this "
            "machine"
        ) from None


# A plan on several hosts uses GPUs of one kind, and equally many on each host; only one host may have fewer.


def span(hosts: Sequence[RayHost]) -> tuple[Cluster, list[str]]:
    """Describe the part of some hosts that one plan can use, and list what stays idle.

    >>> def host(name, gpus, gpu="H100", is_here=False):
    ...     return RayHost(name, name, gpus, 64, Cluster(gpus=gpus, cpus=64, gpu=gpu), is_here)
    >>> found, idle = span([host("a", 8, is_here=True), host("b", 8), host("c", 4), host("d", 4, "A100")])
    >>> found.gpus, found.hosts, found.cpus, idle
    (20, 3, 192, ['4 of 4 GPUs of d (A100)'])
    """
    used = _most_gpus(hosts) or dict.fromkeys([host for host in hosts if host.cores] or hosts, 0)
    left = {host: host.gpus - used.get(host, 0) for host in hosts}
    idle = [f"{count} of {host.gpus} GPUs of {host.address} ({host.devices.gpu})" for host, count in left.items() if count]
    idle += [f"{host.address}, which has no GPU" for host in hosts if not (host.gpus or host in used or host.is_here) and host.cores]
    if len(used) == 1 and not any(host.is_here for host in used):  # a plan for one host runs on this one
        used |= {host: 0 for host in hosts if host.is_here}
    devices = [host.devices for host, gpus in used.items() if gpus or not any(used.values())]
    found = Cluster(
        gpus=sum(used.values()),
        cpus=len(used) * max(min(host.cores for host in used), 1),
        gpus_per_node=max(*used.values(), 1),
        hosts=len(used),
        gpu=devices[0].gpu,
        gpu_memory_bytes=_least([each.gpu_memory_bytes for each in devices]),
        host_memory_bytes=_least([host.devices.host_memory_bytes for host in used]),
        gpu_precision=_common([each.gpu_precision for each in devices]),
        cpu_precision=_common([host.devices.cpu_precision for host in used]),
    )
    return found, idle


def _most_gpus(hosts: Sequence[RayHost]) -> dict[RayHost, int]:
    """Choose the hosts with the most GPUs of one kind, and how many GPUs to use on each."""
    choices: list[dict[RayHost, int]] = [{}]
    for kind, most in {(host.devices.gpu, host.gpus) for host in hosts if host.gpus}:
        alike = [host for host in hosts if host.gpus and host.devices.gpu == kind]
        fewer = sorted((host for host in alike if host.gpus < most), key=lambda host: -host.gpus)
        choices.append({host: most for host in alike if host.gpus >= most} | {host: host.gpus for host in fewer[:1]})
    return max(choices, key=lambda used: (sum(used.values()), -len(used)))


def _least(sizes: Sequence[int | None]) -> int | None:
    return None if None in sizes else min(size for size in sizes if size is not None)


def _common(found: Sequence[Precision | None]) -> Precision | None:
    """Choose a dtype for all devices: float32 unless all compute in bfloat16."""
    known = [each for each in found if each is not None]
    return next((each for each in known if each.dtype == "float32"), known[0] if len(known) == len(found) else None)
