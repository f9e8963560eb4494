"""Agents of a job, one a host: each keeps a folder, reads what the workers there do, and cleans up at the end."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rlgraph.runtime.worker.heartbeat import Heartbeat, read_status
from rlgraph.runtime.worker.stacks import ANSWER_S as WORKERS_S
from rlgraph.runtime.worker.stacks import read_stacks

ANSWER_S = 3.0  # of another host
STACKS_S = ANSWER_S + WORKERS_S  # of another host whose workers answer it
START_S = 60.0  # of its first answer

Ask: TypeAlias = Callable[..., Any]


class HostAgent(Protocol):
    """Watches the workers of a job on one host."""

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        """Read what each worker does; workers that have begun nothing are left out."""

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        """Read the Python stacks of each worker; `pids` are the processes by worker."""

    def sweep(self) -> None:
        """Remove the job's folder."""


class LocalHostAgent:
    """Watches the workers on the host where it runs: the driver's own host, or another one, as an actor."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def ready(self) -> bool:
        return True

    def states(self, workers: Collection[str]) -> dict[str, Heartbeat]:
        found = {worker: read_status(self.folder, worker) for worker in workers}
        return {worker: state for worker, state in found.items() if state is not None}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        return read_stacks(self.folder, pids)

    def sweep(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


class RemoteHostAgent:
    """Forwards to the `LocalHostAgent` of another host: `ask(method, timeout_s, *arguments)` calls it there, and returns None on a timeout.

    Without an answer nothing is known of the workers there.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ask("ready", START_S)

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        return self._ask("states", ANSWER_S, list(workers)) or {}

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        return self._ask("stacks", STACKS_S, dict(pids)) or dict.fromkeys(pids, "(its host does not answer)")

    def sweep(self) -> None:
        self._ask("sweep", ANSWER_S)


@dataclass(frozen=True)
class Hosts:
    """All hosts of a job. `of` maps each worker to its host: an index into `agents` and `addresses`."""

    folder: str
    agents: tuple[HostAgent, ...]
    addresses: tuple[str, ...]  # empty on one host
    of: Mapping[str, int]

    def states(self, workers: Collection[str]) -> dict[str, Heartbeat]:
        return {name: state for index, own in self._by_host(workers).items() for name, state in self.agents[index].states(own).items()}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, own in self._by_host(pids).items():
            found |= self.agents[index].stacks({worker: pids[worker] for worker in own})
        return {worker: found[worker] for worker in pids if worker in found}

    def place(self, worker: str) -> str:
        """Name the host of a worker for an error; empty on one host."""
        return f" on host {self.of[worker]} ({self.addresses[self.of[worker]]})" if self.addresses else ""

    def sweep(self) -> None:
        for agent in self.agents:
            agent.sweep()

    def _by_host(self, workers: Collection[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for worker in workers:
            found.setdefault(self.of.get(worker, 0), []).append(worker)
        return found
