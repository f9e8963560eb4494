"""The reference for tests: the same plan, its nodes one after another in this process, without Ray."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from rlgraph import notices
from rlgraph.channels.api import Reader, Writer, first_choice, open_reader, open_writer
from rlgraph.channels.weights.endpoints import WeightsReader, WeightsWriter
from rlgraph.engines.hf.export import AdapterForm, ExportDtype, Exported, ExportLayout, check_target, write_shards
from rlgraph.engines.lora import ThreadBase
from rlgraph.errors import CheckpointError, PlanError, RlgraphError
from rlgraph.graph.graph import Graph
from rlgraph.nodes.base import Context
from rlgraph.notices import old_attribute
from rlgraph.plan.plan import Plan
from rlgraph.plan.schedule import Span
from rlgraph.runtime.checkpoint.export import Source, boxes, check_source, model_card, write_export
from rlgraph.runtime.checkpoint.store import Checkpoints, check_apart, choose_model, trained_models
from rlgraph.runtime.measure import NO_STEP, Step, bits, oldest, timings
from rlgraph.runtime.worker.executor import Inbox, Mailbox, Outbox, Worker
from rlgraph.runtime.worker.progress import Progress
from rlgraph.runtime.worker.spec import EdgeEndpoints, WorkerSpec, worker_specs
from rlgraph.runtime.worker.weight_loops import Loop
from rlgraph.settings import Natural, check_arguments


class LocalJob:
    """Runs a plan step by step. Depth and versions are the plan's, so the results are bit-identical to a run on Ray.

    Raises PlanError for a model with several ranks: each rank needs a process.
    """

    def __init__(self, graph: Graph, plan: Plan, checkpoints: Checkpoints | None = None) -> None:
        for worker in plan.workers:
            if worker.world > 1:
                raise PlanError(f"worker '{worker.name}' is one of {worker.world} ranks, which need a process each; launch the plan on Ray")
        self.plan, self._graph = plan, graph
        self._here: dict[str, Any] = {}  # state shared by the ends of its channels
        self._bases: dict[str, ThreadBase] = {}
        self.checkpoints = checkpoints
        if checkpoints is not None:
            checkpoints.open()
        start = checkpoints.start() if checkpoints is not None else None
        found = [replace(spec, ahead=0) for spec in worker_specs(graph, plan, "", b"", 0.0, start)]
        self.progress = {s.worker.name: self._progress(s) for s in found}
        self._homes = {node: progress for progress in self.progress.values() for node in progress.worker.spec.worker.nodes}
        self._entered = self._open = self._stepped = False
        self._asked, self._finished = 0, checkpoints.newest if checkpoints is not None else 0

    @property
    def finished_steps(self) -> int:
        """The number of finished steps."""
        return self._finished

    finished = old_attribute("finished", "finished_steps")

    def start(self) -> "LocalJob":
        """Load the models without a `with` block, e.g. in a notebook whose later cells run the steps; `close()` ends the job."""
        return self.__enter__()

    def __enter__(self) -> "LocalJob":
        if self._entered:
            raise RlgraphError("the job is running or has run: create another with `plan.run_here()`")
        self._entered = True
        for progress in self.progress.values():
            progress.load()
        self._open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and not self._stepped:
            notices.here.say(NO_STEP)
        if kind is None:
            self.close()
        else:
            self._release()

    def close(self) -> None:
        """Save the steps since the newest checkpoint, and close the models. Raises CheckpointError if the steps could not be saved."""
        try:
            if self._open and self.checkpoints is not None and self._finished > self.checkpoints.newest:
                self._save(self._finished)
        finally:
            self._release()

    def _release(self) -> None:
        if self._open:
            self._open = False
            for progress in self.progress.values():
                progress.close()
            if self.checkpoints is not None:
                self.checkpoints.close()

    def _progress(self, spec: WorkerSpec) -> Progress:
        name, mailbox = spec.worker.name, Mailbox()
        for channel, posts in (each for each in spec.channels if each[0].kind != "order"):  # here nodes never overlap anyway
            if posts[0].writer == name:
                mailbox.outboxes.append(Outbox(channel, self._writer(posts[0])))
            users = tuple(node.name for node in spec.nodes if node.name in channel.readers)
            if users:
                mailbox.inboxes.append(Inbox(channel, [self._reader(posts[0])], users))
        loops = []
        for plan, posts, dtype in spec.loops:
            loop = Loop(replace(plan, buffers=1))  # nothing decodes while weights arrive
            if posts[0].writer == name:
                loop.writer = WeightsWriter(self._writer(posts[0]), getattr(torch, dtype), plan.bucket_bytes, plan.checksum)
            if any(node.name in plan.readers for node in spec.nodes):
                loop.reader = WeightsReader([self._reader(posts[0])], buffers=1)
            loops.append(loop)
        worker = Worker(
            spec,
            mailbox,
            loops,
            Context(
                threads=spec.worker.threads,
                shares_devices=spec.shares_devices,
                set_aside=spec.set_aside,
                sequences=spec.sequences,
                exact=spec.exact,
                shared_base=self._bases.setdefault(spec.shared_base, ThreadBase()) if spec.shared_base else None,
            ),
        )
        return Progress(worker, self.checkpoints.hear if self.checkpoints is not None else lambda news: None)

    def _writer(self, post: EdgeEndpoints) -> Writer:
        return open_writer(first_choice("process"), post.in_process(self._here))

    def _reader(self, post: EdgeEndpoints) -> Reader:
        return open_reader(first_choice("process"), post.in_process(self._here))

    @check_arguments(PlanError)
    def steps(self, count: Natural) -> Iterator[Step]:
        """Run the next `count` steps and yield each as it finishes; steps in the checkpoint are not yielded again."""
        before, self._stepped = self._asked, True
        self._asked += count
        try:
            while self._finished < self._asked:
                if not self._open:
                    how = "inside `with plan.run_here() as job:`, or between job.start() and job.close()"
                    raise RlgraphError(f"the job is not running: call job.steps() {how}")
                step, start = self._finished, time.monotonic()
                self._fire(step, step + 1)
                self._finished = step + 1
                yield self._report(step, time.monotonic() - start)
                if self.checkpoints is not None and self._finished % self.checkpoints.recovery.every == 0:
                    self._save(self._finished)  # only after the caller has seen the step: a checkpoint holds only steps that were yielded
        finally:  # if the caller leaves the loop early, the remaining steps no longer count as asked for
            self._asked -= max(before + count - max(self._finished, before), 0)

    @check_arguments(PlanError)
    def export(
        self, folder: str | Path, *, dtype: ExportDtype = "bfloat16", policy: str | None = None, adapter: AdapterForm = "merged"
    ) -> Exported:
        """Write the trained model as a Hugging Face folder; see `Job.export`."""
        where = f"export('{folder}')"
        model = choose_model(trained_models(self._graph, self.plan), policy, where)
        check_target(folder)
        check_source(model, where)
        check_apart(model, adapter, where)
        engine = next(p.worker.context.engine for p in self.progress.values() if p.worker.spec.worker.model == model.name)
        card = model_card(self._graph, self.plan, model, self._finished, dtype, {}, {})

        def write(path: Path, layout: ExportLayout) -> None:
            write_shards(path, layout, engine.weight_shards())

        return write_export(folder, Source(model, self._finished, card, adapter), dtype, [boxes(engine.weight_shards())], write)

    def _fire(self, step: int, until: int) -> None:
        """Fire every node that has not fired for `step`, in the workers that must reach it: each goes to `until` plus its lookahead."""
        for event in self.plan.schedule.events:
            progress = self._homes[event.node]
            if event.kind == "fire" and progress.fired <= step < until + progress.lookahead:
                torch.set_num_threads(progress.worker.spec.worker.threads)
                progress.worker.fire(progress.worker.spec.node(event.node), step, event.chunk)
        for progress in self.progress.values():
            if progress.fired <= step < until + progress.lookahead:
                progress.finish(step)

    def _save(self, step: int) -> None:
        """Fire ahead the steps that the checkpoint needs, one after another, and complete it."""
        assert self.checkpoints is not None
        for ahead in range(max(progress.lookahead for progress in self.progress.values())):
            self._fire(step + ahead, step)
        for progress in self.progress.values():
            progress.save(step)
            progress.wait()
        self.checkpoints.commit(step)
        for trouble in self.checkpoints.troubles:
            raise CheckpointError(trouble)

    def _report(self, step: int, seconds: float) -> Step:
        metrics: dict[str, float] = {}
        spans: list[Span] = []
        for progress in self.progress.values():
            found, times = progress.step(step)
            metrics |= found
            spans += times
        metrics |= (
            oldest(metrics) | timings(self.plan, spans) | bits(self.plan) | {"timing_s/step": seconds, "training/global_step": float(step)}
        )
        if self.checkpoints is not None:
            self.checkpoints.note(step, metrics)
        return Step(step, metrics, int(metrics.get("staleness/max", 0)), seconds)
