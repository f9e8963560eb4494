"""The Ray that a job runs on: one of its own on this machine, or the one that spans the hosts."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlgraph.compiler.plan import Plan
from rlgraph.errors import PlanError
from rlgraph.runtime.driver import ray_token
from rlgraph.runtime.driver.bounded import RAY_S, bounded
from rlgraph.runtime.driver.orphan_cleanup import began

RAY_SEMAPHORE = re.compile(r"sem\.(?:hdr|obj)(\d+)-\d+")
ANSWER_S = 30  # of a host, which may have to start a process for it


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
            "`rlgraph cluster join` on the others, or compile for a smaller cluster"
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
    task = ray.remote(_sign_of_life).options(num_cpus=0, max_retries=0, scheduling_strategy=on_host(host))
    try:
        return bool(ray.get(task.remote(), timeout=ANSWER_S))
    except ray.exceptions.RayError:
        return False


def _sign_of_life() -> bool:
    return True


def start_ray(hosts: int = 1, *, stores: bool = False) -> bool:
    """Start Ray on this machine unless the user has; return whether it is ours to shut down.

    Raises PlanError where several hosts are needed and no Ray spans them.
    """
    if ray.is_initialized():
        return False
    if hosts > 1:
        _connect(hosts)
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


def _connect(hosts: int) -> None:
    """Connect to the Ray that spans the hosts. Raises PlanError where none runs, or where it asks for another token."""
    refused = getattr(ray.exceptions, "AuthenticationError", ())  # older ones know no tokens
    try:
        ray.init(address="auto", logging_level=logging.ERROR)
    except refused as error:
        raise _not_let_in(hosts) from error
    except ConnectionError as error:
        if refused and refused.__name__ in str(error.__cause__):  # Ray wraps it as text
            raise _not_let_in(hosts) from error
        raise PlanError(
            f"the plan takes {hosts} hosts and no Ray runs here; run `rlgraph cluster start` on this host, and on each other one "
            "`rlgraph cluster join THIS_HOST`"
        ) from error


def _not_let_in(hosts: int) -> PlanError:
    return PlanError(f"the plan takes {hosts} hosts, whose Ray did not take this program's token: {ray_token.described()}; {ray_token.FIX}")


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


def on_host(host: str) -> NodeAffinitySchedulingStrategy:
    """Make the strategy that places an actor on a node of Ray."""
    return NodeAffinitySchedulingStrategy(node_id=host, soft=False)
