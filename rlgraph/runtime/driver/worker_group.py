"""The driver's side of the workers' connections: find which workers are ready, have reported, or are to blame."""

import contextlib
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from multiprocessing import AuthenticationError
from typing import TypeVar

import msgspec

from rlgraph.channels.host.connection import Connection
from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelTimeout, DispatchError, NodeError, RlgraphError, WorkerDied, show_value
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedLoop
from rlgraph.runtime import messages
from rlgraph.runtime.driver.hosts import Hosts
from rlgraph.runtime.driver.watchdog import LOOK_S, Watchdog, connection_error, find_disconnected, host_error
from rlgraph.runtime.worker.activity import Heartbeat, describe_activity

T = TypeVar("T")
CONSEQUENCES = {kind.__name__ for kind in (ChannelBroken, ChannelClosed, ChannelTimeout)}  # of another failure
IN_COLLECTIVES = {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError"}  # PyTorch's, if a peer has ended
START_LEAST_S = 300.0  # starting processes, importing libraries and loading engines may exceed the deadline for steps
SETTLE_S = 1.0  # after the first failure, to wait for a better explanation
ANSWERED_S = 1.0  # to read messages that were on their way when a host fell silent
HANDSHAKE_S = 10.0  # a process that connects and stays silent for this long is dropped, so that others can connect


class WorkerGroup:
    """All workers of a job, as seen by the driver. It sleeps until a message arrives, and checks the workers if none arrives for long."""

    def __init__(self, plan: Plan, deadline_s: float, ray_death: Callable[[Collection[int]], str] = lambda hosts: "") -> None:
        self.plan, self.deadline_s, self._ray_death, self._look_at_ray_s = plan, deadline_s, ray_death, 0.0
        self.start_s = max(deadline_s, START_LEAST_S)
        self.pids: dict[str, int] = {}
        self.connections: dict[str, Connection] = {}
        self.watchdog = Watchdog(plan, deadline_s, self.states, self.stacks)
        self._names = {worker.name for worker in plan.workers}
        self._hosts: Hosts | None = None
        self._processes: dict[str, int] = {}  # handles, by worker
        self._selector = selectors.DefaultSelector()
        self._opened: dict[str, Mapping[str, str]] = {}
        self.apart: set[str] = set()  # workers whose hosts do not share the folder of checkpoints
        self._ready: set[str] = set()
        self._reports: dict[int, dict[str, messages.Report]] = {}
        self.saved: list[messages.Saved | messages.NotSaved] = []  # unread messages about checkpoints
        self.sampled: list[messages.SampledRows] = []  # unread
        self._shards: dict[str, messages.ShardsDescribed] = {}
        self._written: dict[str, messages.ShardsWritten] = {}
        self._failures: list[messages.Failure] = []
        self._dead: dict[str, str] = {}  # with the reason, if the connection gave one
        self._heard_s: dict[str, float] = {}  # time of each worker's last message

    def welcome(self, listener: socket.socket, authkey: bytes, hosts: Hosts, *, encrypt: bool = False) -> threading.Thread:
        """Accept the workers' connections on a thread, which ends after the last connection, or when the listener closes."""
        self._hosts = hosts
        thread = threading.Thread(target=self._accept, args=(listener, authkey, encrypt), name="welcome workers", daemon=True)
        thread.start()
        return thread

    def _accept(self, listener: socket.socket, authkey: bytes, encrypt: bool) -> None:
        while len(self.connections) < len(self.plan.workers):
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # the listener was closed because the start has ended
            with contextlib.suppress(AuthenticationError, EOFError, OSError):  # not a worker of this job
                self._enter(Connection(sock, authkey, HANDSHAKE_S, server=True, encrypt=encrypt))

    def _enter(self, connection: Connection) -> None:
        hello = messages.receive(connection)
        if not isinstance(hello, messages.Hello) or hello.worker not in self._names or hello.worker in self.connections:
            connection.close()
            return
        if connection.local:  # on other hosts only Ray's `kill` is possible
            self._processes[hello.worker] = os.pidfd_open(connection.pid)
        self.pids[hello.worker] = hello.pid
        self.connections[hello.worker] = connection
        self._selector.register(connection, selectors.EVENT_READ, hello.worker)

    def tell(self, message: messages.Message, to: Collection[str] | None = None) -> None:
        """Send a message to every connected worker, or to some of them."""
        for connection in [connection for name, connection in self.connections.items() if to is None or name in to]:
            with contextlib.suppress(OSError):  # the worker is dead: the next `_listen` reports it
                messages.send(connection, message)

    def until_open(self, on_wait: Callable[[list[str]], None]) -> dict[str, str]:
        """Wait until every worker listens, and collect the addresses; call `on_wait` with the missing workers repeatedly.

        Raises the error of `on_wait`, or of the first worker that failed.
        """
        since_s = time.monotonic()
        while missing := [worker.name for worker in self.plan.workers if worker.name not in self._opened]:
            on_wait(missing)
            self._listen([name for name in missing if name in self.connections], since_s, self.start_s)
        return {planned: address for addresses in self._opened.values() for planned, address in addresses.items()}

    def await_engines(self, on_wait: Callable[[list[str]], None]) -> None:
        """Wait until every worker has loaded its engine; call `on_wait` with the missing workers repeatedly.

        Raises the error of the first worker that failed.
        """
        since_s = time.monotonic()
        while missing := [worker.name for worker in self.plan.workers if worker.name not in self._ready]:
            on_wait(missing)
            self._listen(missing, since_s, self.start_s)

    def reports(self, step: int) -> Sequence[messages.Report]:
        """Wait for the reports of all workers on `step`, in the plan's order.

        Raises NodeError, WorkerDied, ChannelTimeout or ChannelBroken, whichever best explains the failure.
        """
        since_s = time.monotonic()
        self._check_ray()
        while missing := self._names - self._reports.get(step, {}).keys():
            self._listen(missing, since_s, self.deadline_s)
        found = self._reports.pop(step)
        return [found[worker.name] for worker in self.plan.workers]

    def listen(self) -> None:
        """Wait for a worker's message. Raises as `reports` does."""
        since_s = time.monotonic()
        while not self._listen(self._names, since_s, self.deadline_s):
            if (silent_s := time.monotonic() - since_s) > 2 * self.deadline_s:
                raise ChannelTimeout(f"no worker has sent a message for {silent_s:.1f} s{self.watchdog.account([])}")

    def shards(self, workers: Collection[str]) -> Sequence[messages.ShardsDescribed]:
        """Ask workers for the shards that they hold, while no step runs. Raises as `reports` does."""
        return self._answers(messages.DescribeShards(), workers, self._shards)

    def write_shards(self, workers: Collection[str], order: messages.WriteShards) -> Sequence[messages.ShardsWritten]:
        """Have workers write their shards of an export, and wait for all of them. Raises as `reports` does."""
        return self._answers(order, workers, self._written)

    def _answers(self, order: messages.Message, workers: Collection[str], heard: dict[str, T]) -> Sequence[T]:
        heard.clear()
        self.tell(order, workers)
        since_s = time.monotonic()
        while missing := [name for name in workers if name not in heard]:
            self._listen(missing, since_s, self.deadline_s)
        return [heard[name] for name in workers]

    def await_disconnects(self, timeout_s: float) -> bool:
        """Wait until every worker has closed its connection; False on a timeout."""
        end = time.monotonic() + timeout_s
        while self.connections and (left := end - time.monotonic()) > 0:
            self._hear(left)
        return not self.connections

    def kill(self, patience_s: float) -> None:
        """Kill the workers' processes on this host that Ray has not ended in time: a stopped process does not react to Ray."""
        end = time.monotonic() + patience_s
        for process in self._processes.values():
            if not select.select([process], [], [], max(end - time.monotonic(), 0.0))[0]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(process, signal.SIGKILL)

    def await_exits(self, timeout_s: float, staying: Collection[str] = ()) -> None:
        """Wait until the workers' processes on this host have ended, at most `timeout_s` for each, and release their handles.

        The processes of `staying` workers continue.
        """
        for worker, process in self._processes.items():
            if worker not in staying:
                select.select([process], [], [], timeout_s)
            os.close(process)
        self._processes.clear()
        for connection in self.connections.values():
            connection.close()
        self.connections.clear()
        self._selector.close()

    def _listen(self, missing: Collection[str], since_s: float, deadline_s: float) -> bool:
        """Handle the next messages, or check the missing workers; True if there was a message."""
        heard = self._hear(LOOK_S)
        if not heard:
            self._check_ray()
            self.watchdog.look(missing, since_s, deadline_s)
            self._look_for_lost_hosts()
        if self._failures or self._dead:
            raise self.explanation() or self._consequence()
        return heard

    def _check_ray(self) -> None:
        """Raise DispatchError if a process of this job's Ray has ended: without it the workers end soon, or hang."""
        now_s = time.monotonic()
        if now_s >= self._look_at_ray_s:  # not at each step: a look reads the ends of two logs
            self._look_at_ray_s = now_s + LOOK_S
            if died := self._ray_death(()):
                raise _ray_death_error(died)

    def _hear(self, timeout_s: float) -> bool:
        """Read the workers' messages; True if any arrived within the time."""
        speaking = self._selector.select(timeout_s)
        for key, _ in speaking:
            name = key.data
            try:
                self._take(name, messages.receive(self.connections[name]))
                self._heard_s[name] = time.monotonic()
            except (EOFError, OSError) as error:
                connection = self.connections.pop(name)
                self._selector.unregister(connection)
                connection.close()
                self._dead[name] = "" if isinstance(error, EOFError | ConnectionError) else f"; its connection carried {error}"
        return bool(speaking)

    def _take(self, name: str, message: messages.Message) -> None:
        match message:
            case messages.Opened():
                self._opened[name] = message.addresses
                if message.apart:
                    self.apart.add(name)
            case messages.Ready():
                self._ready.add(name)
            case messages.Report():
                message = self._on_own_clock(message)
                self._reports.setdefault(message.step, {})[name] = message
                self.watchdog.note(message)
            case messages.Saved():
                self.saved.append(message)
            case messages.NotSaved():
                self.saved.append(msgspec.structs.replace(message, where=self._hosts.place(name) if self._hosts else ""))
            case messages.SampledRows():
                self.sampled.append(message)
            case messages.ShardsDescribed():
                self._shards[name] = message
            case messages.ShardsWritten():
                self._written[name] = message
            case messages.Failure():
                self._failures.append(message)
            case _:
                raise OSError(f"a message that no worker sends: {show_value(message)}")

    def _on_own_clock(self, report: messages.Report) -> messages.Report:
        """Translate the spans of another host to the driver's clock."""
        ahead_s = self._hosts.clock(report.worker).ahead_s if self._hosts else 0.0
        if not ahead_s:
            return report
        spans = [replace(span, start_s=span.start_s + ahead_s, end_s=span.end_s + ahead_s) for span in report.spans]
        return msgspec.structs.replace(report, spans=spans)

    @property
    def clock_slack_s(self) -> float:
        """The error with which times of two workers can be compared, in seconds: 0 on one host."""
        return self._hosts.clock_slack_s if self._hosts else 0.0

    def did(self) -> Heartbeat | None:
        """Find what the failed or dead worker did at that moment; None if it is unknown, or if Ray ended."""
        if self._ray_death(()):
            return None
        failed, perhaps = ([failure.worker for failure in self._own_failures(of_peers=peers)] for peers in (False, True))
        states = self.states() if failed or perhaps or self._dead else {}
        return next((states.get(name) for name in (*failed, *self._silent_deaths(), *perhaps)), None)

    def explanation(self) -> RlgraphError | None:
        """Find the cause of a failure: a node that failed, otherwise a worker that died. Wait a moment for either.

        A rank that fails in a collective may report it before the driver sees that its peer died: the death is the cause.
        """
        lost = self._hosts.ask_all() if self._hosts and not self._own_failures(of_peers=False) else frozenset()
        if lost and self._hosts:
            died = self._ray_death(lost)
            return host_error(self.plan, self._hosts, lost, (f"\n  {died}" if died else "") + self._first_trouble())
        stalled = any(failure.error == "ChannelTimeout" for failure in self._failures)  # then no better explanation will come
        end = time.monotonic() + (0 if stalled else SETTLE_S)
        while not self._cause() and (left := end - time.monotonic()) > 0:
            self._hear(left)
        return self._cause() or next(map(self._node_error, self._own_failures(of_peers=True)), None)

    def _look_for_lost_hosts(self) -> None:
        """Raise WorkerDied for hosts that do not answer, and whose workers have sent nothing since."""
        if self._hosts is None:
            return
        now, hosts = time.monotonic(), self._hosts
        lost = [
            host
            for host in hosts.lost_hosts()
            if all(self._heard_s.get(worker, 0.0) < now - hosts.silent_s(host) + ANSWERED_S for worker in hosts.on(host))
        ]
        if lost:
            raise host_error(self.plan, hosts, lost)

    def _first_trouble(self) -> str:
        """Quote the first failure that a worker reported."""
        return "".join(f"\n  worker '{failure.worker}': {failure.message}" for failure in self._failures[:1])

    def _own_failures(self, *, of_peers: bool) -> list[messages.Failure]:
        """List the failures that no peer has caused, or failures in a collective, which a peer's death may have caused."""
        several = {worker.name for worker in self.plan.workers if worker.world > 1}
        own = [failure for failure in self._failures if failure.error not in CONSEQUENCES]
        return [failure for failure in own if of_peers == (failure.error in IN_COLLECTIVES and failure.worker in several)]

    def _silent_deaths(self) -> list[str]:
        """List the workers that died without reporting a failure."""
        failed = {failure.worker for failure in self._failures}
        return [name for name in self._dead if name not in failed]

    def _node_error(self, failure: messages.Failure) -> NodeError:
        where = f"at step {failure.step}" if failure.step >= 0 else "before the first step"
        return NodeError(
            f"node '{failure.node}' failed {where} in worker '{failure.worker}': {failure.error}: {failure.message}\n"
            f"  {self._channels_of(failure.worker)}\n\n{failure.traceback.rstrip()}"
        )

    def _cause(self) -> RlgraphError | None:
        for failure in self._own_failures(of_peers=False):
            return self._node_error(failure)
        died = self._silent_deaths()
        states = self.states() if died else {}
        if died and (ray_died := self._ray_death({self._hosts.of.get(name, self._hosts.driver) for name in died} if self._hosts else ())):
            return _ray_death_error(ray_died)
        for name in died:
            last = states.get(name)
            unknown = "at work" if name in self._ready else "before its first step"
            did = f"while {describe_activity(last.activity, self.plan)}, step {last.step}" if last else unknown
            where = self._hosts.place(name) if self._hosts else ""
            return WorkerDied(
                f"worker '{name}' (process {self.pids[name]}){where} died {did}; "
                f"it was killed or it crashed: look at memory{self._dead[name]}\n"
                f"  {self._channels_of(name)}"
            )
        return None

    def _consequence(self) -> RlgraphError:
        timeouts = [f for f in self._failures if f.error == "ChannelTimeout"]
        first = (timeouts or self._failures)[0]
        told = f"node '{first.node}' of worker '{first.worker}', step {first.step}: {first.message}"
        trace = f"\n  worker '{first.worker}' waited here:\n{first.traceback.rstrip()}"
        states = self.states()
        if timeouts and first.worker in states:
            return self.watchdog.timeout(first.worker, states, f"\n  {told}{trace}")
        between = connection_error(self._hosts, self._failures) if self._hosts else None
        if between is not None:
            return between
        lost = find_disconnected(self._failures, self.pids)
        if lost is not None:
            whose = " and ".join(f"'{name}' (process {self.pids[name]})" for name in lost.workers)
            of = "lost its connections" if len(lost.workers) == 1 else "lost the connection between them"
            told = f"worker{'s' * (len(lost.workers) > 1)} {whose} {of}, of channels {list(lost.channels)}, but did not die\n  {told}"
        return (ChannelTimeout if timeouts else ChannelBroken)(f"{told}{trace}{self.watchdog.account([])}")

    def _channels_of(self, worker: str) -> str:
        nodes = next((planned.nodes for planned in self.plan.workers if planned.name == worker), ())
        ends: list[PlannedChannel | PlannedLoop] = [*self.plan.channels, *self.plan.loops]
        reads, writes = [e.name for e in ends if set(e.readers) & set(nodes)], [e.name for e in ends if e.writer in nodes]
        return f"worker '{worker}' runs nodes {list(nodes)}, reads channels {reads} and writes {writes}"

    def states(self) -> Mapping[str, Heartbeat]:
        """The current activity of each worker."""
        return self._hosts.states(self._names) if self._hosts else {}

    def stacks(self, workers: Collection[str]) -> Mapping[str, str]:
        """The Python stacks of the workers."""
        return self._hosts.stacks({worker: self.pids[worker] for worker in workers if worker in self.pids}) if self._hosts else {}


def _ray_death_error(said: str) -> DispatchError:
    return DispatchError(
        f"{said}\n  Ray ends its workers there with it; it was killed or it crashed: look at this log and at memory, and launch again"
    )
