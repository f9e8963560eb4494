"""Dispatch on Ray: start the workers, tick them, collect what Ray holds. The only file of the runtime that knows Ray.

Two implementations with the same behaviour: a Compiled Graph (one bound method for each worker, whose edges carry step
numbers only), and plain actor calls.
"""

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import ray
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlgraph.compiler.plan import Plan
from rlgraph.errors import ChannelTimeout, DispatchError, PlanError, RlgraphError, WorkerDied
from rlgraph.runtime.driver.hosts import Ask, HostAgent, LocalHostAgent, RemoteHostAgent
from rlgraph.runtime.driver.orphan_cleanup import began
from rlgraph.runtime.driver.signals import held
from rlgraph.runtime.driver.worker_environment import worker_environment
from rlgraph.runtime.worker.process import Process
from rlgraph.runtime.worker.spec import WorkerSpec

log = logging.getLogger("rlgraph.dispatch")

RAY_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")
REHEARSAL = -1  # a tick before the first step, at which no node fires
ANSWER_S = 30  # of a host, which may have to start a process for it
KILL_S = 5  # for Ray to take note that an actor is to end
RAY_S = 60  # for what Ray does at once, unless it hangs

T = TypeVar("T")


@contextlib.contextmanager
def said_by_ray() -> Iterator[None]:
    """Turn the errors of Ray into DispatchError, so that no other file needs to know Ray's classes."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise DispatchError(f"Ray: {error}") from error


class Dispatch(Protocol):
    """Starts workers and ticks them; execution k is step k."""

    def begin(self, hosts: int, *, stores: bool = False) -> None:
        """Start Ray on `hosts` hosts unless it runs; with room for messages if Ray `stores` them."""

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> Sequence[tuple[str, str]]:
        """List (id, address) of the plan's hosts, the driver's first; empty if the driver's host is the only one.

        Raises PlanError if there are fewer hosts, also after waiting `patience_s` for a lost one to come back.
        """

    def folders(self) -> Sequence[str]:
        """List the folders of what `begin` started: those that a killed driver leaves behind."""

    def end(self) -> None:
        """End what `begin` started."""

    def host_agent(self, host: str, folder: str) -> HostAgent:
        """Start the agent that watches the job's workers on another host."""

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        """Start a worker that connects to the driver at its address, and prepares itself."""

    def check(self) -> None:
        """Raise WorkerDied if a worker is known to have failed before it could connect."""

    def start(self, actors: Sequence[Any], window: int) -> None: ...

    def tick(self, step: int) -> None: ...

    def report(self, step: int) -> None: ...

    def stop(self) -> None: ...

    def kill(self, actor: Any) -> None:
        """End a worker, whatever it does."""


class Actors:
    """Workers as Ray actors."""

    def __init__(self) -> None:
        self._preparing: dict[Any, str] = {}
        self._owns_ray = self._started_ray = False

    @said_by_ray()
    def begin(self, hosts: int, *, stores: bool = False) -> None:
        with held("waiting until Ray has started, to end all of it"):
            self._owns_ray = start_ray(hosts, stores=stores)
            self._started_ray = self._owns_ray and hosts == 1  # a Ray of several hosts is only connected to

    @said_by_ray()
    def hosts(self, plan: Plan, patience_s: float = 0.0) -> Sequence[tuple[str, str]]:
        if plan.cluster.hosts == 1:
            return ()
        return returned_hosts(plan, patience_s) if patience_s else ray_hosts(plan)

    @said_by_ray()
    def host_agent(self, host: str, folder: str) -> HostAgent:
        return RemoteHostAgent(_asking(ray.remote(LocalHostAgent).options(num_cpus=0, scheduling_strategy=_on(host)).remote(folder)))

    def folders(self) -> Sequence[str]:
        return [session_folder()] if self._started_ray else []

    def end(self) -> None:
        if self._owns_ray:
            stop_ray()

    @said_by_ray()
    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": worker_environment(spec)}}
        if host:
            options["scheduling_strategy"] = _on(host)

        def make() -> tuple[Any, Any]:
            actor = ray.remote(Process).options(**options).remote(spec, driver)
            return actor, actor.prepare.remote()

        actor, preparing = within(f"Ray made no actor for worker '{spec.worker.name}'", make)
        self._preparing[preparing] = spec.worker.name
        return actor

    def check(self) -> None:
        done, _ = ray.wait(list(self._preparing), num_returns=len(self._preparing), timeout=0)
        for call in done:
            try:
                ray.get(call, timeout=RAY_S)
            except ray.exceptions.RayError as error:
                raise WorkerDied(f"worker '{self._preparing[call]}' could not be started: {error}") from error

    def kill(self, actor: Any) -> None:
        bounded("the end of a worker", lambda: ray.kill(actor), KILL_S)


class CompiledGraph(Actors):
    """One Compiled Graph over all workers, under one MultiOutputNode."""

    @said_by_ray()
    def start(self, actors: Sequence[Any], window: int) -> None:
        from ray.dag import InputNode, MultiOutputNode

        if not hasattr(MultiOutputNode, "experimental_compile"):
            raise RlgraphError(f"Ray {ray.__version__} has no Compiled Graphs; install ray>=2.44,<2.61, or launch with dispatch='calls'")
        logging.getLogger("ray.dag.compiled_dag_node").setLevel(logging.CRITICAL)  # it reports a teardown that went well as errors
        with InputNode() as tick:
            graph = MultiOutputNode([actor.step.bind(tick) for actor in actors])
        self.refs: dict[int, Any] = {}
        # A worker returns from step k once step k + 1 is ticked, so one execution more than the window can be open.
        self.graph = within(
            "the Compiled Graph did not come up",
            lambda: graph.experimental_compile(_max_inflight_executions=window + 2, _submit_timeout=-1),
        )
        # A driver that has not yet read from an actor aborts in Ray's own teardown when that actor dies, so read once now.
        ray.get(self.graph.execute(REHEARSAL), timeout=RAY_S)

    @said_by_ray()
    def tick(self, step: int) -> None:
        self.refs[step] = self.graph.execute(step)

    @said_by_ray()
    def report(self, step: int) -> None:
        ray.get(self.refs.pop(step), timeout=RAY_S)

    def stop(self) -> None:
        bounded("the end of the Compiled Graph", lambda: self.graph.teardown(kill_actors=True), RAY_S)
        self.refs.clear()  # only now: a reference dropped before would still try to read its result


class ActorCalls(Actors):
    """One actor call for each worker and step: for several hosts, and for Ray versions without Compiled Graphs."""

    def start(self, actors: Sequence[Any], window: int) -> None:
        self.actors = actors
        self.refs: dict[int, list[Any]] = {}

    @said_by_ray()
    def tick(self, step: int) -> None:
        self.refs[step] = [actor.step.remote(step) for actor in self.actors]

    @said_by_ray()
    def report(self, step: int) -> None:
        ray.get(self.refs.pop(step), timeout=RAY_S)

    def stop(self) -> None:
        self.refs.clear()


DISPATCHES: dict[str, type[Dispatch]] = {"compiled_graph": CompiledGraph, "calls": ActorCalls}


def ray_hosts(plan: Plan) -> list[tuple[str, str]]:
    """Find (node id, address) of as many living hosts as the plan takes, the driver's first.

    Raises PlanError where Ray has fewer, or one lacks the GPUs.
    """
    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    needed = plan.cluster.hosts
    if len(alive) < needed:
        raise PlanError(
            f"the plan takes {needed} hosts, Ray has {len(alive)}: {[node['NodeManagerAddress'] for node in alive]}; run "
            "`ray start --address=...` on the others, or compile for a smaller cluster"
        )
    for index, node in enumerate(alive[:needed]):
        wanted = len({gpu for worker in plan.workers if worker.host == index for gpu in worker.gpus})
        there = node["Resources"].get("GPU", 0)
        if there < wanted:
            raise PlanError(f"the plan takes {wanted} GPUs of host {index} ({node['NodeManagerAddress']}), which has {there:g}")
    return [(node["NodeID"], node["NodeManagerAddress"]) for node in alive[:needed]]


def returned_hosts(plan: Plan, patience_s: float) -> list[tuple[str, str]]:
    """Find the hosts of a plan, waiting until each of them answers: Ray lists a lost host as alive for a while."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return _answering_hosts(plan)
        except PlanError as error:
            if time.monotonic() > end:
                raise PlanError(f"{error}; waited {patience_s:g} s") from None
        time.sleep(1.0)  # Ray has no event for a host that joins


def _answering_hosts(plan: Plan) -> list[tuple[str, str]]:
    """Find the hosts of a plan. Raises PlanError as `ray_hosts` does, and if one of them does not answer."""
    found = ray_hosts(plan)
    silent = [address for node, address in found[1:] if not _answers(node)]
    if silent:
        raise PlanError(f"the plan takes {len(found)} hosts, and {silent} did not answer; start Ray there again")
    return found


def _answers(host: str) -> bool:
    """Tell whether a host runs a new task."""
    task = ray.remote(_sign_of_life).options(num_cpus=0, max_retries=0, scheduling_strategy=_on(host))
    try:
        return bool(ray.get(task.remote(), timeout=ANSWER_S))
    except ray.exceptions.RayError:
        return False


def _sign_of_life() -> bool:
    return True


def _asking(actor: Any) -> Ask:
    """Make a function that calls a method of an actor by name; None if the call fails, or does not answer in time."""

    def ask(method: str, timeout_s: float, *arguments: object) -> Any:
        try:
            return ray.get(getattr(actor, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.RayError:
            return None

    return ask


def sendable(value: Any) -> bool:
    """Tell whether a value can be sent to a worker."""
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001 (whatever a user's object raises, it cannot be sent)
        return False
    return True


def _on(host: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=host, soft=False)


def bounded(what: str, work: Callable[[], None], seconds: float) -> None:
    """Run a call of Ray that has no deadline, and go on without it if it hangs: the processes that are left are killed next."""
    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        log.error("%s did not come within %g s; the job goes on without it", what, seconds)


def within(otherwise: str, work: Callable[[], T]) -> T:
    """Run a call of Ray that has no deadline and that the job needs. Raises what the call raises, ChannelTimeout if it hangs."""
    done: list[T] = []
    failed: list[BaseException] = []

    def do() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            failed.append(error)

    thread = threading.Thread(target=do, name=otherwise, daemon=True)
    thread.start()
    thread.join(RAY_S)
    if failed:
        raise failed[0]
    if not done:
        raise ChannelTimeout(f"{otherwise} within {RAY_S:g} s: Ray hangs; look at its logs, or start it anew")
    return done[0]


def start_ray(hosts: int = 1, *, stores: bool = False) -> bool:
    """Start Ray on this machine unless the user has; return whether it is ours to shut down.

    Raises PlanError where several hosts are needed and no Ray spans them.
    """
    if ray.is_initialized():
        return False
    if hosts > 1:
        try:
            ray.init(address="auto", logging_level=logging.ERROR)
        except ConnectionError as error:
            raise PlanError(
                f"the plan takes {hosts} hosts and no Ray runs here; run `ray start --head` on this host, and on each other one "
                "`ray start --address=THIS_HOST:6379`"
            ) from error
        return True
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Payload does not go through the object store unless Ray `stores` it, so the smallest one does. Workers get no CPU resource, since
    # they share the cores as the plan says.
    # Ray runs workers at nice 15 unless told otherwise, so that any other process of the machine would starve them.
    # "local": a Ray of its own, also where `ray start` or RAY_ADDRESS names another that runs here.
    with _daemons_apart(), _signals_left_alone():
        ray.init(
            "local",
            include_dashboard=False,
            num_cpus=1,
            object_store_memory=None if stores else 100 * 2**20,  # None: as Ray finds right for the machine
            log_to_driver=True,
            logging_level=logging.ERROR,
            # No worker is started before it is asked for: those of the plan are processes of their own, with variables of their own.
            _system_config={"worker_niceness": 0, "enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
    return True


@contextlib.contextmanager
def _daemons_apart() -> Iterator[None]:
    """Let Ray start its daemons in process groups of their own, so that a signal to the program's group is the program's to handle.

    A SIGTERM of `timeout` or of a job scheduler goes to the whole group. It would end Ray under the steps in flight, and the
    end of the job would then wait for a Ray that is gone. The daemons still die with the driver, because the kernel ends them;
    where it cannot, Ray needs them in the driver's group, and they stay there.
    """
    services = ray._private.services
    if not ray._private.utils.detect_fate_sharing_support_linux():
        yield
        return
    popen = services.ConsolePopen
    services.ConsolePopen = lambda *arguments, **options: popen(*arguments, process_group=0, **options)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _signals_left_alone() -> Iterator[None]:
    """Keep Ray from taking SIGTERM while it starts: its handler exits in the middle of whatever runs, be it with a lock in hand."""
    utils = ray._private.utils
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


def session_folder() -> str:
    """Find the folder in which the Ray that `start_ray` started keeps its logs and sockets."""
    folder: str = ray._private.worker._global_node.get_session_dir_path()
    return folder


def stop_ray() -> None:
    """End the Ray that `start_ray` started, and what it leaves in shared memory when a worker of a Compiled Graph was killed."""
    bounded("the end of Ray", ray.shutdown, RAY_S)
    for path in Path("/dev/shm").glob("sem.*"):
        made_by = RAY_SEMAPHORE.fullmatch(path.name)
        if made_by and began(int(made_by[1])) < 0:  # of a living process it is in use, perhaps another job's
            path.unlink(missing_ok=True)
