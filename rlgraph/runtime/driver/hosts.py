"""Describe this machine as a cluster to compile for, and watch the hosts of a job through one agent per host.

An agent has a folder, reads the state of its host's workers, and cleans up at the end.
"""

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch

from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.plan.cluster import Cluster
from rlgraph.runtime.worker.activity import ANSWER_S as WORKERS_S
from rlgraph.runtime.worker.activity import Heartbeat, read_stacks, read_status
from rlgraph.runtime.worker.spec import WorkerSpec

ANSWER_S = 3.0  # for another host to answer
STACKS_S = ANSWER_S + WORKERS_S  # for another host to answer after its workers
ASK_AGAIN_S = 0.5
CLOCK_S = 30.0  # between two comparisons of clocks
PINGS = 4  # per comparison; the fastest counts
DRIFT_S = 0.003  # of two clocks between two comparisons: 100 parts per million
SILENT_S = 7.0  # a host that does not answer for this long is lost
START_S = 180.0  # for the first answer: Ray starts a process for it, on a busy machine

Ask: TypeAlias = Callable[..., Any]


class HostAgent(Protocol):
    """Watches the workers of a job on one host."""

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        """Read the activity of each worker; leave out workers that have not begun any."""

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        """Read the Python stacks of each worker; `pids` maps workers to process ids."""

    def answers(self) -> bool:
        """Ping the host; return whether it answered."""

    def silent_s(self) -> float:
        """Return the seconds for which the host has not answered; 0 if it answered the last call."""

    def clock(self) -> "Clock":
        """Compare the host's monotonic clock with that of the driver's host."""

    def sweep(self) -> None:
        """Remove the job's folder."""


@dataclass(frozen=True)
class Clock:
    """The offset from another host's clock to the driver's, and the possible error of this offset, in seconds."""

    ahead_s: float = 0.0
    slack_s: float = 0.0


class LocalHostAgent:
    """Watches the workers on the host where it runs: the driver's own host, or another one, as an actor."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def read_clock(self) -> float:
        """Return this host's clock, which also answers a ping."""
        return time.monotonic()

    def states(self, workers: Collection[str]) -> dict[str, Heartbeat]:
        found = {worker: read_status(self.folder, worker) for worker in workers}
        return {worker: state for worker, state in found.items() if state is not None}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        return read_stacks(self.folder, pids)

    def answers(self) -> bool:
        return True

    def silent_s(self) -> float:
        return 0.0

    def clock(self) -> Clock:
        return Clock()

    def sweep(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteHostAgent:
    """Forwards to the `LocalHostAgent` of another host: `ask(method, timeout_s, *arguments)` calls it there, and returns None on a timeout.

    Without an answer nothing is known about its workers. A call without an answer marks the host as silent: from then on only a thread
    pings it, and no other call waits for it until it answers.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._silent_since: float | None = None
        self._over = threading.Event()
        self._clock = Clock()
        self._call("read_clock", START_S)
        self._compare_clocks()
        threading.Thread(target=self._keep_clock, name="clock", daemon=True).start()

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        return self._call("states", ANSWER_S, list(workers)) or {}

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        return self._call("stacks", STACKS_S, dict(pids)) or dict.fromkeys(pids, "(its host does not answer)")

    def answers(self) -> bool:
        return self._call("read_clock", ANSWER_S) is not None

    def silent_s(self) -> float:
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def sweep(self) -> None:
        self._over.set()
        if self._silent_since is None:
            self._ask("sweep", ANSWER_S)

    def clock(self) -> Clock:
        return self._clock

    def _compare_clocks(self) -> None:
        found = []
        for _ in range(PINGS):
            asked = time.monotonic()
            there = self._call("read_clock", ANSWER_S)
            if there is not None:
                half_s = (time.monotonic() - asked) / 2
                found.append((half_s, asked + half_s - there))
        if found:
            half_s, ahead_s = min(found)
            self._clock = Clock(ahead_s, half_s + DRIFT_S)

    def _keep_clock(self) -> None:
        while not self._over.wait(CLOCK_S):
            self._compare_clocks()

    def _call(self, method: str, timeout_s: float, *arguments: object) -> Any:
        if self._silent_since is not None:
            return None
        asked = time.monotonic()
        answer = self._ask(method, timeout_s, *arguments)
        if answer is None and not self._over.is_set():
            self._silent_since = asked
            threading.Thread(target=self._await, name="sign of life", daemon=True).start()
        return answer

    def _await(self) -> None:
        while not self._over.wait(ASK_AGAIN_S):
            if self._ask("read_clock", ANSWER_S) is not None:
                self._silent_since = None
                return


class FoundHosts(NamedTuple):
    """(id, address) of the plan's hosts in order, then of the driver's host if the plan does not use it; empty if there is one host."""

    hosts: Sequence[tuple[str, str]] = ()
    driver: int = 0


class RayHost(NamedTuple):
    """A host of a Ray: the GPUs and cores that Ray may use, and its devices as the host itself describes them."""

    node: str  # Ray's id
    address: str
    gpus: int
    cores: int
    devices: Cluster
    is_here: bool = False


@dataclass(frozen=True)
class Hosts:
    """All hosts of a job. `of` maps each worker to its host; it and `driver` are indices into `agents` and `addresses`."""

    folder: str
    agents: tuple[HostAgent, ...]
    addresses: tuple[str, ...]  # empty on one host
    of: Mapping[str, int]
    driver: int = 0

    def states(self, workers: Collection[str]) -> dict[str, Heartbeat]:
        return {name: state for index, own in self._by_host(workers).items() for name, state in self.agents[index].states(own).items()}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, own in self._by_host(pids).items():
            found |= self.agents[index].stacks({worker: pids[worker] for worker in own})
        return {worker: found[worker] for worker in pids if worker in found}

    def ask_all(self) -> frozenset[int]:
        """Ping all other hosts at once, and return the hosts that did not answer."""
        others = [host for host in range(len(self.agents)) if host != self.driver]
        if not others:
            return frozenset()
        with ThreadPoolExecutor(len(others)) as pool:
            answers = pool.map(lambda host: self.agents[host].answers(), others)
            return frozenset(host for host, answer in zip(others, answers, strict=True) if not answer)

    def lost_hosts(self) -> frozenset[int]:
        """The hosts that have not answered for `SILENT_S`, and so are lost."""
        return frozenset(host for host, agent in enumerate(self.agents) if agent.silent_s() > SILENT_S)

    def silent_s(self, host: int) -> float:
        return self.agents[host].silent_s()

    def clock(self, worker: str) -> Clock:
        """Compare the clock of a worker's host with the driver's."""
        return self.agents[self.of.get(worker, self.driver)].clock()

    @property
    def clock_slack_s(self) -> float:
        """The error with which times of two hosts can be compared, in seconds."""
        first, second, *_ = *sorted((agent.clock().slack_s for agent in self.agents), reverse=True), 0.0, 0.0
        return first + second

    def name(self, host: int) -> str:
        """Name a host for an error."""
        return f"host {host} ({self.addresses[host]})"

    def on(self, host: int) -> tuple[str, ...]:
        """List the workers of a host."""
        return tuple(worker for worker, at in self.of.items() if at == host)

    def place(self, worker: str) -> str:
        """Name the host of a worker for an error; empty on one host."""
        return f" on {self.name(self.of[worker])}" if self.addresses else ""

    def sweep(self) -> None:
        for agent in self.agents:
            agent.sweep()

    def _by_host(self, workers: Collection[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for worker in workers:
            found.setdefault(self.of.get(worker, self.driver), []).append(worker)
        return found


# This machine: as a cluster to compile for, and the environment of its workers.


def local_cluster() -> Cluster:
    """Describe the GPUs and cores that this process may use: their number, their memory and the dtype that they compute in.

    >>> import os
    >>> local_cluster().cpus == len(os.sched_getaffinity(0))
    True
    """
    leave_out_broken_amx()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = torch.cuda.get_device_properties(0) if gpus else None
    return Cluster(
        gpus=gpus,
        cpus=len(os.sched_getaffinity(0)),
        gpus_per_node=max(gpus, 1),
        gpu=properties.name if properties else None,
        gpu_memory_bytes=properties.total_memory if properties else None,
        host_memory_bytes=_host_memory_bytes(),
        gpu_precision=device_precision("cuda") if gpus else None,
        cpu_precision=device_precision("cpu"),
    )


def _host_memory_bytes() -> int:
    """Read the memory of the host, or the container's limit if it is lower."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(host, int(text)) if text.isdigit() else host


# The environment variables of a worker: the GPUs that it sees, its threads, and its import path.


def worker_environment(spec: WorkerSpec, reserved: Sequence[str] | None = None) -> dict[str, str]:
    """Build the variables that a worker needs before its imports; `reserved` lists the GPUs of its host that the job may use."""
    threads = str(spec.worker.threads)
    visible = None if spec.listen_at else os.environ.get("CUDA_VISIBLE_DEVICES")  # with several hosts, it may describe another one
    mine = reserved or (visible.split(",") if visible else [str(gpu) for gpu in range(max(spec.local_gpus, default=-1) + 1)])
    # Ranks of one host use only the loopback interface.
    inside = {} if spec.listen_at else {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return {
        # The plan assigns the GPUs: models of one pool share them, which Ray's own count cannot express.
        "CUDA_VISIBLE_DEVICES": ",".join(mine[gpu] for gpu in spec.local_gpus),
        **inside,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # vLLM warns at each start that it binds memory to a node
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # so a worker can import what the driver can
    }
