"""Warm processes: they have imported what workers need, and live from one launch of the program to the next."""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from rlgraph.engines.imports import import_transformers
from rlgraph.errors import RlgraphError, WorkerDied
from rlgraph.runtime.worker.template import PID_BYTES, ForkOrder

OTHERWISE = {"PYTHONPATH", "PYTEST_CURRENT_TEST"}  # variables that are not read by imports; a worker gets its own path
MOST_TEMPLATES = 6  # processes that are kept; each takes some hundred MB
START_S = 300.0  # for a process to import, on a busy machine
END_S = 10.0


@dataclass
class Template:
    """The driver's end of a process from which workers are forked."""

    process: "subprocess.Popen[bytes]"
    asked: socket.socket
    workers: list["ForkedWorker"] = field(default_factory=list)

    @classmethod
    def start(cls, prepare: str, environment: Mapping[str, str]) -> "Template":
        """Start a process that imports by `prepare`, a function as `module:name`."""
        mine, its = socket.socketpair()
        with its:
            command = [sys.executable, "-P", "-m", "rlgraph.runtime.worker.template", str(its.fileno()), prepare]
            # In a group of its own: a signal to the program's group is the program's to handle.
            process = subprocess.Popen(
                command, env=dict(environment), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, process_group=0, cwd="/"
            )
        return cls(process, mine)

    def fork(self, name: str, order: ForkOrder) -> "ForkedWorker":
        """Ask for a worker, which comes once the process has imported; it writes where this program does."""
        told, tells = os.pipe2(os.O_CLOEXEC)
        with tempfile.TemporaryFile() as given:
            given.write(msgspec.msgpack.encode(order))
            given.flush()
            given.seek(0)
            try:
                sys.stdout.flush()
                socket.send_fds(self.asked, [b"1"], [1, 2, given.fileno(), tells])
            except OSError as error:
                os.close(told)
                raise WorkerDied(f"worker '{name}' could not be started: the warm process {self.process.pid} has ended") from error
            finally:
                os.close(tells)
        worker = ForkedWorker(name, self, told)
        self.workers = [*(known for known in self.workers if not known.ended()), worker]
        return worker

    def lives(self) -> bool:
        """Whether it can fork."""
        return self.process.poll() is None

    def idle(self) -> bool:
        """Whether all its workers have ended."""
        return all(worker.ended() for worker in self.workers)

    def end(self) -> None:
        """End it, and with it the workers that it has forked."""
        self.asked.close()
        self.process.kill()
        self.process.wait(END_S)
        for worker in self.workers:
            worker.close()


class ForkedWorker:
    """A worker that was asked for: a process once its template has forked it."""

    def __init__(self, name: str, template: Template, told: int) -> None:
        self.name = name
        self._template, self._told, self._process = template, told, -1
        self._over = False

    def ended(self) -> bool:
        """Whether its process is gone, or will not come since its template is."""
        if self._over:
            return True
        if self._process < 0:
            self._look()
        if self._process >= 0 and select.select([self._process], [], [], 0)[0]:
            self._over = True
        return self._over

    def _look(self) -> None:
        """See whether the template has forked it."""
        if not select.select([self._told], [], [], 0)[0]:
            return
        said = os.read(self._told, PID_BYTES)
        try:
            self._process = os.pidfd_open(int.from_bytes(said, "little")) if said else -1
        except ProcessLookupError:  # it has ended already
            self._process = -1
        self._over = self._process < 0

    def kill(self) -> None:
        """End its process, whatever it does; one that is still to come ends with its template."""
        if self.ended():
            return
        if self._process < 0:
            self._template.process.kill()
        else:
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def close(self) -> None:
        """Release its handles."""
        self._over = True
        for handle in (self._told, self._process):
            if handle >= 0:
                os.close(handle)
        self._told = self._process = -1


class Warm:
    """The warm processes of a program, by what they have imported in which environment."""

    def __init__(self) -> None:
        self._templates: dict[tuple[str, frozenset[tuple[str, str]]], Template] = {}
        self.ended = False

    def fork(self, name: str, order: ForkOrder, variables: Mapping[str, str], prepare: Callable[[], None] | None) -> ForkedWorker:
        """Fork a worker from the process that has its environment and its imports, which is started if there is none."""
        if self.ended:
            raise RlgraphError(f"worker '{name}' cannot be started: the block of rg.warm() has been left; start the job inside of it")
        chosen = prepare or import_transformers
        imports = f"{chosen.__module__}:{chosen.__qualname__}"
        environment = {**os.environ, **variables}
        key = imports, frozenset(pair for pair in environment.items() if pair[0] not in OTHERWISE)
        template = self._templates.pop(key, None)
        if template is None or not template.lives():
            if template is not None:
                template.end()
            self._make_room()
            template = Template.start(imports, environment)
        self._templates[key] = template  # the last one is the one that was used last
        return template.fork(name, order)

    def _make_room(self) -> None:
        for key in [key for key, template in self._templates.items() if template.idle()][: len(self._templates) + 1 - MOST_TEMPLATES]:
            self._templates.pop(key).end()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ids of the warm processes."""
        return tuple(template.process.pid for template in self._templates.values() if template.lives())

    def end(self) -> None:
        """End all of them."""
        self.ended = True
        for template in self._templates.values():
            template.end()
        self._templates.clear()


_HERE: ContextVar[Warm | None] = ContextVar("warm", default=None)


@contextmanager
def warm() -> Iterator[Warm]:
    """Launch jobs in this block from warm processes: those after the first start in seconds. Leaving the block ends the processes.

        with rg.warm():
            for lr in (1e-6, 3e-6, 1e-5):
                with rg.compile(graph(lr), rg.local_cluster()).launch() as job:
                    for step in job.steps(20):
                        ...

    The first launch starts a process that imports PyTorch and transformers, and one that imports vLLM where the plan has it. Workers are
    forked from them, so they begin in milliseconds, and as clean as new ones: no state of a job is left for the next, whether it ended
    or failed, and the results are the same bits. Modules of your own are imported anew at each launch. Other environment variables,
    threads or GPUs get processes of their own. The jobs run without Ray, on this host. Nothing starts before the first launch, and a thread
    that the program starts is not in the block. On GPUs the imports of vLLM open the driver, which no fork lives through: plans with vLLM
    are then refused as they start.

    >>> import rlgraph as rg
    >>> with rg.warm() as processes:
    ...     processes.pids
    ()

    Raises RlgraphError inside of another such block. In the block a launch raises PlanError for a plan of several hosts, for a
    `dispatch=`, and for a `transport=` that needs Ray.
    """
    if _HERE.get() is not None:
        raise RlgraphError("rg.warm() inside of rg.warm(): the launches of a block share its processes already; leave the inner one out")
    mine = Warm()
    before = _HERE.set(mine)
    try:
        yield mine
    finally:
        _HERE.reset(before)
        mine.end()


def here() -> Warm | None:
    """The warm processes of the block that this program is in."""
    return _HERE.get()
