"""The program's ends of warm processes: a template from which workers are forked, and a worker that was asked for."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlgraph.errors import WorkerDied
from rlgraph.runtime.worker.orders import PID_BYTES, ForkOrder, send_order

END_S = 10.0


@dataclass
class Template:
    """A process from which workers are forked, or that is a worker itself, `alone`."""

    process: "subprocess.Popen[bytes]"
    asked: socket.socket
    alone: bool = False
    workers: list["WarmWorker"] = field(default_factory=list)

    @classmethod
    def start(cls, prepare: str, environment: Mapping[str, str], *, alone: bool = False) -> "Template":
        """Start a process that imports by `prepare`, a function as `module:name`."""
        mine, its = socket.socketpair()
        with its:
            command = [sys.executable, "-P", "-m", "rlgraph.runtime.worker.template", str(its.fileno()), prepare, *["alone"] * alone]
            # In a group of its own: a signal to the program's group is the program's to handle.
            process = subprocess.Popen(
                command, env=dict(environment), pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, process_group=0, cwd="/"
            )
        return cls(process, mine, alone)

    def fork(self, name: str, order: ForkOrder) -> "WarmWorker":
        """Ask for a worker, which comes once the process has imported."""
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
            if known.ended():
                known.close()
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


class WarmWorker:
    """A worker that was asked for: a process once its template has forked it. One with a socket for `later` orders can serve again."""

    def __init__(self, name: str, template: Template, told: int, later: socket.socket | None) -> None:
        self.name = name
        self._template, self._told, self._process, self._later = template, told, -1, later
        self._over = False

    def again(self, name: str, order: ForkOrder) -> None:
        """Have it serve another job, with the engine that it has kept."""
        self.name = name
        assert self._later is not None
        try:
            send_order(self._later, order)
        except OSError as error:
            raise WorkerDied(f"worker '{name}' could not be started: the process that kept its engine has ended") from error

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

    def end(self) -> None:
        """Kill it and wait until it is gone, with all that it holds."""
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
