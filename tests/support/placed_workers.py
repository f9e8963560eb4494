"""Workers forked on hosts of namespaces, without Ray: a server on each host does what Ray's daemon does there.

Its calls go over the network, so a host that is cut off answers none.
"""

import os
import signal
import socket
import struct
import time
from typing import Any

from ray import cloudpickle
from support import forked_workers, namespaces

from rlgraph.errors import PlanError, WorkerDied
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent, LocalHostAgent, RemoteHostAgent
from rlgraph.runtime.driver.ray_dispatch import DISPATCHES
from rlgraph.runtime.worker.spec import WorkerSpec

PORT = 7000
CALL_S = 20.0


def serve(n: int) -> None:
    """Answer calls on host n, one after another."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    agents: dict[str, LocalHostAgent] = {}
    with socket.create_server((namespaces.address(n), PORT), backlog=64) as listener:
        while True:
            link, _ = listener.accept()
            link.settimeout(5)
            try:
                with link:
                    what, *arguments = cloudpickle.loads(_received(link))
                    link.sendall(_framed(_answer(listener, agents, what, arguments)))
            except (OSError, EOFError):
                continue  # the caller went away, or was cut off


def _answer(listener: socket.socket, agents: dict[str, LocalHostAgent], what: str, arguments: list[Any]) -> Any:
    if what == "create":
        pid = os.fork()
        if pid == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                forked_workers.serve(*arguments)
            finally:
                os._exit(1)
        return pid
    if what in ("kill", "runs"):
        try:
            os.kill(arguments[0], signal.SIGKILL if what == "kill" else 0)
        except ProcessLookupError:
            return False
    if what == "ask":
        folder, method, *rest = arguments
        agent = agents.setdefault(folder, LocalHostAgent(folder))
        return getattr(agent, method)(*rest)
    return True


def _framed(value: Any) -> bytes:
    data = cloudpickle.dumps(value)
    return struct.pack("!I", len(data)) + data


def _received(link: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        found = b""
        while len(found) < count:
            part = link.recv(count - len(found))
            if not part:
                raise EOFError
            found += part
        return found

    return exactly(struct.unpack("!I", exactly(4))[0])


def call(n: int, timeout_s: float, *what: Any) -> Any:
    """Call the server of host n; None without an answer in time."""
    try:
        with socket.create_connection((namespaces.address(n), PORT), timeout=timeout_s) as link:
            link.sendall(_framed(what))
            return cloudpickle.loads(_received(link))
    except (OSError, EOFError):
        return None


class Placed(forked_workers.Forked):
    """A `Dispatch` over the hosts of namespaces, `most` of which a plan has had; host 1 is the driver's."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        self.created: dict[str, tuple[int, int]] = {}  # the host and process of each worker

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        Placed.most = max(Placed.most, plan.cluster.hosts)
        end = time.monotonic() + max(patience_s, 5.0)  # a host that was cut off until now may need seconds
        while len(there := self._answering()) < plan.cluster.hosts:
            if time.monotonic() > end:
                raise PlanError(f"only hosts {there} of {plan.cluster.hosts} answer")
            time.sleep(0.2)
        return FoundHosts([(str(n), namespaces.address(n)) for n in there[: plan.cluster.hosts]])

    def devices(self) -> Cluster:
        hosts = len(self._answering())
        return Cluster(cpus=2 * hosts, hosts=hosts)

    def _answering(self) -> list[int]:
        return [n for n in range(1, Placed.most + 1) if call(n, 1.0, "read_clock") is not None]

    def host_agent(self, host: str, folder: str) -> HostAgent:
        return RemoteHostAgent(lambda method, timeout_s, *rest: call(int(host), timeout_s, "ask", folder, method, *rest))

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> Any:
        pid = call(int(host), CALL_S, "create", cloudpickle.dumps(spec), driver)
        if pid is None:
            raise WorkerDied(f"worker '{spec.worker.name}' could not be started: host {host} does not answer")
        self.created[spec.worker.name] = int(host), pid
        return int(host), pid

    def check(self) -> None:
        pass

    def kill(self, actor: Any) -> None:
        call(actor[0], 1.0, "kill", actor[1])


DISPATCHES["placed"] = Placed
