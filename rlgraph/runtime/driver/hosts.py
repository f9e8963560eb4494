"""What a job does on each of its hosts: a folder, a look at the workers there, and the end of all of it."""

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from rlgraph.runtime.worker.heartbeat import Heartbeat, read_status
from rlgraph.runtime.worker.stacks import read_stacks

ANSWER_S = 3.0  # of another host
START_S = 60.0  # of its first answer

Ask: TypeAlias = Callable[..., Any]


class Keeper(Protocol):
    """Who looks after workers."""

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        """What each worker does, of those that have begun something."""

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        """The Python stacks of each worker, by its process."""

    def sweep(self) -> None:
        """Remove the job's folder."""


class Host:
    """The workers of a job on the host where this runs: the driver's own, or as an actor on another."""

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


class Distant:
    """A `Host` on another host: `ask(method, timeout_s, *arguments)` calls it there, and gives None where it does not answer in time.

    A host that does not answer knows nothing of its workers.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._ask("ready", START_S)

    def states(self, workers: Collection[str]) -> Mapping[str, Heartbeat]:
        return self._ask("states", ANSWER_S, list(workers)) or {}

    def stacks(self, pids: Mapping[str, int]) -> Mapping[str, str]:
        return self._ask("stacks", ANSWER_S, dict(pids)) or dict.fromkeys(pids, "(its host does not answer)")

    def sweep(self) -> None:
        self._ask("sweep", ANSWER_S)


@dataclass(frozen=True)
class Hosts:
    """All hosts of a job. `of` says which keeper looks after a worker, by the host's place in the plan."""

    folder: str
    keepers: tuple[Keeper, ...]
    addresses: tuple[str, ...]  # of the hosts, where there are several
    of: Mapping[str, int]

    def states(self, workers: Collection[str]) -> dict[str, Heartbeat]:
        return {name: state for index, own in self._by_host(workers).items() for name, state in self.keepers[index].states(own).items()}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        found: dict[str, str] = {}
        for index, own in self._by_host(pids).items():
            found |= self.keepers[index].stacks({worker: pids[worker] for worker in own})
        return {worker: found[worker] for worker in pids if worker in found}

    def place(self, worker: str) -> str:
        """Say where a worker is; nothing where there is one host."""
        return f" on host {self.of[worker]} ({self.addresses[self.of[worker]]})" if self.addresses else ""

    def sweep(self) -> None:
        for keeper in self.keepers:
            keeper.sweep()

    def _by_host(self, workers: Collection[str]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for worker in workers:
            found.setdefault(self.of.get(worker, 0), []).append(worker)
        return found
