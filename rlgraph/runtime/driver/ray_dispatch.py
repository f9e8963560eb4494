"""Dispatch on Ray: reserve GPUs, start the workers, end them. `ray_cluster` chooses the Ray.

For Ray's own tools it also draws a plan as a Compiled Graph of Ray, with an edge for each channel. A job does not run this graph: its
workers fire in the plan's order over rlgraph's channels, at each tick that the driver sends them.
"""

import contextlib
import importlib.util
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlgraph.errors import DispatchError, PlanError, WorkerDied
from rlgraph.plan.channels import writers_of
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.discovery import span
from rlgraph.runtime.driver.hosts import Ask, FoundHosts, HostAgent, LocalHostAgent, RemoteHostAgent, worker_environment
from rlgraph.runtime.driver.ray_cluster import (
    OWN,
    RAY_S,
    answering_hosts,
    awaited_hosts,
    call_or_abandon,
    call_with_deadline,
    deaths_of,
    draining_hosts,
    gpus_per_host,
    on_host,
    ray_hosts,
    session_folder,
    start_ray,
    stop_ray,
)
from rlgraph.runtime.driver.signals import hold_signals
from rlgraph.runtime.worker.spec import WorkerSpec

# If others use the same Ray, a placement group reserves GPUs, so that two jobs, or a job and other work on Ray, never share one.

RESERVE_S = 30.0  # until GPUs that another job frees are free in Ray
SLIVER = 0.001  # of the resource that identifies a host in Ray: it binds a bundle to this host


class Reservation:
    """Reserves the GPUs of all hosts of a plan, or none. `gpus` maps each host's id to the numbers of its GPUs.

    Raises PlanError if others still hold them after `patience_s`, and at least `RESERVE_S`.
    """

    def __init__(self, plan: Plan, hosts: Sequence[tuple[str, str]], patience_s: float = 0.0) -> None:
        self.gpus: Mapping[str, Sequence[str]] = {}
        self._group: Any = None
        self._holders: list[Any] = []
        wanted = [(host, address, count) for (host, address), count in zip(hosts, gpus_per_host(plan), strict=True) if count]
        if not wanted:
            return
        self._group = placement_group([{"GPU": count, f"node:{address}": SLIVER} for _, address, count in wanted], strategy="SPREAD")
        patience_s = max(patience_s, RESERVE_S)
        with self._freed_on_error():
            if not self._group.wait(patience_s):
                asked = ", ".join(f"{count} of {address}" for _, address, count in wanted)
                free = ray.available_resources().get("GPU", 0)
                raise PlanError(
                    f"the plan needs GPUs that other jobs hold: {asked}; {free:g} are free in all of Ray after {patience_s:g} s. "
                    "Wait until the other job ends, or compile for fewer GPUs"
                )
            for index, (_, _, count) in enumerate(wanted):
                within = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
                self._holders.append(ray.remote(_Holder).options(num_cpus=0, num_gpus=count, scheduling_strategy=within).remote())
            numbers = ray.get([holder.numbers.remote() for holder in self._holders], timeout=RAY_S)
            self.gpus = {host: found for (host, _, _), found in zip(wanted, numbers, strict=True)}

    def free(self) -> None:
        """Free the GPUs. Errors of a Ray that no longer answers are ignored: Ray frees the GPUs of a driver that has ended."""
        with contextlib.suppress(ray.exceptions.RayError):
            for holder in self._holders:
                ray.kill(holder)
            if self._group is not None:
                remove_placement_group(self._group)
        self._holders, self._group = [], None

    @contextlib.contextmanager
    def _freed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.free()
            raise


class _Holder:
    """An actor that holds GPUs, and returns their numbers."""

    def numbers(self) -> list[str]:
        return [str(gpu) for gpu in ray.get_gpu_ids()]


# Dispatch on Ray: start the workers.
#
# A worker's loop over the steps is one call. There are two ways to make it, with the same behaviour: one execution of a Compiled Graph over
# all workers, or one actor call per worker.

KILL_S = 5  # for Ray to accept that an actor must end


@contextlib.contextmanager
def said_by_ray() -> Iterator[None]:
    """Convert Ray's errors to DispatchError, so that no other file needs Ray's classes."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise DispatchError(f"Ray: {error}") from error


class Actors:
    """Workers as Ray actors."""

    def __init__(self) -> None:
        self._preparing: dict[Any, str] = {}
        self._owns_ray = self._started_ray = False
        self._reserved: Reservation | None = None
        self._nodes: Sequence[str] = ()  # the ids of its hosts

    @said_by_ray()
    def begin(self, hosts: int, *, stores: bool = False) -> None:
        with hold_signals("waiting until Ray has started, to end all of it") as stopped:
            self._owns_ray = start_ray(hosts, stores=stores, stopped=stopped)
            self._started_ray = self._owns_ray and hosts == 1  # rlgraph only connects to a Ray of several hosts

    @said_by_ray()
    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        if plan.cluster.hosts == 1:
            self._nodes = [ray.get_runtime_context().get_node_id()]
            return FoundHosts()
        found = awaited_hosts(plan, patience_s) if patience_s else ray_hosts(plan)
        self._reserved = Reservation(plan, found.hosts[: plan.cluster.hosts], patience_s)
        self._nodes = [node for node, _ in found.hosts]
        return found

    @said_by_ray()
    def devices(self) -> Cluster:
        return span(answering_hosts())[0]

    def loses_hosts(self) -> bool:
        try:
            return not draining_hosts().isdisjoint(self._nodes)
        except ray.exceptions.RayError:  # whose death the job hears of otherwise
            return False

    def death(self, hosts: Collection[int]) -> str:
        if self._started_ray:
            return OWN[0].death() if OWN else ""
        return deaths_of([self._nodes[host] for host in hosts if host < len(self._nodes)]) if hosts else ""

    @said_by_ray()
    def host_agent(self, host: str, folder: str) -> HostAgent:
        return RemoteHostAgent(
            _make_asker(ray.remote(LocalHostAgent).options(num_cpus=0, scheduling_strategy=on_host(host)).remote(folder))
        )

    def folders(self) -> Sequence[str]:
        return [session_folder()] if self._started_ray else []

    def end(self) -> None:
        if self._reserved is not None:
            self._reserved.free()
        if self._owns_ray:
            stop_ray()

    @said_by_ray()
    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        variables = worker_environment(spec, self._reserved.gpus.get(host) if self._reserved else None)
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
        if not self._started_ray:  # another program's Ray may reuse a process that has already imported libraries, which read the variables
            options["runtime_env"] = {"env_vars": variables}
        if host:
            options["scheduling_strategy"] = on_host(host)

        def make() -> tuple[Any, Any]:
            actor = ray.remote(_actor_class()).options(**options).remote(variables)
            return actor, actor.prepare.remote(spec, driver)  # unpickled there once the variables are set

        actor, preparing = call_with_deadline(f"Ray made no actor for worker '{spec.worker.name}'", make)
        self._preparing[preparing] = spec.worker.name
        return actor

    def check(self) -> None:
        done, _ = ray.wait(list(self._preparing), num_returns=len(self._preparing), timeout=0)
        for call in done:
            try:
                ray.get(call, timeout=RAY_S)
            except ray.exceptions.RayError as error:
                raise WorkerDied(f"worker '{self._preparing[call]}' could not be started: {error}") from error

    def announce(self, specs: Sequence[WorkerSpec]) -> None:
        pass

    def kill(self, actor: Any) -> None:
        call_or_abandon("the end of a worker", lambda: ray.kill(actor), KILL_S)

    def let_go(self, actor: Any) -> bool:
        self.kill(actor)
        return False


class CompiledGraph(Actors):
    """One Compiled Graph over all workers, under one MultiOutputNode."""

    @said_by_ray()
    def start(self, actors: Sequence[Any]) -> None:
        from ray.dag import InputNode, MultiOutputNode

        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # it logs errors even if the teardown succeeds
        with InputNode() as begins:
            graph = MultiOutputNode([actor.run.bind(begins) for actor in actors])
        self.graph = call_with_deadline("the Compiled Graph did not come up", lambda: graph.experimental_compile(_submit_timeout=-1))
        # If an actor dies before the driver has read from it, the driver aborts in Ray's teardown, so read once now.
        ray.get(self.graph.execute(False), timeout=RAY_S)
        self.running = self.graph.execute(True)

    def stop(self) -> None:
        call_or_abandon("the end of the Compiled Graph", lambda: self.graph.teardown(kill_actors=True), RAY_S)
        del self.running  # only now: dropped before the teardown, the reference would try to read its result


class ActorCalls(Actors):
    """One actor call per worker, for several hosts and for versions of Ray without Compiled Graphs."""

    @said_by_ray()
    def start(self, actors: Sequence[Any]) -> None:
        self.running = [actor.run.remote(True) for actor in actors]

    def stop(self) -> None:
        self.running.clear()


DISPATCHES: dict[str, type[CompiledGraph | ActorCalls]] = {"compiled_graph": CompiledGraph, "calls": ActorCalls}


def _actor_class() -> type:
    """Make the class of the actors. It sets a worker's variables before any import reads them.

    A local class is pickled by value, so its process imports rlgraph only after it has the driver's path. If Ray sets the variables
    (`runtime_env`), each worker starts one more interpreter.
    """

    class WorkerProcess:
        def __init__(self, variables: Mapping[str, str]) -> None:
            import gc
            import os
            import sys

            os.environ.update(variables)
            path = variables["PYTHONPATH"].split(os.pathsep)
            sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
            gc.disable()  # saves a sixth of the import time
            from rlgraph.runtime.worker import process

            gc.enable()
            self._begin = process.Process

        def prepare(self, spec: "WorkerSpec", driver: str) -> None:  # a string, since annotations are pickled too, and would import
            self._worker = self._begin(spec, driver)
            self._worker.prepare()

        def run(self, begins: bool) -> None:
            if begins:
                self._worker.run()

    return WorkerProcess


def _make_asker(actor: Any) -> Ask:
    """Make a function that calls a method of an actor by name, and returns None if the call fails or times out."""

    def ask(method: str, timeout_s: float, *arguments: object) -> Any:
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.RayError:
            return None

    return ask


# The forward graph of a plan as a Compiled Graph of Ray, for Ray's own tools: an edge for each channel.

BY_GRAPHVIZ = (".svg", ".png", ".pdf")


def ray_dag(plan: Plan, actors: Mapping[str, Any]) -> Any:
    """Bind each node of one step to the actors of its workers. Raises PlanError for a worker without an actor, or without `fire`."""
    from ray.dag import InputNode, MultiOutputNode

    missing = [worker.name for worker in plan.workers if worker.name not in actors]
    if missing:
        raise PlanError(f"ray_dag(actors): workers {missing} have no actor; give one for each of {[w.name for w in plan.workers]}")
    unfit = [name for name, actor in actors.items() if not hasattr(actor, "fire")]
    if unfit:
        raise PlanError(f"ray_dag(actors): the actors of {unfit} have no method fire(node, step, *batches), which each node is bound to")
    fired: dict[tuple[str, str], Any] = {}  # by node and worker
    read: set[tuple[str, str]] = set()
    with InputNode() as step:
        for name in (node.name for node in plan.nodes):
            sources = [
                (channel.writer, worker)
                for channel in plan.channels
                if channel.kind == "batch" and name in channel.readers
                for worker in writers_of(plan, channel.writer)
            ]
            for worker in plan.node(name).workers:
                fired[name, worker] = actors[worker].fire.bind(name, step, *(fired[source] for source in sources))
            read.update(sources)
    return MultiOutputNode([node for firing, node in fired.items() if firing not in read])


def draw(compiled: Any, path: Path) -> None:
    """Draw a compiled graph of Ray as Mermaid text, or with Ray's `visualize`. Raises PlanError without graphviz, or for another suffix.

    Ray's "ascii" is not used: it draws a task under a reader of the previous stage, and fails if an edge skips a stage.
    """
    if path.suffix == ".mmd":
        path.write_text(mermaid(compiled), encoding="utf-8")
        return
    if path.suffix not in BY_GRAPHVIZ:
        raise PlanError(f"draw_ray('{path}'): a graph of Ray is drawn as .mmd, {', '.join(BY_GRAPHVIZ)}; choose one of these endings")
    lacking = [
        what
        for what, there in (
            ("the package `graphviz` (pip install graphviz)", importlib.util.find_spec("graphviz")),
            ("the program `dot` (apt install graphviz)", shutil.which("dot")),
        )
        if not there
    ]
    if lacking:
        raise PlanError(f"draw_ray('{path}'): {path.suffix} needs {' and '.join(lacking)}; install it, or end the name in .mmd")
    compiled.visualize(str(path.with_suffix("")), format=path.suffix[1:])


def mermaid(compiled: Any) -> str:
    """Write a compiled graph of Ray as a Mermaid flowchart: its tasks, and an edge for each value that one task reads from another."""
    lines = ["flowchart LR"]
    for index, task in compiled.idx_to_task.items():
        lines.append(f'  t{index}["{_label(task.dag_node)}"]')
        sources = [compiled.dag_node_to_idx[read] for read in task.dag_node.get_args() if read in compiled.dag_node_to_idx]
        lines += [f"  t{source} --> t{index}" for source in sources]
    return "\n".join(lines) + "\n"


def _label(task: Any) -> str:
    """Name a task: the node that it fires, or Ray's class of task for the input and the output."""
    fired = [given for given in task.get_args()[:1] if isinstance(given, str)]
    return "".join(char if char.isalnum() or char in " _-." else "_" for char in (fired or [type(task).__name__])[0])
