"""Choose how a job's workers start: on Ray, or as processes of this host, without importing Ray."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from rlgraph import notices
from rlgraph.errors import PlanError
from rlgraph.plan.channels import lies_in_ray
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent
from rlgraph.runtime.driver.warm import PROCESSES, WARM, ForkedProcesses, Processes, current_processes
from rlgraph.runtime.worker.spec import WorkerSpec


class Dispatch(Protocol):
    """Starts and ends workers. The driver itself ticks them."""

    def begin(self, hosts: int, *, stores: bool = False) -> None:
        """Start Ray on `hosts` hosts unless it runs already. If Ray `stores` messages, its object store gets room for them."""

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        """Find the hosts of the plan, and reserve the GPUs that it uses.

        Raises PlanError if after `patience_s` there are fewer hosts, or others hold the GPUs.
        """

    def devices(self) -> Cluster:
        """Describe the hosts that answer now and are to stay, and their devices."""

    def loses_hosts(self) -> bool:
        """Whether a host of the workers is about to end, as Ray was told."""

    def death(self, hosts: Collection[int]) -> str:
        """Name a process of Ray that ended although the job needs it, with its log; empty if none did. Ask Ray itself only for `hosts`."""

    def folders(self) -> Sequence[str]:
        """List the folders that a Ray started by `begin` leaves behind if the driver is killed."""

    def end(self) -> None:
        """End what `begin` started."""

    def host_agent(self, host: str, folder: str) -> HostAgent:
        """Start the agent that watches the job's workers on another host."""

    def announce(self, specs: Sequence[WorkerSpec]) -> None:
        """Receive the workers that will be created next, and end cached engines that none of them can reuse."""

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        """Start a worker. It connects to the driver at this address, and loads what it needs."""

    def check(self) -> None:
        """Raise WorkerDied if a worker is known to have failed before it could connect."""

    def start(self, actors: Sequence[Any]) -> None:
        """Run the workers, which are ready, until the driver stops them."""

    def stop(self) -> None:
        """Release what `start` holds, once the workers have stopped or been killed."""

    def kill(self, actor: Any) -> None:
        """Kill a worker."""

    def let_go(self, actor: Any) -> bool:
        """Release a worker that has shut down; return whether its process continues, for another job."""


def chosen_dispatch(plan: Plan, asked: str | None) -> str:
    """Choose the dispatch of a plan: the one `asked` for, inside of `rg.runs.warm()` its processes, otherwise what Ray supports.

    Raises PlanError if this dispatch cannot run the plan, or Ray lacks a feature that it needs.
    """
    if current_processes() is not None:
        if asked is not None:
            raise PlanError(
                f"launch(dispatch='{asked}') inside of rg.runs.warm(), whose jobs run without Ray; leave dispatch= out, or launch outside"
            )
        check_without_ray(plan, "inside of rg.runs.warm()")
        return WARM
    if asked == PROCESSES:
        check_without_ray(plan, "with launch(dispatch='processes')")
        return PROCESSES
    return _ray_dispatch(plan, asked)


def _ray_dispatch(plan: Plan, asked: str | None) -> str:
    """Choose how Ray starts the loops of a plan's workers."""
    from rlgraph.runtime.driver import ray_features

    ray_features.check_ray(plan)
    if asked == "calls" or (asked is None and plan.cluster.hosts > 1):
        return "calls"
    if ray_features.has_compiled_graphs():
        return "compiled_graph"
    if asked is not None:
        raise PlanError(f"launch(dispatch='{asked}'): this Ray has no Compiled Graphs; leave dispatch= out")
    notices.here.say("this Ray has no Compiled Graphs: it starts the loop of each worker by an actor call, and the run is the same")
    return "calls"


def check_without_ray(plan: Plan, where: str) -> None:
    """Raise PlanError if a plan cannot run without Ray."""
    if plan.cluster.hosts > 1:
        raise PlanError(f"a plan of {plan.cluster.hosts} hosts {where}, whose processes run only on this host; launch it on Ray")
    if lies_in_ray(plan):
        raise PlanError(f"a transport that needs Ray {where}, whose processes run without it; choose another one, or launch on Ray")


def make_dispatch(name: str) -> Dispatch:
    """Make the dispatch of this name. Only here is Ray imported, if it needs Ray."""
    without_ray: dict[str, type[Dispatch]] = {WARM: ForkedProcesses, PROCESSES: Processes}
    if name in without_ray:
        return without_ray[name]()
    from rlgraph.runtime.driver.ray_dispatch import DISPATCHES

    return DISPATCHES[name]()
