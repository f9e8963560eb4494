"""What a job does on each of its hosts: a folder, a look at the workers there, and the end of all of it."""

import os
import shutil
from collections.abc import Collection, Mapping

from rlgraph.runtime.stacks import read_stacks
from rlgraph.runtime.status import Doing, read_status


class Host:
    """The workers of a job on the host where this runs: the driver's own, or as an actor on another."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def states(self, workers: Collection[str]) -> dict[str, Doing]:
        """Return what each worker does, of those that have begun something."""
        found = {worker: read_status(self.folder, worker) for worker in workers}
        return {worker: doing for worker, doing in found.items() if doing is not None}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, str]:
        """Return the Python stacks of each worker, by its process."""
        return read_stacks(self.folder, pids)

    def sweep(self) -> None:
        """Remove the job's folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
