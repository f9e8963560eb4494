"""Dispatch without Ray: workers are forked from warm processes, and the driver's word alone ticks them."""

import os
from collections.abc import Sequence
from typing import Any

from rlgraph.compiler.channels import lies_in_ray
from rlgraph.compiler.plan import Plan
from rlgraph.errors import PlanError, RlgraphError, WorkerDied
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent, LocalHostAgent
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES, pickled
from rlgraph.runtime.driver.warm import ForkedWorker, here
from rlgraph.runtime.driver.worker_environment import worker_environment
from rlgraph.runtime.worker.spec import WorkerSpec
from rlgraph.runtime.worker.template import ForkOrder

WARM = "warm"  # its name


class WithoutTicks:
    """What a `Dispatch` has in common whose workers are of this host, and step on the driver's word alone: nothing starts or ticks them."""

    def begin(self, hosts: int, *, stores: bool = False) -> None:
        pass

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        return FoundHosts()

    def folders(self) -> Sequence[str]:
        return []

    def end(self) -> None:
        pass

    def host_agent(self, host: str, folder: str) -> HostAgent:
        return LocalHostAgent(folder)

    def start(self, actors: Sequence[Any], window: int) -> None:
        pass

    def tick(self, step: int) -> None:
        pass

    def report(self, step: int) -> None:
        pass

    def stop(self) -> None:
        pass

    def kill(self, actor: Any) -> None:
        actor.kill()


class ForkedProcesses(WithoutTicks):
    """A `Dispatch` to the warm processes of `rg.warm()`."""

    def __init__(self) -> None:
        warm = here()
        if warm is None:
            raise RlgraphError("a job that was launched inside of rg.warm() starts its workers there too, and the block has been left")
        self._warm = warm
        self._workers: list[ForkedWorker] = []

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> ForkedWorker:
        variables = worker_environment(spec)
        path = tuple(variables["PYTHONPATH"].split(os.pathsep))
        order = ForkOrder(os.getcwd(), path, pickled(spec), driver)
        prepare = spec.model.traits.prepare if spec.model is not None else None
        worker = self._warm.fork(spec.worker.name, order, variables, prepare)
        self._workers.append(worker)
        return worker

    def check(self) -> None:
        for worker in self._workers:
            if worker.ended():
                raise WorkerDied(f"worker '{worker.name}' could not be started: its process has ended; what it wrote says why")


DISPATCHES[WARM] = ForkedProcesses


def chosen_dispatch(plan: Plan, asked: str | None) -> str:
    """Choose how a plan is dispatched: as `asked`, inside of `rg.warm()` from its processes, and else as Ray can.

    Raises PlanError for a plan that cannot be.
    """
    if here() is not None:
        check_warm(plan, asked)
        return WARM
    if asked == "compiled_graph" and plan.cluster.hosts > 1:
        raise PlanError(
            f"dispatch='compiled_graph' and {plan.cluster.hosts} hosts: Compiled Graphs can hang between hosts; "
            "launch with dispatch='calls'"
        )
    return asked or ("calls" if plan.cluster.hosts > 1 else "compiled_graph")


def check_warm(plan: Plan, dispatch: str | None) -> None:
    """Raise PlanError for a launch that warm processes cannot serve."""
    if dispatch is not None:
        raise PlanError(
            f"launch(dispatch='{dispatch}') inside of rg.warm(), whose jobs run without Ray; leave dispatch= out, or launch outside"
        )
    if plan.cluster.hosts > 1:
        raise PlanError(f"a plan of {plan.cluster.hosts} hosts inside of rg.warm(), whose processes are of this host; launch it outside")
    if lies_in_ray(plan):
        raise PlanError("a transport that needs Ray inside of rg.warm(), whose jobs run without Ray; choose another one, or launch outside")
