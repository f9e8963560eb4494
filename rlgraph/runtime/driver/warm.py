"""Dispatch without Ray to warm processes, which have imported what workers need and continue from one launch to the next."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeAlias

from rlgraph import notices
from rlgraph.errors import RlgraphError, WorkerDied
from rlgraph.graph.traits import ModelTraits
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.plan import Plan
from rlgraph.runtime.driver.hosts import FoundHosts, HostAgent, LocalHostAgent, local_cluster, worker_environment
from rlgraph.runtime.driver.sendable import pickle_value
from rlgraph.runtime.messages import PID_BYTES, ForkOrder, send_order
from rlgraph.runtime.worker.spec import WorkerSpec

# The program's handles of warm processes: a template from which workers are forked, and a worker.

END_S = 10.0


@dataclass
class Template:
    """A process from which workers are forked, or, if it is `alone`, that is a worker itself."""

    process: "subprocess.Popen[bytes]"
    asked: socket.socket
    alone: bool = False
    workers: list["WarmWorker"] = field(default_factory=list)

    @classmethod
    def start(cls, prepare: str, environment: Mapping[str, str], *, alone: bool = False) -> "Template":
        """Start a process that calls the function `prepare`, given as `module:name`, for its imports."""
        mine, its = socket.socketpair()
        with its:
            command = [sys.executable, "-P", "-m", "rlgraph.runtime.worker.template", str(its.fileno()), prepare, *["alone"] * alone]
            # In a separate group, so that only the program handles signals to its group.
            process = subprocess.Popen(
                command, env=dict(environment), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, process_group=0, cwd="/"
            )
        return cls(process, mine, alone)

    def fork(self, name: str, order: ForkOrder) -> "WarmWorker":
        """Ask for a worker, which starts once the process has done its imports."""
        told, tells = os.pipe2(os.O_CLOEXEC)
        later, its = socket.socketpair() if order.keeps and not self.alone else (None, None)
        try:
            send_order(self.asked, order, [tells] if its is None else [tells, its.fileno()])
        except OSError as error:
            os.close(told)
            raise WorkerDied(f"worker '{name}' could not be started: the warm process {self.process.pid} has ended") from error
        finally:
            os.close(tells)
            if its is not None:
                its.close()
        worker = WarmWorker(name, self, told, self.asked if self.alone else later)
        for known in self.workers:
            if known.is_gone():
                known.close()
        self.workers = [*(known for known in self.workers if not known.is_gone()), worker]
        return worker

    def lives(self) -> bool:
        """Whether the process runs, so that it can fork."""
        return self.process.poll() is None

    def idle(self) -> bool:
        """Whether all its workers have ended."""
        return all(worker.is_gone() for worker in self.workers)

    def end(self) -> None:
        """End the process and the workers that it has forked."""
        self.asked.close()
        self.process.kill()
        self.process.wait(END_S)
        for worker in self.workers:
            worker.close()


class WarmWorker:
    """A requested worker: a process once its template has forked it. With a socket for `later` orders it can serve several jobs."""

    def __init__(self, name: str, template: Template, told: int, later: socket.socket | None) -> None:
        self.name = name
        self._template, self._told, self._process, self._later = template, told, -1, later
        self._over = False

    def serve_next(self, name: str, order: ForkOrder) -> None:
        """Start another job in it, with its cached engine."""
        self.name = name
        assert self._later is not None
        try:
            send_order(self._later, order)
        except OSError as error:
            raise WorkerDied(f"worker '{name}' could not be started: the process that kept its engine has ended") from error

    def is_gone(self) -> bool:
        """Whether its process has ended, or will not start because its template has ended."""
        if self._over:
            return True
        if self._process < 0:
            self._look()
        if self._process >= 0 and select.select([self._process], [], [], 0)[0]:
            self._over = True
        return self._over

    def _look(self) -> None:
        """Check whether the template has forked it."""
        if not select.select([self._told], [], [], 0)[0]:
            return
        said = os.read(self._told, PID_BYTES)
        try:
            self._process = os.pidfd_open(int.from_bytes(said, "little")) if said else -1
        except ProcessLookupError:  # it has ended already
            self._process = -1
        self._over = self._process < 0

    def kill(self) -> None:
        """Kill its process; a process that has not started yet ends with its template."""
        if self.is_gone():
            return
        if self._process < 0:
            self._template.process.kill()
        else:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def end(self) -> None:
        """Kill its process and wait until its memory is free."""
        self.kill()
        if self._process >= 0:
            select.select([self._process], [], [], END_S)

    def close(self) -> None:
        """Release its handles."""
        self._over = True
        for handle in (self._told, self._process):
            if handle >= 0:
                os.close(handle)
        if self._later is not None:
            self._later.close()
        self._told = self._process = -1


# The set of warm processes of a program.

IGNORED_VARIABLES = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}  # imports do not read them; each worker sets its import path
MOST_TEMPLATES = 6  # processes to keep; each uses some hundred MB
Key: TypeAlias = tuple[str, frozenset[tuple[str, str]], Hashable]


@dataclass(frozen=True)
class ProcessRequirements:
    """What a worker requires of its process: environment, imports, whether these open a GPU, and its engine, if it can be cached."""

    name: str
    environment: Mapping[str, str]
    prepare: Callable[[], None]
    opens_gpus: bool
    engine: Hashable | None

    @property
    def imports(self) -> str:
        """The function that imports, as `module:name`."""
        return f"{self.prepare.__module__}:{self.prepare.__qualname__}"

    @property
    def key(self) -> Key:
        """Equal for workers that the same process can serve."""
        return self.imports, frozenset(pair for pair in self.environment.items() if pair[0] not in IGNORED_VARIABLES), self.engine


class Warm:
    """The warm processes of a program, by imports and environment; with `engines`, also workers that keep their engine."""

    def __init__(self, *, engines: bool = False) -> None:
        self.engines = engines
        self._templates: dict[Key, Template] = {}
        self._alone: list[Template] = []
        self._kept: dict[Key, list[WarmWorker]] = {}
        self.ended = False

    def announce(self, wanted: Sequence[ProcessRequirements]) -> None:
        """End the cached engines that none of these workers will reuse, so that their memory is free before others start."""
        needed = Counter(each.key for each in wanted)
        for key, workers in self._kept.items():
            for worker in workers[needed[key] :]:
                worker.end()
            del workers[needed[key] :]
        self._tidy()

    def start(self, wanted: ProcessRequirements, order: ForkOrder) -> WarmWorker:
        """Start a worker: with a cached engine, otherwise as a fork of a process with its environment and imports."""
        if self.ended:
            raise RlgraphError(
                f"worker '{wanted.name}' cannot be started: the block of rg.runs.warm() has ended; start the job inside of it"
            )
        kept = self._kept.get(wanted.key)
        while kept:
            worker = kept.pop(0)
            if not worker.is_gone():
                worker.serve_next(wanted.name, order)
                return worker
        return self._template(wanted).fork(wanted.name, order)

    def keep(self, wanted: ProcessRequirements, worker: WarmWorker) -> None:
        """Keep a worker whose job has ended, for the next one with equal requirements."""
        self._kept.setdefault(wanted.key, []).append(worker)

    def _template(self, wanted: ProcessRequirements) -> Template:
        if wanted.opens_gpus:
            self._alone.append(Template.start(wanted.imports, wanted.environment, alone=True))
            return self._alone[-1]
        key = (*wanted.key[:2], None)
        template = self._templates.pop(key, None)
        if template is None or not template.lives():
            if template is not None:
                template.end()
            self._make_room()
            template = Template.start(wanted.imports, wanted.environment)
        self._templates[key] = template  # ordered by last use
        return template

    def _make_room(self) -> None:
        for key in [key for key, template in self._templates.items() if template.idle()][: len(self._templates) + 1 - MOST_TEMPLATES]:
            self._templates.pop(key).end()

    def _tidy(self) -> None:
        """Remove the processes that have ended."""
        for template in [template for template in self._alone if not template.lives()]:
            template.end()
            self._alone.remove(template)

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the warm processes."""
        return tuple(template.process.pid for template in (*self._templates.values(), *self._alone) if template.lives())

    def end(self) -> None:
        """End all warm processes."""
        self.ended = True
        for template in (*self._templates.values(), *self._alone):
            template.end()
        self._templates.clear()
        self._alone.clear()
        self._kept.clear()


_HERE: ContextVar[Warm | None] = ContextVar("warm", default=None)


@contextmanager
def warm(*, engines: bool = False) -> Iterator[Warm]:
    """Launch the jobs of this block from warm processes: all jobs after the first start in seconds. The processes end with the block.

        with rg.runs.warm(engines=True):
            for lr in (1e-6, 3e-6, 1e-5):
                with rg.compile(graph(lr), rg.local_cluster()).launch() as job:
                    for step in job.steps(20):
                        ...

    * `engines`: also keeps vLLM engines loaded between jobs. An idle engine holds its memory.

    The first launch starts a process that imports PyTorch and transformers, and another that imports vLLM if the plan uses it. Workers are
    forks of these, so they start in milliseconds, carry no state of an earlier job, and produce bit-identical results. Your own modules are
    imported again at each launch. Other environment variables, threads or GPUs need new processes. The jobs run without Ray, on this host.
    A thread that the program starts is not in the block. On GPUs, importing vLLM initialises CUDA, and CUDA does not survive a fork: each
    vLLM engine has a separate process there, which starts with its job.

    With `engines=True` a later launch reuses a loaded engine when its `rg.Generator` has the same settings, apart from `pool` and
    `sampling`, on the same devices, with room for at least as many versions of the weights. The engine loads the weights of the folder
    again, and the results are bit-identical to a new engine. A launch that cannot reuse an engine terminates it before anything starts,
    and a job that fails leaves none. Threads that your own code starts in its process stay there. Other engines, and folders of quantised
    weights, are loaded again, and a notice is printed.

    >>> import rlgraph as rg
    >>> with rg.runs.warm() as processes:
    ...     processes.pids
    ()

    Raises RlgraphError inside of another such block. In the block a launch raises PlanError for a plan of several hosts, for a
    `dispatch=`, and for a `transport=` that needs Ray.
    """
    if _HERE.get() is not None:
        raise RlgraphError(
            "rg.runs.warm() inside of rg.runs.warm(): the launches of a block share its processes already; leave the inner one out"
        )
    mine = Warm(engines=engines)
    before = _HERE.set(mine)
    try:
        yield mine
    finally:
        _HERE.reset(before)
        mine.end()


def current_processes() -> Warm | None:
    """The warm processes of the block that this program is in."""
    return _HERE.get()


# The imports of engines on torch and transformers, for a process from which workers are forked.

MODULES = (
    "rlgraph.engines.forward.self_test",
    "rlgraph.engines.fsdp.engine",
    "rlgraph.engines.fsdp.sharding",
    "rlgraph.engines.hf.chat_template",
    "rlgraph.engines.transformers.engine",
    "rlgraph.engines.transformers.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.modeling_layers",
    "transformers.processing_utils",
)


def import_transformers() -> None:
    """Import the libraries of FSDP2 trainers, transformers engines and tokenizers, without opening a GPU."""
    for module in MODULES:
        import_module(module)


# Dispatch without Ray: workers come from warm processes.

WARM, PROCESSES = "warm", "processes"  # names of the two dispatches


class WithoutRay:
    """The common part of dispatches whose workers are processes of this host, which run as soon as they start."""

    def begin(self, hosts: int, *, stores: bool = False) -> None:
        pass

    def hosts(self, plan: Plan, patience_s: float = 0.0) -> FoundHosts:
        return FoundHosts()

    def devices(self) -> Cluster:
        return local_cluster()

    def loses_hosts(self) -> bool:
        return False

    def death(self, hosts: Collection[int]) -> str:
        return ""

    def folders(self) -> Sequence[str]:
        return []

    def end(self) -> None:
        pass

    def host_agent(self, host: str, folder: str) -> HostAgent:
        return LocalHostAgent(folder)

    def start(self, actors: Sequence[Any]) -> None:
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


class ForkedProcesses(WithoutRay):
    """A `Dispatch` to the warm processes of `rg.runs.warm()`."""

    def __init__(self, warm: Warm | None = None) -> None:
        warm = warm or current_processes()
        if warm is None:
            raise RlgraphError("a job that was launched inside of rg.runs.warm() starts its workers there too, but the block has ended")
        self._warm = warm
        self._announced: dict[str, ProcessRequirements] = {}  # by worker
        self._workers: dict[WarmWorker, ProcessRequirements] = {}

    def announce(self, specs: Sequence[WorkerSpec]) -> None:
        self._announced = {spec.worker.name: self._requirements(spec) for spec in specs}
        for spec, wanted in zip(specs, self._announced.values(), strict=True):
            if self._warm.engines and wanted.engine is None and spec.model is not None and spec.model.traits.sampling is not None:
                notices.here.say(
                    f"rg.runs.warm(engines=True) does not keep the engine of '{spec.worker.model}', which each launch starts again"
                )
        self._warm.announce([*self._announced.values()])

    def create(self, spec: WorkerSpec, driver: str, host: str = "") -> WarmWorker:
        wanted = self._announced[spec.worker.name]
        path = tuple(wanted.environment["PYTHONPATH"].split(os.pathsep))
        order = ForkOrder(os.getcwd(), path, pickle_value(spec), driver, keeps=wanted.engine is not None)
        worker = self._warm.start(wanted, order)
        self._workers[worker] = wanted
        return worker

    def let_go(self, actor: WarmWorker) -> bool:
        wanted = self._workers[actor]
        if wanted.engine is None or self._warm.ended:
            return super().let_go(actor)
        self._warm.keep(wanted, actor)
        return True

    def _requirements(self, spec: WorkerSpec) -> ProcessRequirements:
        traits = spec.model.traits if spec.model is not None else ModelTraits()
        engine = kept_as(spec) if self._warm.engines else None
        return ProcessRequirements(
            name=spec.worker.name,
            environment={**os.environ, **worker_environment(spec)},
            prepare=traits.prepare or import_transformers,
            opens_gpus=traits.prepare is not None and bool(spec.local_gpus),
            engine=engine,
        )

    def check(self) -> None:
        for worker in self._workers:
            if worker.is_gone():
                raise WorkerDied(f"worker '{worker.name}' could not be started: its process has ended; see its output")


class Processes(ForkedProcesses):
    """A `Dispatch` to processes that start and end with the job."""

    def __init__(self) -> None:
        super().__init__(Warm())

    def end(self) -> None:
        self._warm.end()


def kept_as(spec: WorkerSpec) -> Hashable | None:
    """List everything that determines a worker's engine, as the key by which a later job finds it; None if it cannot be reused."""
    made_of = spec.model.traits.made_of if spec.model is not None else None
    if made_of is None or (made := made_of()) is None:
        return None
    place = spec.worker.threads, spec.local_gpus, spec.shares_devices, spec.copies, spec.merging_bytes, spec.sequences, spec.exact
    return made, *place
