"""Workers as forked processes, without Ray: all else is a job's own. Starting one takes milliseconds, so faults can be many.

The server that they are forked from has imported torch and transformers once, which a process of its own takes seconds for.
"""

import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

from ray import cloudpickle
from support.paths import TESTS

from rlgraph.errors import WorkerDied
from rlgraph.graph.graph import Graph
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts
from rlgraph.runtime.driver.job import Job
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph.runtime.driver.warm import WithoutRay
from rlgraph.runtime.worker import process
from rlgraph.runtime.worker.spec import WorkerSpec

server = multiprocessing.get_context("forkserver")
os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])  # to preload
PRELOADED = [
    "rlgraph.runtime.worker.process",
    "rlgraph.api",
    "rlgraph.nodes.rollout.rollout",
    "rlgraph.nodes.training.advantages",
    "rlgraph.nodes.training.critic",
    "rlgraph.nodes.training.policy",
    "rlgraph.engines.forward.self_test",
    "rlgraph.engines.fsdp.engine",
    "rlgraph.engines.fsdp.sharding",
    "rlgraph.engines.fsdp.spec",
    "rlgraph.engines.hf.chat_template",
    "rlgraph.engines.transformers.engine",
    "rlgraph.engines.transformers.spec",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "support.fakes",
    "support.forked_workers",
]
server.set_forkserver_preload(PRELOADED)


def serve(pickled: bytes, driver: str) -> None:
    """Be a worker until the driver says stop."""
    process.serve(cloudpickle.loads(pickled), driver)


class Forked(WithoutRay):
    """A `Dispatch` to processes that are forked from a server."""

    def __init__(self) -> None:
        self.processes: dict[str, Any] = {}

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        return FoundHosts([(f"node{i}", f"127.0.0.{i + 1}") for i in range(plan.cluster.hosts)] if plan.cluster.hosts > 1 else ())

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        forked = server.Process(target=serve, args=(cloudpickle.dumps(spec), driver), daemon=True)
        forked.start()
        self.processes[spec.worker.name] = forked
        return forked

    def check(self) -> None:
        for name, forked in self.processes.items():
            if forked.exitcode is not None:
                raise WorkerDied(f"worker '{name}' could not be started: exit status {forked.exitcode}")

    def kill(self, actor: Any) -> None:
        super().kill(actor)
        actor.join()


DISPATCHES["forked"] = Forked


def job(graph: Graph, deadline_s: float = 60.0, hosts: int = 1) -> Job:
    """Return a job whose workers are forked."""
    return Job(graph, compile_plan(graph, Cluster(cpus=2 * hosts, hosts=hosts)), dispatch_name="forked", deadline_s=deadline_s)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def traces(folder: str | Path, pids: set[int]) -> list[str]:
    """List what is left of a job that has ended: its folder, its workers' processes, and shared memory with the id of one in its name."""
    shared = [path.name for path in Path("/dev/shm").iterdir() if set(re.findall(r"\d+", path.name)) & set(map(str, pids))]
    return [*shared, *(str(pid) for pid in pids if alive(pid)), *([str(folder)] if Path(folder).exists() else [])]
