"""A job: a plan at work on Ray. Starts the workers, ticks them, gives the steps as they finish, and leaves nothing behind."""

import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Listener
from types import TracebackType
from typing import Any

import ray
from rich.console import Console
from rich.status import Status

from rlgraph.errors import RlgraphError
from rlgraph.graph import Graph
from rlgraph.planning.costs import Costs
from rlgraph.planning.plan import Plan
from rlgraph.planning.schedule import Span
from rlgraph.runtime import dispatch, messages
from rlgraph.runtime.crew import Crew
from rlgraph.runtime.measure import Step, measured_costs, timings
from rlgraph.runtime.tasks import setups

GOODBYE_S = 5.0  # for workers that have nothing left to do
ABANDON_S = 0.5  # for workers of a job that failed
KEPT_SPANS = 100_000  # some thousand steps, so that a long run does not fill the memory


class Job:
    """A running plan; a context manager that ends the workers when it is left, whatever the reason."""

    def __init__(self, graph: Graph, plan: Plan, *, dispatch_name: str, deadline_s: float) -> None:
        self.plan = plan
        self._graph, self._deadline_s = graph, deadline_s
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._dispatch = dispatch.DISPATCHES[dispatch_name]()
        self._actors: list[Any] = []
        self._crew = Crew(plan, deadline_s)
        self._folder = ""
        self._owns_ray = self._dispatching = self._ended = self._failed = False
        self._ticked = self._finished = 0
        self._last_s = self._start_s = 0.0

    @property
    def pids(self) -> Mapping[str, int]:
        """The process id of each worker, by its name in the plan."""
        return dict(self._crew.pids)

    def __enter__(self) -> "Job":
        try:
            self._start()
        except BaseException:
            self._fail()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._failed = self._failed or kind is not None
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlgraph-")
        authkey = secrets.token_bytes(32)
        self._owns_ray = dispatch.start_ray()
        address = f"{self._folder}/driver"
        with Listener(address, family="AF_UNIX", backlog=len(self.plan.workers), authkey=authkey) as listener:
            welcoming = self._crew.welcome(listener, self._folder)
            crew = setups(self._graph, self.plan, self._folder, authkey, self._deadline_s)
            self._actors = [dispatch.create(setup, address) for setup in crew]
            ray.get([actor.open.remote() for actor in self._actors])
            welcoming.join()
        started = [actor.start.remote() for actor in self._actors]
        with Status("", console=Console(stderr=True)) as status:
            self._crew.until_ready(lambda missing: status.update(f"starting workers, waiting for {', '.join(missing)}"))
        ray.get(started)
        self._dispatch.start(self._actors, self.plan.window)
        self._dispatching = True

    def steps(self, count: int) -> Iterator[Step]:
        """Run `count` more steps and give each as it finishes; the steps after it are already at work.

        Raises NodeError for a node that failed, WorkerDied for a process that ended, ChannelTimeout for a deadline that
        expired; the job is closed by then.
        """
        last = self._finished + count
        while self._finished < last:
            if self._ended:
                raise RlgraphError("the job is closed; launch the plan again")
            try:
                step = self._step(last)
            except RlgraphError:
                self._fail()
                raise
            except ray.exceptions.RayError as error:  # Ray may notice a death first, without knowing whose
                explanation = self._crew.explanation()
                self._fail()
                raise (explanation or error) from error
            yield step

    def _fail(self) -> None:
        self._failed = True
        self.close()

    def _step(self, last: int) -> Step:
        self._start_s = self._start_s or time.monotonic()
        self._last_s = self._last_s or self._start_s
        while self._ticked < min(last, self._finished + self.plan.window):
            self._dispatch.tick(self._ticked)
            self._crew.tell(messages.Go(self._ticked))
            self._ticked += 1
        reports = self._crew.reports(self._finished)
        if self._finished:  # every worker has gone on to this step, so Ray has what they returned for the one before
            self._dispatch.report(self._finished - 1)
        now, index = time.monotonic(), self._finished
        seconds, self._last_s, self._finished = now - self._last_s, now, index + 1
        spans = [span for report in reports for span in report.spans]
        self._spans += spans
        metrics = {name: value for report in reports for name, value in report.metrics.items()}
        metrics |= timings(self.plan, spans) | {"timing_s/step": seconds, "training/global_step": float(index)}
        return Step(index, metrics, int(metrics.get("staleness/max", 0)), seconds)

    def spans(self) -> Sequence[Span]:
        """Return what each worker did so far, in seconds from the first tick."""
        return [Span(s.name, s.kind, s.step, s.worker, s.start_s - self._start_s, s.end_s - self._start_s, s.version) for s in self._spans]

    def costs(self) -> Costs:
        """Return what each node has cost in this run, for `rlgraph.compile(graph, cluster, costs)`."""
        return measured_costs(self.plan, list(self._spans))

    def close(self) -> None:
        """End the workers: those that are idle say goodbye, those that do not answer are killed. Nothing is left behind."""
        if self._ended:
            return
        self._ended = True
        self._crew.tell(messages.Stop())
        gone = self._crew.until_gone(ABANDON_S if self._failed else GOODBYE_S)
        if not gone:
            for actor in self._actors:
                ray.kill(actor)
        if self._dispatching:
            self._dispatch.stop()
        for actor in self._actors:
            ray.kill(actor)
        self._crew.until_ended(GOODBYE_S)
        if self._owns_ray:
            dispatch.stop_ray()
        if self._folder:
            shutil.rmtree(self._folder)
