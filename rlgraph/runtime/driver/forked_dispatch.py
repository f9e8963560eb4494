"""Dispatch without Ray: workers come from warm processes, and the driver's word alone ticks them."""

import os
from collections.abc import Hashable, Sequence
from typing import Any

from rlgraph import notices
from rlgraph.engines.imports import import_transformers
from rlgraph.errors import PlanError, RlgraphError, WorkerDied
from rlgraph.graph.operation import ModelTraits
from rlgraph.plan.channels import lies_in_ray
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent, LocalHostAgent
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES, pickled
from rlgraph.runtime.driver.warm import Wanted, here
from rlgraph.runtime.driver.warm_processes import WarmWorker
from rlgraph.runtime.driver.worker_environment import worker_environment
from rlgraph.runtime.worker.orders import ForkOrder
from rlgraph.runtime.worker.spec import WorkerSpec

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

    def announce(self, specs: Sequence[WorkerSpec]) -> None:
        pass

    def kill(self, actor: Any) -> None:
        actor.kill()

    def let_go(self, actor: Any) -> bool:
        self.kill(actor)
        return False


class ForkedProcesses(WithoutTicks):
    """A `Dispatch` to the warm processes of `rg.warm()`."""

    def __init__(self) -> None:
        warm = here()
        if warm is None:
            raise RlgraphError("a job that was launched inside of rg.warm() starts its workers there too, and the block has been left")
        self._warm = warm
        self._announced: dict[str, Wanted] = {}  # by worker
        self._workers: dict[WarmWorker, Wanted] = {}

    def announce(self, specs: Sequence[WorkerSpec]) -> None:
        self._announced = {spec.worker.name: self._wanted(spec) for spec in specs}
        for spec, wanted in zip(specs, self._announced.values(), strict=True):
            if self._warm.engines and wanted.engine is None and spec.model is not None and spec.model.traits.sampling is not None:
                notices.here.say(f"rg.warm(engines=True) does not keep the engine of '{spec.worker.model}', which each launch starts anew")
        self._warm.announce([*self._announced.values()])

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> WarmWorker:
        wanted = self._announced[spec.worker.name]
        path = tuple(wanted.environment["PYTHONPATH"].split(os.pathsep))
        order = ForkOrder(os.getcwd(), path, pickled(spec), driver, keeps=wanted.engine is not None)
        worker = self._warm.start(wanted, order)
        self._workers[worker] = wanted
        return worker

    def let_go(self, actor: WarmWorker) -> bool:
        wanted = self._workers[actor]
        if wanted.engine is None or self._warm.ended:
            return super().let_go(actor)
        self._warm.keep(wanted, actor)
        return True

    def _wanted(self, spec: WorkerSpec) -> Wanted:
        traits = spec.model.traits if spec.model is not None else ModelTraits()
        engine = kept_as(spec) if self._warm.engines else None
        return Wanted(
            name=spec.worker.name,
            environment={**os.environ, **worker_environment(spec)},
            prepare=traits.prepare or import_transformers,
            opens_gpus=traits.prepare is not None and bool(spec.local_gpus),
            engine=engine,
        )

    def check(self) -> None:
        for worker in self._workers:
            if worker.ended():
                raise WorkerDied(f"worker '{worker.name}' could not be started: its process has ended; what it wrote says why")


def kept_as(spec: WorkerSpec) -> Hashable | None:
    """Name all that makes a worker's engine what it is, by which a later job finds it; None for one that cannot begin again."""
    made_of = spec.model.traits.made_of if spec.model is not None else None
    if made_of is None or (made := made_of()) is None:
        return None
    place = spec.worker.threads, spec.local_gpus, spec.shared, spec.copies, spec.merging_bytes, spec.sequences, spec.exact
    return made, *place


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
