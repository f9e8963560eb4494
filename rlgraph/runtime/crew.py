"""The driver's side of the workers' sockets: who is ready, who has reported, who does what, and who is to blame."""

import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Listener

from rlgraph.errors import ChannelBroken, ChannelClosed, ChannelTimeout, NodeError, RlgraphError, WorkerDied
from rlgraph.planning.plan import Plan
from rlgraph.runtime import messages
from rlgraph.runtime.status import read_status
from rlgraph.runtime.tasks import status_path

CONSEQUENCES = {kind.__name__ for kind in (ChannelBroken, ChannelClosed, ChannelTimeout)}  # of trouble elsewhere
SETTLE_S = 1.0  # how long a first sign of trouble waits for a better explanation


class Crew:
    """All workers of a job, as the driver hears them. It sleeps while none speaks."""

    def __init__(self, plan: Plan, deadline_s: float) -> None:
        self.plan, self.deadline_s, self.folder = plan, deadline_s, ""
        self.pids: dict[str, int] = {}
        self._processes: list[int] = []
        self.connections: dict[str, Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._ready: set[str] = set()
        self._reports: dict[int, dict[str, messages.Report]] = {}
        self._used: dict[str, int] = {}
        self.saved: list[messages.Saved | messages.NotSaved] = []  # news of checkpoints that nobody has looked at yet
        self._failures: list[messages.Failure] = []
        self._dead: list[str] = []

    def welcome(self, listener: Listener, folder: str) -> threading.Thread:
        """Take the workers' connections as they come, on a thread that ends with the last of them; `folder` is the job's."""
        self.folder = folder
        thread = threading.Thread(target=self._accept, args=(listener,), name="welcome workers", daemon=True)
        thread.start()
        return thread

    def _accept(self, listener: Listener) -> None:
        while len(self.connections) < len(self.plan.workers):
            connection = listener.accept()
            assert isinstance(connection, Connection)
            hello = messages.receive(connection)
            assert isinstance(hello, messages.Hello)
            self.pids[hello.worker] = hello.pid
            self._processes.append(os.pidfd_open(hello.pid))
            self.connections[hello.worker] = connection
            self._selector.register(connection, selectors.EVENT_READ, hello.worker)

    def tell(self, message: messages.Message) -> None:
        """Send a message to every worker that is still there."""
        for connection in self.connections.values():
            try:
                messages.send(connection, message)
            except OSError:
                continue  # it is dead, which the next `_listen` finds out and says

    def until_ready(self, on_wait: Callable[[list[str]], None]) -> None:
        """Wait until every worker has loaded its engine, telling `on_wait` whose is missing.

        Raises what went wrong with the first that could not.
        """
        while missing := [worker.name for worker in self.plan.workers if worker.name not in self._ready]:
            on_wait(missing)
            self._listen()

    def reports(self, step: int) -> Sequence[messages.Report]:
        """Return the reports of all workers on `step`, in the plan's order.

        Raises NodeError, WorkerDied, ChannelTimeout or ChannelBroken, whichever explains best what happened.
        """
        while len(self._reports.get(step, {})) < len(self.plan.workers):
            self._listen()
        found = self._reports.pop(step)
        return [found[worker.name] for worker in self.plan.workers]

    def listen(self) -> None:
        """Wait until a worker says something. Raises as `reports` does."""
        self._listen()

    def until_gone(self, timeout_s: float) -> bool:
        """Wait until every worker has closed its end; return whether they did in time."""
        end = time.monotonic() + timeout_s
        while self.connections and (left := end - time.monotonic()) > 0:
            self._hear(left)
        return not self.connections

    def until_ended(self, timeout_s: float) -> None:
        """Wait until every worker's process has ended, at most `timeout_s` for each."""
        for process in self._processes:
            select.select([process], [], [], timeout_s)
            os.close(process)
        self._processes.clear()

    def _listen(self) -> None:
        # A channel reports its own deadline first; this one is for a wait that no channel sees, such as the last node's.
        heard = self._hear(2 * self.deadline_s)
        if not heard:
            raise ChannelTimeout(f"no worker has said anything for {2 * self.deadline_s:g} s{self._states()}")
        if self._failures or self._dead:
            raise self.explanation() or self._consequence()

    def _hear(self, timeout_s: float) -> bool:
        """Take in what the workers say; return whether any spoke within the time."""
        speaking = self._selector.select(timeout_s)
        for key, _ in speaking:
            name = key.data
            try:
                self._take(messages.receive(self.connections[name]))
            except (EOFError, OSError):
                self._selector.unregister(self.connections.pop(name))
                self._dead.append(name)
        return bool(speaking)

    def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Ready():
                self._ready.add(message.worker)
            case messages.Report():
                self._reports.setdefault(message.step, {})[message.worker] = message
                self._used.update(message.used)
            case messages.Saved() | messages.NotSaved():
                self.saved.append(message)
            case messages.Failure():
                self._failures.append(message)
            case _:
                raise AssertionError(f"a worker sent {message!r}")

    def explanation(self) -> RlgraphError | None:
        """Return the error of the node that failed, else of the worker that died, listening a moment for either."""
        end = time.monotonic() + SETTLE_S
        while not self._cause() and (left := end - time.monotonic()) > 0:
            self._hear(left)
        return self._cause()

    def _cause(self) -> RlgraphError | None:
        for failure in self._failures:
            if failure.error not in CONSEQUENCES:
                where = f"at step {failure.step}" if failure.step >= 0 else "before the first step"
                return NodeError(
                    f"node '{failure.node}' failed {where} in worker '{failure.worker}': {failure.error}: {failure.message}\n\n"
                    f"{failure.traceback.rstrip()}"
                )
        for name in self._dead:
            last = read_status(status_path(self.folder, name))
            did = f"while {last.what}, step {last.step}" if last else "before its first step"
            return WorkerDied(f"worker '{name}' (process {self.pids[name]}) died {did}; it was killed or it crashed: look at memory")
        return None

    def _consequence(self) -> RlgraphError:
        timeouts = [f for f in self._failures if f.error == "ChannelTimeout"]
        first = (timeouts or self._failures)[0]
        kind = ChannelTimeout if timeouts else ChannelBroken
        return kind(f"node '{first.node}' of worker '{first.worker}', step {first.step}: {first.message}{self._states()}")

    def _states(self) -> str:
        """Return what every worker does and for how long, the longest first, and how full the channels are."""
        now = time.monotonic()
        found = [(worker.name, read_status(status_path(self.folder, worker.name))) for worker in self.plan.workers]
        doing = sorted((d.at_s, name, d) for name, d in found if d is not None)
        lines = [f"  worker '{name}' has been {d.what}, step {d.step}, for {now - at_s:.1f} s" for at_s, name, d in doing]
        slots = {channel.name: channel.slots for channel in self.plan.channels}
        for end, used in sorted(self._used.items()):
            way, name = end.split(" ", 1)
            if way == "put" and name in slots:
                lines.append(f"  channel '{name}': {used} of {slots[name]} slots in use after the last report")
        return "\n" + "\n".join(lines) if lines else ""
