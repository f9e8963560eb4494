"""The oracle: the same plan, its nodes one after another in this process, without Ray."""

from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import torch

from rlgraph.channels.base import Reader, Writer
from rlgraph.channels.local import local_channel
from rlgraph.channels.weights import WeightsReader, WeightsWriter
from rlgraph.errors import PlanError
from rlgraph.graph import Graph
from rlgraph.nodes.base import Context
from rlgraph.planning.plan import Plan
from rlgraph.planning.schedule import Span
from rlgraph.runtime.mailbox import Inbox, Mailbox, Outbox
from rlgraph.runtime.measure import Step, timings
from rlgraph.runtime.tasks import Post, WorkerSetup, setups
from rlgraph.runtime.worker import Loop, Worker


class LocalJob:
    """Runs a plan step by step; depth and versions are the plan's, so a run on Ray gives the same bits.

    Raises PlanError for a model with several ranks: they need a process each.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        for worker in plan.workers:
            if worker.world > 1:
                raise PlanError(f"worker '{worker.name}' is one of {worker.world} ranks, which need a process each; launch the plan on Ray")
        self.plan = plan
        self._ends: dict[str, tuple[Writer, dict[str, Reader]]] = {}
        made = setups(graph, plan, "", b"", 0.0)
        self.workers = {setup.worker.name: self._worker(setup) for setup in made}
        self._finished = 0

    def __enter__(self) -> "LocalJob":
        for worker in self.workers.values():
            worker.load()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for worker in self.workers.values():
            worker.close()

    def _worker(self, setup: WorkerSetup) -> Worker:
        name, mailbox = setup.worker.name, Mailbox()
        for channel, posts in setup.channels:
            if posts[0].writer == name:
                mailbox.outboxes.append(Outbox(channel, self._writer(posts[0])))
            users = tuple(task.name for task in setup.tasks if task.name in channel.readers)
            if users:
                mailbox.inboxes.append(Inbox(channel, [self._reader(posts[0], name)], users))
        loops = []
        for plan, posts, dtype in setup.loops:
            loop = Loop(replace(plan, buffers=1))  # nothing decodes while weights arrive
            if posts[0].writer == name:
                loop.writer = WeightsWriter(self._writer(posts[0]), getattr(torch, dtype))
            if any(task.name in plan.readers for task in setup.tasks):
                loop.reader = WeightsReader([self._reader(posts[0], name)], buffers=1)
            loops.append(loop)
        return Worker(setup, mailbox, loops, Context(threads=setup.worker.threads))

    def _channel(self, post: Post) -> tuple[Writer, dict[str, Reader]]:
        if post.address not in self._ends:
            writer, readers = local_channel(post.name, post.slots, post.readers)
            self._ends[post.address] = (writer, dict(zip(post.read_by, readers, strict=True)))
        return self._ends[post.address]

    def _writer(self, post: Post) -> Writer:
        return self._channel(post)[0]

    def _reader(self, post: Post, worker: str) -> Reader:
        return self._channel(post)[1][worker]

    def steps(self, count: int) -> Iterator[Step]:
        """Run `count` more steps and give each as it finishes."""
        homes = {task.name: worker for worker in self.workers.values() for task in worker.setup.tasks}
        for step in range(self._finished, self._finished + count):
            for event in self.plan.schedule.events:
                if event.kind == "fire":
                    worker = homes[event.node]
                    torch.set_num_threads(worker.setup.worker.threads)
                    worker.fire(worker.setup.task(event.node), step, event.part)
            self._finished = step + 1
            yield self._report(step)

    def _report(self, step: int) -> Step:
        metrics: dict[str, float] = {}
        spans: list[Span] = []
        for worker in self.workers.values():
            found, times = worker.report()
            metrics |= found
            spans += times
        seconds = sum(s.end_s - s.start_s for s in spans)
        metrics |= timings(self.plan, spans) | {"timing_s/step": seconds, "training/global_step": float(step)}
        return Step(step, metrics, int(metrics.get("staleness/max", 0)), seconds)
