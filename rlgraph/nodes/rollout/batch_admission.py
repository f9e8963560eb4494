"""Continuous decoding: the rule by which the next batch and new weights join a batch that still decodes, and the loop that applies it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlgraph.engines.api import GenerateEngine, Running
from rlgraph.errors import DataError, GraphError
from rlgraph.graph.nodes import Feedback
from rlgraph.nodes.base import Context
from rlgraph.nodes.prompts import Prompts
from rlgraph.nodes.rollout.responses import Outcome, Task


@dataclass(frozen=True)
class BatchAdmission:
    """The rule by which new weights and new prompts join running responses. `depth` is None without a feedback edge.

    `interrupt`: the engine swaps in each published version before its next decode step, even if the edge is not `latest`. The clock
    decides when a version arrives, so a run no longer repeats bit for bit.

    `continuous`: batch k + 1 joins once half of the responses of batch k have ended. It needs version k + 1 - depth, and the rest of
    batch k goes on under that version. Without `interrupt` the engine waits for exactly this version, so a run still depends on its
    seed and depth alone. With `interrupt` up to `depth` batches join ahead, each as soon as the engine holds a version it may use.
    """

    interrupt: Running | None = None
    continuous: bool = False
    depth: int | None = None

    @property
    def running(self) -> Running:
        """What the engine does with the keys and values of running responses when the weights change."""
        return self.interrupt or "recompute"

    def needs(self, step: int) -> int:
        """Compute the oldest version of the weights that may write a token of batch `step`."""
        return 0 if self.depth is None else max(0, step - self.depth)

    def ahead(self) -> int:
        """Compute how many batches may decode beside the one that is due."""
        if not self.continuous:
            return 0
        return self.depth or 1 if self.interrupt else 1


def admission_rule(node: str, weights: Feedback | None, interrupt: Running | None, continuous: bool, source: object) -> BatchAdmission:
    """Make the rule. Raises GraphError for a setting that has no effect, or that cannot keep the staleness bound."""
    if interrupt is not None and weights is None:
        raise GraphError(f"node '{node}' has interrupt={interrupt!r} but no weights that change; pass a feedback edge, or leave it out")
    if interrupt is not None and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has interrupt={interrupt!r}, but at depth=0 of feedback '{weights.name}' no version is published while "
            "responses decode: use depth>=1, or leave it out"
        )
    if continuous and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has continuous=True at depth=0 of feedback '{weights.name}', where the next batch may only start on weights "
            "trained on this one: use depth>=1, or leave it out"
        )
    if continuous and source is not None and not isinstance(source, Prompts):
        raise GraphError(
            f"node '{node}' has continuous=True, so it looks up the next prompts while it decodes, which only rlgraph.prompts can tell, "
            "and of a data set with a length: pass its output, read a stream into rg.data.rows(list(...)), or leave continuous out"
        )
    return BatchAdmission(interrupt, continuous, weights.depth if weights is not None else None)


class TaskDecoder(Protocol):
    """Samples the responses of tasks: one decode step at a time, in single turns or in conversations."""

    def submit(self, task: Task) -> None:
        """Queue a task."""

    def step(self) -> Mapping[str, Outcome]:
        """Decode one step, or wait a while if nothing can; return the responses that have ended, by the id of their request."""


class OneTurn:
    """Samples each response in one turn. The ids of its requests begin with `prefix`, and no other node's do."""

    def __init__(self, engine: GenerateEngine, prefix: str) -> None:
        self.engine, self.prefix = engine, prefix
        self._prompts: dict[str, Sequence[int]] = {}

    def submit(self, task: Task) -> None:
        self._prompts[task.request.id] = task.request.prompt
        self.engine.submit(task.request)

    def step(self) -> Mapping[str, Outcome]:
        return {name: Outcome(self._prompts.pop(name), response) for name, response in self.engine.step(self.prefix).items()}


class _OpenBatch:
    """The tasks of one step, and their responses so far."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.done: dict[str, Outcome] = {}

    def tail(self) -> bool:
        """Tell whether at most half of the responses still decode."""
        return 2 * len(self.done) >= len(self.tasks)


class DecodeLoop:
    """Decodes the batches of one rollout. `upcoming(step)` makes the tasks of a batch before it is due."""

    def __init__(self, context: Context, decoder: TaskDecoder, rule: BatchAdmission, upcoming: Callable[[int], Sequence[Task]]) -> None:
        self.context, self.decoder, self.rule, self.upcoming = context, decoder, rule, upcoming
        self._batches: dict[int, _OpenBatch] = {}
        self._home: dict[str, _OpenBatch] = {}  # of each task that is not done

    def begin(self, step: int, tasks: Sequence[Task]) -> None:
        """Submit the tasks of batch `step`, unless it has joined before. Raises DataError if it joined with other tasks."""
        self._batches = {number: batch for number, batch in self._batches.items() if number >= step}
        if step not in self._batches:
            self._submit(step, tasks)
        elif self._batches[step].tasks != tasks:
            raise DataError(f"step {step} has other prompts than it had one step before: the items of a data set do not change")

    def take(self, step: int, tasks: Sequence[Task]) -> list[Outcome]:
        """Decode until these tasks of batch `step` are done, and return their responses, in the order of the tasks."""
        batch = self._batches[step]
        self.context.report_progress(len(batch.done), len(batch.tasks), "responses")
        missing = {task.request.id for task in tasks} - batch.done.keys()
        while missing:
            self._join(step)
            finished = self.decoder.step()
            for name, sampled in finished.items():
                self._home.pop(name).done[name] = sampled
                missing.discard(name)
            if finished:
                self.context.report_progress(len(batch.done), len(batch.tasks), "responses")
        return [batch.done[task.request.id] for task in tasks]

    def _submit(self, step: int, tasks: Sequence[Task]) -> None:
        batch = self._batches[step] = _OpenBatch(tasks)
        for task in tasks:
            self.decoder.submit(task)
            self._home[task.request.id] = batch

    def _join(self, step: int) -> None:
        """Take new weights and admit the next batches between two decode steps, as far as the rule allows."""
        arrivals = self.context.arrivals
        if self.rule.interrupt and arrivals is not None:
            arrivals.poll()
        newest = max(self._batches)
        while newest < step + self.rule.ahead() and self._batches[newest].tail():
            needed = self.rule.needs(newest + 1)
            if not self.rule.interrupt and arrivals is not None:
                arrivals.wait(needed)
            if self.context.version < needed:
                return
            newest += 1
            self._submit(newest, self.upcoming(newest))
