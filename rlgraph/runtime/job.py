"""A job: a plan at work on Ray. Gives its steps as they finish, and leaves nothing behind."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from rlgraph.errors import RlgraphError
from rlgraph.graph import Graph
from rlgraph.planning.costs import Costs
from rlgraph.planning.fit import measured_costs
from rlgraph.planning.plan import Plan
from rlgraph.planning.schedule import Sampled, Span
from rlgraph.runtime.attempt import Attempt
from rlgraph.runtime.measure import Step, averaged, timings

KEPT_SPANS = 100_000  # some thousand steps, so that a long run does not fill the memory
KEPT_SAMPLED = 2_000


class Job:
    """A running plan; a context manager that ends the workers when it is left, whatever the reason."""

    def __init__(self, graph: Graph, plan: Plan, *, dispatch_name: str, deadline_s: float) -> None:
        self.plan = plan
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        self._attempt = Attempt(graph, plan, dispatch_name=dispatch_name, deadline_s=deadline_s)
        self._finished = 0
        self._sampled: deque[Sampled] = deque(maxlen=KEPT_SAMPLED)
        self._published_bytes = 0
        self._last_s = self._start_s = 0.0

    @property
    def pids(self) -> Mapping[str, int]:
        """The process id of each worker, by its name in the plan."""
        return self._attempt.pids

    def __enter__(self) -> "Job":
        self._attempt.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._attempt.abandon()
        self.close()

    def steps(self, count: int) -> Iterator[Step]:
        """Run `count` more steps and give each as it finishes; the steps after it are already at work.

        Raises NodeError for a node that failed, WorkerDied for a process that ended, ChannelTimeout for a deadline that
        expired; the job is closed by then.
        """
        last = self._finished + count
        while self._finished < last:
            if self._attempt.ended:
                raise RlgraphError("the job is closed; launch the plan again")
            yield self._step(last)

    def _step(self, last: int) -> Step:
        self._start_s = self._start_s or time.monotonic()
        self._last_s = self._last_s or self._start_s
        reports = self._attempt.step(last)
        now, index = time.monotonic(), self._finished
        seconds, self._last_s, self._finished = now - self._last_s, now, index + 1
        spans = [span for report in reports for span in report.spans]
        self._spans += spans
        self._sampled += [sampled for report in reports for sampled in report.sampled]
        self._published_bytes = sum(report.published_bytes for report in reports)
        metrics = averaged(report.metrics for report in reports)
        metrics |= timings(self.plan, spans) | {"timing_s/step": seconds, "training/global_step": float(index)}
        return Step(index, metrics, int(metrics.get("staleness/max", 0)), seconds)

    def spans(self) -> Sequence[Span]:
        """Return what each worker did so far, in seconds from the first tick."""
        return [Span(s.name, s.kind, s.step, s.worker, s.start_s - self._start_s, s.end_s - self._start_s, s.version) for s in self._spans]

    def costs(self) -> Costs:
        """Return what each node has cost in this run, for `rlgraph.compile(graph, cluster, costs)` and `rlgraph.tune`.

        The first step, which warms up, is left out; the lengths of the responses are those of all steps.
        """
        return measured_costs(self.plan, list(self._spans), list(self._sampled), self._published_bytes)

    def close(self) -> None:
        """End the workers: those that are idle say goodbye, those that do not answer are killed. Nothing is left behind."""
        self._attempt.close()
