"""Run one session of a plan's workers, from their start to their end."""

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.status import Status
from rich.text import Text

from rlgraph.analysis.words import Terminal
from rlgraph.channels.host.connection import bound, close_listener, listen
from rlgraph.errors import ChannelTimeout, DispatchError, PlanError, RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.plan.channels import lies_in_ray
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime import messages
from rlgraph.runtime.checkpoint.gathering import Gatherer
from rlgraph.runtime.driver import orphan_cleanup
from rlgraph.runtime.driver.dispatch import Dispatch, make_dispatch
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent, Hosts, LocalHostAgent
from rlgraph.runtime.driver.signals import hold_signals
from rlgraph.runtime.driver.watchdog import FIRST_S
from rlgraph.runtime.driver.worker_group import WorkerGroup
from rlgraph.runtime.worker.activity import Heartbeat, under_way
from rlgraph.runtime.worker.spec import Start, WorkerSpec, worker_specs

# Start a plan's workers, each in a process, and connect them to the driver and to one another. Every wait has a deadline and a name.


def start_workers(
    dispatch: Dispatch, group: WorkerGroup, specs: Sequence[WorkerSpec], actors: list[Any], hosts: Hosts, ids: Sequence[str]
) -> None:
    """Start a worker per spec, on the hosts of `ids`, and wait until all are ready. Each is appended to `actors` as soon as it exists.

    Raises WorkerDied or NodeError if a worker cannot start, ChannelTimeout if it has not started by the deadline.
    """
    wanted, end = f"{hosts.addresses[hosts.driver]}:0" if hosts.addresses else f"{hosts.folder}/driver", time.monotonic() + group.start_s
    listener = listen("driver", wanted, backlog=len(specs) + 8)
    address = bound(listener) if hosts.addresses else wanted
    try:
        console, began_s = Terminal(stderr=True, highlight=False), time.monotonic()
        if not console.is_terminal:  # no spinner is shown there
            console.print(f"starting workers: {', '.join(spec.worker.name for spec in specs)}", soft_wrap=True)
        with Status("", console=console) as status:

            def look(missing: list[str]) -> None:
                status.update(Text(f"starting workers, waiting for {', '.join(missing)}"))
                dispatch.check()
                unseen = [name for name in missing if name not in group.pids]
                if unseen and time.monotonic() > end:
                    raise ChannelTimeout(
                        f"workers {unseen} have not started within {group.start_s:g} s: their processes did not start, or Ray could not "
                        "place them (see `ray status`)"
                    )

            group.welcome(listener, specs[0].authkey, hosts, encrypt=specs[0].encrypt)
            dispatch.announce(specs)
            for spec in specs:
                actors.append(dispatch.create(spec, address, ids[spec.worker.host] if ids else ""))
            group.tell(messages.Join(group.until_open(look)))
            group.await_engines(look)
        if not console.is_terminal:
            console.print(f"all workers are ready after {time.monotonic() - began_s:.0f} s")
    finally:
        close_listener(listener, address)


T = TypeVar("T")
GOODBYE_S = 5.0  # for idle workers to end
KILLED_S = 1.0  # for workers that Ray kills to end
ABANDON_S = 0.25  # for workers of a failed session to end


@dataclass(frozen=True)
class Links:
    """How a job connects to its hosts: how long it waits for missing or lost hosts, whether it encrypts, and whether it follows the hosts
    that there are, with a plan for these."""

    wait_s: float = 0.0
    encrypt: bool = False
    follows: bool = False

    def with_wait(self, wait_s: float) -> "Links":
        """Return a copy that waits at least this many seconds."""
        return replace(self, wait_s=max(self.wait_s, wait_s))


PLAIN = Links()


class Session:
    """The workers of a plan: starts them, ticks them, receives their reports, ends them. A failed session cannot be used again."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        dispatch_name: str,
        deadline_s: float,
        start: Start | None = None,
        links: Links = PLAIN,
    ) -> None:
        self.plan, self.first = plan, start.resume.step if start and start.resume else 0
        self._start_at, self._links, self._owner = start, links, os.getpid()
        # A graceful end waits for all steps in flight, so start no more of them than can overlap.
        self.window = plan.window - 2 if start else plan.window
        self._graph, self._deadline_s = graph, deadline_s
        self.dispatch = make_dispatch(dispatch_name)
        self._actors: list[Any] = []
        self.group = WorkerGroup(plan, deadline_s, self.dispatch.death)
        self._hosts: Hosts | None = None
        self._gatherer: Gatherer | None = None
        self.folder = ""
        self._dispatching = self.ended = self.failed = False
        self.ticked = self.reported = self.first
        self.left: Cluster | None = None  # of the hosts, where there are too few for the plan
        self.did: Heartbeat | None = None  # activity of the worker that failed, when it failed

    @property
    def pids(self) -> Mapping[str, int]:
        """The process id of each worker, by its name in the plan."""
        return dict(self.group.pids)

    @property
    def clock_slack_s(self) -> float:
        """The error with which spans of two workers can be compared, in seconds."""
        return self.group.clock_slack_s

    def under_way(self) -> str:
        """Describe the work and the progress of the nodes; empty before the workers are ready and after they have ended."""
        return under_way(self.group.states(), self.plan) if self.is_ready and not self.ended else ""

    @property
    def in_flight(self) -> bool:
        """Whether there are steps that have begun and not been reported."""
        return self.ticked > self.reported

    @property
    def is_ready(self) -> bool:
        """Whether every worker has loaded what it needs."""
        return self._dispatching

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that created the session and owns its workers, sockets and folder."""
        return os.getpid() != self._owner

    def check_runs(self) -> None:
        """Raise RlgraphError if the workers have not been started, or have ended, or another process started them."""
        if self.is_forked:
            raise RlgraphError(f"process {self._owner} started the job, and this is a fork of it; run its steps there")
        if self.ended:
            raise RlgraphError("the job is closed; launch the plan again")
        if not self._dispatching:
            raise RlgraphError(
                "the job has not been started: run its steps inside `with plan.launch() as job:`, or start it with job.start() and end "
                "it with job.close()"
            )

    def start(self) -> None:
        """Start the workers and wait until each is ready. If one fails, end the others and raise its error."""
        try:
            self._start()
        except BaseException:
            self.abandon()
            raise

    def _start(self) -> None:
        try:
            orphan_cleanup.sweep()
            self.folder = orphan_cleanup.make_job_folder()
            orphan_cleanup.claim(Path(self.folder), (), ())
        except OSError as error:
            raise DispatchError(
                f"launch: the job's folder cannot be written ({error}); a job needs a temporary folder: free room there, or set TMPDIR to "
                "a folder that this user can write"
            ) from None
        authkey = secrets.token_bytes(32)
        hosts = max(self.plan.cluster.hosts, 2) if self._links.follows else self.plan.cluster.hosts  # another one may join
        self.dispatch.begin(hosts, stores=lies_in_ray(self.plan))
        orphan_cleanup.claim(Path(self.folder), (), self.dispatch.folders())
        try:
            found = self.dispatch.hosts(self.plan, self._links.wait_s)
        except PlanError:
            self.left = self.dispatch.devices() if self._links.follows else None
            raise
        self._hosts = self._made_hosts(found)
        patience_s = self._deadline_s + FIRST_S
        addresses, encrypt = self._hosts.addresses, self._links.encrypt
        start_at = self._listen_for_shards(authkey, self._hosts)
        specs = worker_specs(self._graph, self.plan, self.folder, authkey, patience_s, start_at, addresses, encrypt=encrypt)
        start_workers(self.dispatch, self.group, specs, self._actors, self._hosts, [host for host, _ in found.hosts])
        here = [
            pid for name, pid in self.group.pids.items() if self._hosts.of[name] == self._hosts.driver
        ]  # process ids are valid on their own host only
        orphan_cleanup.claim(Path(self.folder), here, self.dispatch.folders())
        self.dispatch.start(self._actors)
        self._dispatching = True

    def _listen_for_shards(self, authkey: bytes, hosts: Hosts) -> Start | None:
        """Listen for shards from hosts that do not share the folder of checkpoints, if there are other hosts."""
        start = self._start_at
        if start is None or not start.folder or not hosts.addresses:
            return start
        resume = Path(start.resume.folder) if start.resume else None
        address, encrypt = hosts.addresses[hosts.driver], self._links.encrypt
        self._gatherer = Gatherer(address, authkey, Path(start.folder), start.id, resume, encrypt=encrypt)
        return replace(start, gatherer=self._gatherer.address)

    @property
    def notice(self) -> str:
        """Name the hosts that send their shards of checkpoints because they do not share the folder; empty if none does."""
        if self._start_at is None or self._hosts is None or not self.group.apart:
            return ""
        names = " and ".join(self._hosts.name(at) for at in sorted({self._hosts.of[worker] for worker in self.group.apart}))
        folder = self._start_at.folder
        return f"checkpoints: '{folder}' of the driver's host is not shared by {names}, so their shards are sent to it"

    def _made_hosts(self, found: FoundHosts) -> Hosts:
        placed = {worker.name: worker.host for worker in self.plan.workers}
        here: HostAgent = LocalHostAgent(self.folder)
        agents = [here if at == found.driver else self.dispatch.host_agent(host, self.folder) for at, (host, _) in enumerate(found.hosts)]
        return Hosts(self.folder, tuple(agents) or (here,), tuple(address for _, address in found.hosts), placed, found.driver)

    def step(self, last: int) -> Sequence[messages.Report]:
        """Wait for the reports of the next step, while the workers already work on later steps, up to `last`.

        Raises NodeError, WorkerDied, ChannelTimeout or ChannelBroken, after the workers have ended.
        """
        return self._explain_death(lambda: self._step(last))

    def _explain_death(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except DispatchError as error:  # Ray may notice a death first, without knowing whose
            explanation = self.group.explanation()
            self.abandon()
            raise (explanation or error) from error
        except RlgraphError:
            self.abandon()
            raise

    def _step(self, last: int) -> Sequence[messages.Report]:
        step = self.reported
        while self.ticked < min(last, step + self.window):
            self.group.tell(messages.Go(self.ticked))
            self.ticked += 1
        reports = self.group.reports(step)
        self.reported = step + 1
        return reports

    def news(self) -> Sequence[messages.Saved | messages.NotSaved]:
        """Return the workers' messages about checkpoints since the last call."""
        news, self.group.saved = self.group.saved, []
        return news

    def tell(self, message: messages.Message) -> None:
        """Send a message to every worker, which handles it before the next tick."""
        self.group.tell(message)

    def take_samples(self) -> Sequence[messages.SampledRows]:
        """Return the recorded rows that workers have sent since the last call."""
        rows, self.group.sampled = self.group.sampled, []
        return rows

    def save(self, step: int) -> None:
        """Ask every worker to complete the checkpoint after `step` steps, all of which are done; `news` returns their answers."""
        self.group.tell(messages.Save(step))

    def shards(self, model: str) -> Sequence[messages.ShardsDescribed]:
        """Ask the workers of a model for the shards that they hold, once the steps in flight are done. Raises as `step` does."""
        return self._explain_death(lambda: self.group.shards(self._workers_of(model)))

    def write_shards(self, model: str, order: messages.WriteShards) -> Sequence[messages.ShardsWritten]:
        """Have a model's workers write their shards of an export. Raises as `step` does."""
        return self._explain_death(lambda: self.group.write_shards(self._workers_of(model), order))

    def _workers_of(self, model: str) -> Sequence[str]:
        return [worker.name for worker in self.plan.workers if worker.model == model]

    def listen(self) -> None:
        """Wait for a worker's message. Raises as `step` does."""
        self._explain_death(self.group.listen)

    def abandon(self) -> None:
        """End the workers of a session that failed, with little time for a graceful end."""
        if not self.ended:
            self.did = self.group.did()
        self.failed = True
        self.close()

    def close(self) -> None:
        """End the workers: idle ones shut down, those that do not answer are killed. Nothing is left behind."""
        if not self.ended and not self.is_forked:
            self.ended = True
            with hold_signals("ending the workers"):
                self._end()

    def _end(self) -> None:
        self.group.tell(messages.Shutdown(keep=not self.failed))
        gone = self.group.await_disconnects(ABANDON_S if self.failed else GOODBYE_S)
        if not gone:
            for actor in self._actors:
                self.dispatch.kill(actor)
            self.group.kill(KILLED_S)
        if self._dispatching:
            self.dispatch.stop()
        parted = self.dispatch.let_go if gone and not self.failed else self.dispatch.kill
        staying = [worker.name for worker, actor in zip(self.plan.workers, self._actors, strict=False) if parted(actor)]
        self.group.await_exits(GOODBYE_S, staying)
        if self._gatherer is not None:
            self._gatherer.close()
        if self._hosts is not None:
            self._hosts.sweep()
        self.dispatch.end()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
