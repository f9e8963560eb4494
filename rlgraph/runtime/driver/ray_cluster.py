"""Start or find the Ray that a job runs on: a separate one on this machine, or the one that spans the hosts."""

import atexit
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlgraph import notices
from rlgraph.errors import ChannelTimeout, DispatchError, PlanError, RlgraphError
from rlgraph.nodes.environments.leases import began, hold, lease
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts, RayHost, local_cluster
from rlgraph.runtime.driver.orphan_cleanup import free_semaphores, sweep_command

# Ray's token: the mode in which Ray requires it, and its file. Whoever knows it can run code on every host of the cluster.

MODE, FILE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"  # Ray's own names
FIX = f"copy the head's token there, or name its file by {MODE}=token {FILE}=FILE; `rlgraph cluster start` prints where the head has it"


def token_file() -> Path:
    """The file in which Ray looks for its token."""
    named = os.environ.get(FILE)
    return Path(named or os.path.expanduser("~/.ray/auth_token"))


def make_token() -> None:
    """Write the token for Rays that this user starts, if there is none. Programs that start at the same time then share one token.

    Ray would write the file in place: another program could read half of it, or overwrite a token that is in use.
    """
    file = token_file()
    chosen = os.environ.get(MODE, "token") not in ("", "token") or any(os.environ.get(name) for name in (FILE, TOKEN))
    if chosen or os.path.exists(file):
        return
    try:
        if not file.is_absolute():
            raise FileNotFoundError("this user has no home")
        _write(file)
    except FileExistsError:
        return
    except OSError as error:  # containers run as a user without a home
        folder = Path(tempfile.mkdtemp(prefix="rlgraph-token-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        file = folder / "auth_token"
        _write(file)
        os.environ[FILE] = str(file)
        notices.here.say(f"Ray's token cannot be written to its usual file ({error}): it lies in '{folder}' until this program ends")


def _write(file: Path) -> None:
    """Write a token that no other user can read, atomically. Raises FileExistsError if another program was first."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent) as whole:
        whole.write(secrets.token_hex(32))
        whole.flush()
        os.link(whole.name, file)


def describe_mode() -> str:
    """Name Ray's mode here, and the file or variable from which it reads the token."""
    mode = os.environ.get(MODE)
    said = f"{MODE} is {mode}" if mode else f"{MODE} is not set"
    if os.environ.get(TOKEN):
        return f"{said} here, and the token is that of the variable {TOKEN}, before any file"
    file = token_file()
    there = "is not the head's" if file.is_file() else "does not exist"
    return f"{said} here, and the token's file is {file}, which {there}"


# Deadlines for calls of Ray that have none.

dispatch_log = logging.getLogger("rlgraph.dispatch")

RAY_S = 180  # for calls that return at once unless Ray hangs; on a busy machine it may have to start a process

T = TypeVar("T")


def call_or_abandon(what: str, work: Callable[[], None], seconds: float) -> None:
    """Run a call of Ray that has no deadline, and continue without it if it hangs: the caller kills the remaining processes next."""
    thread = threading.Thread(target=work, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        dispatch_log.error("%s did not come within %g s; the job continues without it", what, seconds)


def call_with_deadline(otherwise: str, work: Callable[[], T]) -> T:
    """Run a call of Ray that has no deadline and that the job needs. Raises the call's error, or ChannelTimeout if it hangs."""
    done: list[T] = []
    failed: list[BaseException] = []

    def do() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 (raised again for its waiter)
            failed.append(error)

    thread = threading.Thread(target=do, name=otherwise, daemon=True)
    thread.start()
    thread.join(RAY_S)
    if failed:
        raise failed[0]
    if not done:
        raise ChannelTimeout(f"{otherwise} within {RAY_S:g} s: Ray hangs; look at its logs, or start it again")
    return done[0]


ANSWER_S = 30  # for a host to answer; it may have to start a process
SESSION = re.compile(r"/[^=,\s]*/session_[0-9][^/,\s]*")
AGENTS = {  # by the names of their logs: parts of their command before and after they set their title
    "dashboard_agent": (b"dashboard/agent.py", b"ray::DashboardAgent"),
    "runtime_env_agent": (b"runtime_env/agent/main.py", b"ray::RuntimeEnvAgent"),
}
AGENT = re.compile(r"Ray agent failed, agent_name = (\w+)")  # in the log of its raylet
END = 4096  # bytes of a log that are read
LIST_S = 3.0  # for Ray's list of hosts
ROOM = 32 << 20  # bytes of Ray's temporary folder: logs, sockets, ports
LOOK_S = 0.1  # between two looks at a start
STOPPED_S = 20.0  # for a start, with all processes that it began, to end after a signal
LAST_S = 60.0  # for the thread of a Ray that died to notice it
STARTS = 3  # attempts to start Ray if one of its processes ends during the start
START_S = 180  # for each process of Ray to start: on a busy machine it needs more than Ray's 30 s
SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's own name
TOLD_S = 10.0  # between two lines about hosts that a job waits for
log = logging.getLogger("rlgraph.hosts")


def ray_hosts(plan: Plan) -> FoundHosts:
    """Find a living host of Ray for each host of the plan; prefer the driver's host if it has the GPUs.

    Hosts of the plan that need most GPUs choose first, each the host with the fewest that suffice. Raises PlanError if Ray has fewer
    hosts, or none with enough GPUs.
    """
    alive = _living_nodes()
    here = ray.get_runtime_context().get_node_id()
    needed = plan.cluster.hosts
    if len(alive) < needed:
        raise PlanError(
            f"the plan needs {needed} hosts, Ray has {len(alive)}: {sorted(node['NodeManagerAddress'] for node in alive)}; run "
            "`rlgraph cluster join` on the others, or compile for a smaller cluster"
        )
    there = {node["NodeID"]: _gpus(node) for node in alive}
    wanted = gpus_per_host(plan)
    left = sorted(alive, key=lambda node: (node["NodeID"] != here, there[node["NodeID"]], node["NodeManagerAddress"], node["NodeID"]))
    chosen: dict[int, tuple[str, str]] = {}
    for host in sorted(range(needed), key=lambda host: (-wanted[host], host)):
        node = next((node for node in left if there[node["NodeID"]] >= wanted[host]), None)
        if node is None:
            have = {node["NodeManagerAddress"]: there[node["NodeID"]] for node in alive}
            raise PlanError(
                f"the plan needs {wanted[host]} GPUs on its host {host}; Ray's hosts have {have}, and no host with that many is left"
            )
        left.remove(node)
        chosen[host] = node["NodeID"], node["NodeManagerAddress"]
    found = [chosen[host] for host in range(needed)]
    ids = [node for node, _ in found]
    if here in ids:
        return FoundHosts(found, ids.index(here))
    return FoundHosts([*found, *((node["NodeID"], node["NodeManagerAddress"]) for node in left if node["NodeID"] == here)], needed)


def _living_nodes() -> list[dict[str, Any]]:
    draining = draining_hosts()
    return [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in draining]


def draining_hosts() -> set[str]:
    """The ids of other hosts that are about to end: a cloud has announced that it takes them back, or a user ran `ray drain-node`."""
    return set(ray._private.state.state.get_draining_nodes()) - {ray.get_runtime_context().get_node_id()}


def _gpus(node: dict[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def living_hosts(*, connected: bool) -> list[RayHost]:
    """List the living hosts, with their devices, of the Ray that this program is `connected` to, or that Ray finds.

    Raises PlanError if Ray refuses this program's token, or a host does not answer.
    """
    if connected:
        return _described_nodes(_living_nodes())
    _connect("rg.cluster() looks for hosts")
    try:
        return _described_nodes(_living_nodes())
    finally:
        call_or_abandon("the end of Ray", ray.shutdown, RAY_S)


def answering_hosts() -> list[RayHost]:
    """List the hosts of this program's Ray that answer, with their devices: Ray lists a lost host as alive for a while."""
    here = ray.get_runtime_context().get_node_id()
    return _described_nodes([node for node in _living_nodes() if node["NodeID"] == here or _answers(node["NodeID"])])


def _described_nodes(alive: Sequence[dict[str, Any]]) -> list[RayHost]:
    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in alive}
    task = ray.remote(num_cpus=0, max_retries=0)(_devices)
    asked = {host: task.options(scheduling_strategy=on_host(host)).remote() for host in nodes if host != here}
    found = []
    for host, node in nodes.items():
        try:
            devices = ray.get(asked[host], timeout=RAY_S) if host in asked else local_cluster()
        except ray.exceptions.RayError as error:
            raise PlanError(
                f"rg.cluster(): {node['NodeManagerAddress']} did not describe its devices ({str(error).strip().splitlines()[-1]}); start "
                "Ray there again, in the environment that this program runs in"
            ) from error
        found.append(RayHost(host, node["NodeManagerAddress"], _gpus(node), int(node["Resources"].get("CPU", 0)), devices, host == here))
    return found


def _devices() -> Cluster:
    """Describe the devices of the host that runs this task."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides all GPUs from a task without reserved GPUs
    return local_cluster()


def gpus_per_host(plan: Plan) -> list[int]:
    """Count the GPUs that the plan uses on each of its hosts, up to the last one."""
    per_node = plan.cluster.gpus_per_node
    used = [(worker.host, gpu - worker.host * per_node + 1) for worker in plan.workers for gpu in worker.gpus]
    return [max((count for at, count in used if at == host), default=0) for host in range(plan.cluster.hosts)]


def awaited_hosts(plan: Plan, patience_s: float) -> FoundHosts:
    """Wait until each host of a plan answers, and return the hosts: Ray lists a lost host as alive for a while.

    If Ray starts hosts on demand, ask it for hosts with the plan's GPUs. Every `TOLD_S` log what is still missing.
    """
    began_s = told_s = time.monotonic()
    with _asked_for(plan):
        while True:
            try:
                return _answering_hosts(plan)
            except PlanError as error:
                now_s = time.monotonic()
                if now_s - began_s > patience_s:
                    raise PlanError(f"{error}; waited {patience_s:g} s") from None
            if now_s - told_s >= TOLD_S:
                told_s = now_s
                log.warning("waiting for hosts, %.0f s of %g s: %s", now_s - began_s, patience_s, _describe_shortage(plan))
            time.sleep(1.0)  # Ray has no event for a host that joins


def _describe_shortage(plan: Plan) -> str:
    """Describe what a plan requires and what Ray has."""
    there = [_gpus(node) for node in _living_nodes()]
    wanted = gpus_per_host(plan)
    if not any(wanted):
        return f"the plan takes {len(wanted)} hosts, Ray has {len(there)}"
    return f"the plan takes hosts with {sorted(wanted, reverse=True)} GPUs, Ray has hosts with {sorted(there, reverse=True)}"


@contextlib.contextmanager
def _asked_for(plan: Plan) -> Iterator[None]:
    """Request hosts with these GPUs, which an autoscaling Ray starts; others ignore the request."""
    bundles = [{"GPU": count} for count in gpus_per_host(plan) if count]
    if bundles:
        request_resources(bundles=bundles)
    try:
        yield
    finally:
        if bundles:
            request_resources(bundles=[])


def _answering_hosts(plan: Plan) -> FoundHosts:
    """Find the hosts of a plan. Raises PlanError as `ray_hosts` does, and if one of them does not answer."""
    found = ray_hosts(plan)
    silent = [address for at, (node, address) in enumerate(found.hosts) if at != found.driver and not _answers(node)]
    if silent:
        raise PlanError(f"the plan needs {plan.cluster.hosts} hosts, and {silent} did not answer; start Ray there again")
    return found


def _answers(host: str) -> bool:
    """Whether a host runs a new task."""
    task = ray.remote(_sign_of_life).options(num_cpus=0, max_retries=0, scheduling_strategy=on_host(host))
    try:
        return bool(ray.get(task.remote(), timeout=ANSWER_S))
    except ray.exceptions.RayError:
        return False


def _sign_of_life() -> bool:
    return True


def start_ray(hosts: int = 1, *, stores: bool = False, stopped: Callable[[], bool] = lambda: False) -> bool:
    """Start Ray on this machine unless the user has; return whether it is ours to shut down.

    A start that hangs ends soon after `stopped` has returned True. Raises PlanError if several hosts are needed and no Ray spans them, and
    DispatchError if Ray cannot start, or its processes end as they start: nothing of it is left then.
    """
    if ray.is_initialized():
        return False
    if hosts > 1:
        _connect(f"the plan takes {hosts} hosts")
        return True
    check_loopback()
    check_temporary()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for process in ("gcs_server_port", "raylet_start"):
        os.environ.setdefault(f"RAY_{process}_wait_time_s", str(START_S))
    make_token()
    for left in reversed(range(STARTS)):
        try:
            OWN[:] = [LocalRay(stores=stores, stopped=stopped)]
            break
        except _Died as died:
            if stopped():
                raise DispatchError(str(died)) from None
            if not left:
                raise DispatchError(
                    f"{died}; {STARTS} starts ended like this, at a load of {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores; launch "
                    "again when the machine is less busy"
                ) from None
            log.warning("%s; starting Ray again", died)
    return True


def check_loopback() -> None:
    """Raise DispatchError unless this machine reaches itself, as Ray's processes do: Ray would wait for hours."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5.0):
            pass
    except OSError as error:
        raise DispatchError(
            f"Ray cannot start: this machine does not reach itself at 127.0.0.1 ({error.strerror or error}). Its network interface lo is "
            "down, or a firewall blocks it; bring lo up with `ip link set lo up`"
        ) from None


def check_temporary() -> None:
    """Raise DispatchError unless Ray's temporary folder can be written and has room: without, its processes end as they start."""
    folder = os.path.join(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")), "ray")
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, ROOM)
    except OSError as error:
        raise DispatchError(
            f"Ray cannot start: its temporary folder '{folder}' cannot hold {ROOM >> 20} MiB ({error.strerror or error}); free room there, "
            "or set RAY_TMPDIR to a folder that this user can write, with a short path"
        ) from None


class LocalRay:
    """The Ray that only this program uses, with its `daemons`.

    A separate thread starts it, so that no caller waits for Ray without a deadline. This thread runs as long as Ray: the kernel ends the
    daemons when the thread that started them ends. Leases end the raylet's agents, which stay for a minute if only the raylet is killed.
    """

    def __init__(self, *, stores: bool = False, stopped: Callable[[], bool] = lambda: False) -> None:
        self.daemons: list[Daemon] = []
        self._agents: list[RayAgent] = []
        self._leases = [lease(sweep_command())]
        self._over, self._started = threading.Event(), Future[None]()
        self._thread = threading.Thread(target=self._run, args=(stores,), name="Ray", daemon=True)
        self._thread.start()
        began_s = time.monotonic()
        end = began_s + START_S
        try:
            while not self._started.done():
                self._check()
                if time.monotonic() > (end := min(end, time.monotonic() + STOPPED_S) if stopped() else end):
                    raise DispatchError(f"Ray has not started within {time.monotonic() - began_s:.0f} s{self._logs()}")
                wait([self._started], timeout=LOOK_S)
            self._started.result()
            self._agents = [agent for daemon in self.daemons if daemon.name == "raylet" for agent in agents_of(daemon.process.pid)]
        except BaseException as error:
            died = self.death()
            self.end()
            if died:
                self._thread.join(LAST_S)
                raise (DispatchError if self._thread.is_alive() else _Died)(f"{died}, while Ray started") from None
            if isinstance(error, RlgraphError | ray.exceptions.RayError) or not isinstance(error, Exception):
                raise
            raise DispatchError(f"Ray did not start: {type(error).__name__}: {error}{self._logs()}") from error

    def death(self) -> str:
        """Name a process of this Ray that ended though Ray needs it, with its log; empty if none did."""
        ended = next((agent for agent in self._agents if began(agent.pid) != agent.began), None)
        agents = f"Ray's {ended.name} on this host ended{_ends(self.daemons[0].logs / f'{ended.name}.log')}" if ended else ""
        return next(filter(None, (daemon.death() for daemon in self.daemons)), agents)

    def _check(self) -> None:
        if died := self.death():
            raise _Died(died)

    def end(self) -> None:
        """End the daemons that are left, agents that a daemon started included."""
        self._over.set()
        for process in (daemon.process for daemon in self.daemons):
            with contextlib.suppress(ProcessLookupError):  # its group has ended, or was the program's group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
        for held in self._leases:
            held.end()

    def _run(self, stores: bool) -> None:
        try:
            with _separate_process_groups(self._start_daemon), _preserve_signal_handlers(), _patient(self._check), _no_submitted_job():
                _start_local_ray(stores=stores)
        except BaseException as error:  # noqa: BLE001 (raised again for its waiter)
            self._started.set_exception(error)
        else:
            self._started.set_result(None)
            self._over.wait()

    def _start_daemon(
        self, start: "Callable[..., subprocess.Popen[bytes]]", command: list[str], **options: Any
    ) -> "subprocess.Popen[bytes]":
        if self._over.is_set():
            raise _Died("Ray was stopped while it started")
        # Ray would run Python between fork and exec. With many libraries loaded this can crash, since a library may run code in the fork.
        launched = [sys.executable, "-ISc", BEFORE_DAEMON, *command] if options.pop("preexec_fn", None) else command
        process = start(launched, **options)
        self.daemons.append(Daemon.of(process, command))
        self._leases.append(hold(process.pid))
        return process

    def _logs(self) -> str:
        return f"; its logs are in {self.daemons[0].logs}" if self.daemons else ""


OWN: list[LocalRay] = []  # the Ray that this program started, while it runs

# Ray's own setup of a daemon's process, before exec: the process ends with the thread that started it, and ignores Ctrl-C.
BEFORE_DAEMON = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
os.execv(sys.argv[1], sys.argv[1:])
"""


def _start_local_ray(*, stores: bool) -> None:
    """Start a Ray that only this program uses."""
    # Messages do not use the object store unless Ray `stores` them, so the smallest store suffices. Workers reserve no CPUs of Ray, since
    # the plan assigns the cores.
    # By default Ray runs workers at nice 15, so that any other process on the machine would starve them.
    # "local" starts a separate Ray even if `ray start` or RAY_ADDRESS names another one.
    ray.init(
        "local",
        include_dashboard=False,
        num_cpus=1,
        object_store_memory=None if stores else 100 * 2**20,  # None: Ray chooses the size
        log_to_driver=True,
        logging_level=logging.ERROR,
        # Ray starts no worker in advance: each worker of the plan is a new process with its own variables.
        _system_config={
            "worker_niceness": 0,
            "enable_worker_prestart": False,
            "prestart_worker_first_driver": False,
            "worker_register_timeout_seconds": START_S,
        },
    )


class _Died(Exception):
    """A daemon of Ray ended while Ray started: a raylet waits 15 s for its agent, which is too short on a busy machine."""


@dataclass(frozen=True)
class Daemon:
    """A process that Ray started on this host: its program, and the folder of its logs."""

    process: "subprocess.Popen[bytes]"
    name: str
    logs: Path

    @staticmethod
    def of(process: "subprocess.Popen[bytes]", command: Sequence[str]) -> "Daemon":
        """Read name and logs from the command."""
        folder = SESSION.search(" ".join(command))
        return Daemon(process, Path(command[0]).name, Path(folder[0] if folder else "") / "logs")

    def death(self) -> str:
        """Report that it, or an agent with which it ends, ended although Ray needs it; empty for other daemons."""
        if self.name not in ("raylet", "gcs_server"):
            return ""
        if agent := AGENT.search(_last_lines(self.logs / f"{self.name}.err")):
            return f"Ray's {agent[1]} on this host ended{_ends(self.logs / f'{agent[1]}.log')}"
        if self.process.poll() is None:
            return ""
        return f"Ray's {self.name} on this host ended with status {self.process.returncode}{_ends(self.logs / f'{self.name}.err')}"


class RayAgent(NamedTuple):
    """A process that a raylet started; the raylet ends with it."""

    name: str
    pid: int
    began: int


def agents_of(raylet: int) -> list[RayAgent]:
    """Find the agents of a raylet among its children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if stat.read_text().rpartition(")")[2].split()[1] == str(raylet):
                command, pid = (stat.parent / "cmdline").read_bytes(), int(stat.parent.name)
                found += [RayAgent(name, pid, began(pid)) for name, marks in AGENTS.items() if any(mark in command for mark in marks)]
    return found


def _ends(log_file: Path) -> str:
    """Quote the last line of a log; if it is empty, name the log of outputs, which is long."""
    lines = [line for line in _last_lines(log_file).splitlines() if line.strip()]
    return f"; its log {log_file} ends: {lines[-1].strip():.200}" if lines else f"; its log is {log_file.with_suffix('.out')}"


def _last_lines(log_file: Path) -> str:
    with contextlib.suppress(OSError), log_file.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - END, 0))
        return file.read(END).decode(errors="replace")
    return ""


def deaths_of(nodes: Collection[str]) -> str:
    """Report why Ray ended on hosts, which are listed by id; empty if it runs there, or Ray does not report a reason."""
    known: list[dict[str, Any]] = []
    call_or_abandon("Ray's list of hosts", lambda: known.extend(ray.nodes()), LIST_S)
    ended = {node["NodeManagerAddress"]: node.get("DeathReasonMessage") for node in known if node["NodeID"] in nodes and not node["Alive"]}
    told = [
        f"Ray ended on {address}: {why.rstrip('.')}; its logs are in {session_folder()}/logs there" for address, why in ended.items() if why
    ]
    return "; ".join(told)


def _connect(purpose: str) -> None:
    """Connect to the Ray that spans the hosts. Raises PlanError if none runs, or if it requires another token."""
    refused = getattr(ray.exceptions, "AuthenticationError", ())  # older versions have no tokens
    refusal = PlanError(f"{purpose}, whose Ray did not take this program's token: {describe_mode()}; {FIX}")
    try:
        with _preserve_signal_handlers():
            call_with_deadline("Ray did not let this program in", lambda: ray.init(address="auto", logging_level=logging.ERROR))
    except refused as error:
        raise refusal from error
    except ConnectionError as error:
        if refused and refused.__name__ in str(error.__cause__):  # Ray wraps it as text
            raise refusal from error
        raise PlanError(
            f"{purpose} and no Ray runs here; run `rlgraph cluster start` on this host, and on each other one "
            "`rlgraph cluster join THIS_HOST`"
        ) from error


@contextlib.contextmanager
def _separate_process_groups(start_daemon: Callable[..., Any]) -> Iterator[None]:
    """Have Ray start its daemons through a function, each in a separate process group, so that only the program handles signals to its
    group.

    `timeout` and job schedulers send SIGTERM to the whole group. Ray would end while steps are in flight, and the end of the job would
    then wait for a Ray that no longer runs. The daemons still end with the driver, because the kernel kills them; where the kernel
    cannot, Ray needs them in the driver's group, and they stay there.
    """
    services = ray._private.services
    popen = services.ConsolePopen
    apart = {"process_group": 0} if ray._private.utils.detect_fate_sharing_support_linux() else {}

    services.ConsolePopen = partial(start_daemon, popen, **apart)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _no_submitted_job() -> Iterator[None]:
    """Hide the settings of `ray job submit`: they name a working folder that only the Ray of the submitted job has."""
    held = os.environ.pop(SUBMITTED_JOB, None)
    try:
        yield
    finally:
        if held is not None:
            os.environ[SUBMITTED_JOB] = held


@contextlib.contextmanager
def _preserve_signal_handlers() -> Iterator[None]:
    """Keep Ray from handling SIGTERM while it starts: its handler exits in the middle of any code, even if this holds a lock."""
    utils = ray._private.utils
    set_handler = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler


@contextlib.contextmanager
def _patient(check: Callable[[], None]) -> Iterator[None]:
    """Wait up to `START_S` for Ray's node to start: Ray's fixed 30 s end before its processes are loaded on a busy machine.

    While Ray waits for the port of its gcs_server, no other thread runs, even if the gcs_server has ended. Here it looks once per call.
    Raises the error of `check`, e.g. once a daemon has ended.
    """
    services, launcher = ray._private.services, ray._private.node
    get_node = services.get_node
    get_port: Any = vars(launcher).get("wait_for_persisted_port")  # older versions have no such port

    def in_time(call: Callable[..., Any], *which: Any, **options: Any) -> Any:
        end = time.monotonic() + START_S
        while True:
            try:
                return call(*which, **options)
            except RuntimeError:  # it has not registered yet
                check()
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    services.get_node = partial(in_time, get_node)
    launcher.wait_for_persisted_port = lambda *which, timeout_ms: in_time(get_port, *which, timeout_ms=min(timeout_ms, 1))
    try:
        yield
    finally:
        services.get_node, launcher.wait_for_persisted_port = get_node, get_port


def session_folder() -> str:
    """Find the folder with the logs and sockets of the Ray that `start_ray` started."""
    folder: str = ray._private.worker._global_node.get_session_dir_path()
    return folder


def stop_ray() -> None:
    """End the Ray that `start_ray` started, and free the shared memory that it leaves if a worker of a Compiled Graph was killed."""
    call_or_abandon("the end of Ray", ray.shutdown, RAY_S)
    while OWN:
        OWN.pop().end()
    free_semaphores()


def on_host(host: str) -> NodeAffinitySchedulingStrategy:
    """Make the strategy that places an actor on a node of Ray."""
    return NodeAffinitySchedulingStrategy(node_id=host, soft=False)
