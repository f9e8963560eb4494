"""A job: a plan that runs on Ray. It yields steps as they finish, restarts from the last checkpoint, and leaves nothing behind.

A failure counts against the restarts of the job, and against the prompt that killed its worker.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from rlgraph.analysis.attribution import Bubbles
from rlgraph.analysis.findings import findings
from rlgraph.analysis.run import InvariantMonitor, Observed, Run
from rlgraph.analysis.words import Terminal, graph_settings
from rlgraph.engines.hf.export import AdapterForm, ExportDtype, Exported, ExportLayout, check_target
from rlgraph.errors import CheckpointError, DispatchError, ExportError, NodeError, PlanError, RlgraphError, StalenessError
from rlgraph.graph.graph import Graph
from rlgraph.nodes.prompts import Prompts
from rlgraph.notices import old_attribute
from rlgraph.plan.calibrate import Trace, costs_of
from rlgraph.plan.channels import check_encrypted
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import compile_plan
from rlgraph.plan.costs import Costs
from rlgraph.plan.plan import Plan
from rlgraph.plan.replan import Replanner
from rlgraph.plan.schedule import Sampled, Span
from rlgraph.runtime import messages
from rlgraph.runtime.checkpoint.export import Source, check_source, model_card, write_export
from rlgraph.runtime.checkpoint.store import Checkpoints, Recovery, check_apart, choose_model, difference, fingerprint, trained_models
from rlgraph.runtime.driver.session import PLAIN, Links, Session
from rlgraph.runtime.driver.signals import Signals, hold_signals
from rlgraph.runtime.measure import NO_STEP, Metrics, Spans, Step, average_metrics, behind_by_loop, bits, oldest, timings
from rlgraph.runtime.messages import Message, ProfileRequest, Report, SampledRows, SampleRequest, sample_sources
from rlgraph.runtime.worker.activity import Heartbeat
from rlgraph.runtime.worker.spec import Start
from rlgraph.settings import Natural, check_arguments

# Limit how often a job starts again without making progress in between.

HOPELESS = (CheckpointError, StalenessError)  # errors that the same job would raise again


@dataclass
class Restarts:
    """Counts failures in a row; the count restarts if there is a newer checkpoint than at the last failure."""

    allowed: int
    used: int = 0
    newest: int = 0

    def allows(self, error: Exception, newest: int, *, ready: bool) -> bool:
        """Count a failure and return whether the job may start again; `ready` means that all workers were ready when it failed."""
        if newest > self.newest:
            self.used, self.newest = 0, newest
        unloadable = isinstance(error, NodeError) and not ready  # an engine that failed to load will fail again
        if isinstance(error, HOPELESS) or unloadable or self.used >= self.allowed:
            return False
        self.used += 1
        return True


# Find prompts that kill their worker: fire for one prompt at a time, and skip a prompt that has killed a worker twice.


@dataclass
class PoisonPrompts:
    """Records the deaths of workers so far. `probe` is the (node, step) that the next session fires prompt by prompt."""

    graph: Graph
    plan: Plan
    probe: tuple[str, int] | None = None
    accused: int | None = None  # the place in the data order of the prompt at which the last probe died

    def saw(self, did: Heartbeat | None, set_aside: tuple[int, ...]) -> int | None:
        """Record what a worker did when it failed; return the place of a prompt that has now killed its worker twice."""
        if did is None:
            return None
        activity = did.activity
        if activity.kind == "probe":
            place = self._place(did.step, activity.prompt, set_aside)
            guilty, self.accused = place == self.accused, place
            if guilty:
                self.probe = self.accused = None
            return place if guilty else None
        self.accused = None
        self.probe = (activity.node, did.step) if activity.kind == "fire" and self._can_probe(activity.node) else None
        return None

    def _source(self) -> Prompts | None:
        sources = [node.operation for node in self.graph.nodes if isinstance(node.operation, Prompts)]
        return sources[0] if len(sources) == 1 and not sources[0].by_results else None  # only its worker knows its order

    def _place(self, step: int, prompt: int, set_aside: tuple[int, ...]) -> int:
        source = self._source()
        assert source is not None
        return source.positions(step, set_aside)[prompt]

    def _can_probe(self, node: str) -> bool:
        """Whether a node can fire for a single prompt without changing the run; a node of a trained model cannot."""
        planned = next((found for found in self.plan.nodes if found.name == node), None)
        trained = {found.model for found in self.plan.nodes if found.work == "train"}
        return planned is not None and bool(planned.reads) and planned.model not in {*trained} - {None} and self._source() is not None

    def describe(self, place: int) -> str:
        """Describe a prompt in words."""
        source = self._source()
        assert source is not None
        return f"prompt {place} of the data order ({source.item(place)[source.prompt_field]!r:.80})"


# Requests of a recorder to a job's workers: rows that they write, and profiles.

Tell = Callable[[Message], None]


class RecorderPort:
    """The requests of a recorder, which each session of the job sends to its workers, and the rows that the workers returned."""

    def __init__(self, graph: Graph, tell: Tell) -> None:
        self._graph, self._tell = graph, tell
        self._requests: dict[type, SampleRequest | ProfileRequest] = {}
        self._rows: dict[int, list[SampledRows]] = {}
        self.before_commit: Callable[[], None] = lambda: None  # writes the rows of a checkpoint's steps that a recorder has not yet written

    def request_samples(self, share: float, most: int | None = None, seed: int = 0) -> None:
        """Ask the workers for rows of each further step: a share drawn by `seed`, at most `most`. `sampled_rows` returns them."""
        self._request(SampleRequest(share, most, seed, sample_sources(self._graph)))

    def request_profile(self, request: ProfileRequest) -> None:
        """Ask workers to write profiles of some of the further steps."""
        self._request(request)

    def _request(self, request: SampleRequest | ProfileRequest) -> None:
        self._requests[type(request)] = request
        self._tell(request)

    @property
    def idle(self) -> bool:
        """Whether nothing was asked for."""
        return not self._requests

    def begin_session(self) -> None:
        """Send the requests to the workers of a new session, which send again the rows of steps that were not yielded."""
        self._rows.clear()
        for request in self._requests.values():
            self._tell(request)

    def take(self, rows: Sequence[SampledRows], finished: int) -> None:
        """Add rows from workers, and drop rows of steps that were yielded: nobody asked for them, or they arrive twice."""
        self._rows = {step: kept for step, kept in self._rows.items() if step >= finished}
        for each in rows:
            if each.step >= finished:
                self._rows.setdefault(each.step, []).append(each)

    def sampled_rows(self, step: int) -> Sequence[SampledRows]:
        """Return the rows of the step that was yielded last."""
        return self._rows.pop(step, [])


# Export from a running job: between two steps, each worker writes its shards.


@dataclass
class JobExports:
    """The exports of a job: exports that the user asks for, and one every few steps into the folder of checkpoints."""

    graph: Graph
    plan: Plan
    checkpoints: Checkpoints | None
    first: Mapping[str, float] = field(default_factory=dict)  # metrics of the run's first step and of the last one
    last: Mapping[str, float] = field(default_factory=dict)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Remember the metrics of a step, for the model card."""
        self.first = (self.checkpoints.figures.get(0) if self.checkpoints else None) or self.first or metrics
        self.last = metrics

    def next_due(self, finished: int) -> int:
        """The step after which the next export is due; no later step begins before it."""
        every = self.checkpoints.recovery.export_every if self.checkpoints else None
        return sys.maxsize if every is None else (finished // every + 1) * every

    def due(self, finished: int) -> Path | None:
        """The folder of the export that is due after `finished` steps; None if none is due, or the folder exists."""
        recovery = self.checkpoints.recovery if self.checkpoints else None
        if recovery is None or recovery.export_every is None or finished % recovery.export_every:
            return None
        folder = recovery.export(finished)
        return None if folder.exists() else folder

    def write(self, session: Session, folder: str | Path, dtype: ExportDtype, policy: str | None, adapter: AdapterForm) -> Exported:
        """Export a model of a session, once its steps in flight are done.

        Raises ExportError if the folder cannot be written completely; the session continues. Otherwise raises as `Session.step` does.
        """
        where = f"export('{folder}')"
        model = choose_model(trained_models(self.graph, self.plan), policy, where)
        check_target(folder)
        check_source(model, where)
        check_apart(model, adapter, where)
        held = session.shards(model.name)

        def write(path: Path, layout: ExportLayout) -> None:
            for answer in session.write_shards(model.name, messages.WriteShards(str(path), layout)):
                if answer.refused:
                    raise OSError(answer.number, os.strerror(answer.number)) if answer.number else OSError(answer.refused)

        card = model_card(self.graph, self.plan, model, held[0].step, dtype, self.first, self.last)
        return write_export(folder, Source(model, held[0].step, card, adapter), dtype, [found.boxes for found in held], write)


KEPT_SPANS, KEPT_SAMPLED, KEPT_STEPS = 100_000, 2_000, 50_000  # spans of some thousand steps
HOST_BACK_S = 300.0  # time for a lost host, or a replacement, to start again
HOST_LOST_S = 10.0  # the same for a job that continues on the other hosts


class Job:
    """A running plan, for a `with` block: leaving the block stops the workers, whatever the reason.

    `plan.launch(…)` makes it. With `checkpoint=` it resumes from the newest checkpoint, writes further ones, and restarts failed workers.

    >>> import rlgraph as rg
    >>> plan = rg.compile(rg.Graph("sums", rg.prompts([{"prompt": "1 + 1 ="}], count=4)), rg.Cluster(cpus=2))
    >>> with plan.launch() as job:  # doctest: +SKIP
    ...     rewards = [step.metrics["critic/rewards/mean"] for step in job.steps(3)]
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        dispatch_name: str,
        deadline_s: float,
        recovery: Recovery | None = None,
        links: Links = PLAIN,
        replanner: Replanner | None = None,
    ) -> None:
        self._dispatch_name, self._deadline_s, self._links = dispatch_name, deadline_s, links
        self._checkpoints = Checkpoints(graph, plan, recovery) if recovery else None
        self._restarts = Restarts(recovery.restarts if recovery else 0)
        self._replanner, self._change_s = replanner, 0.0
        self._first, self._uses_all, self._needs_all = plan.cluster, True, False  # hosts of the cluster
        if replanner is not None and plan.cluster.hosts > 1:
            self._links = replace(links, follows=True)
        self._coming: tuple[Graph, Plan] | None = None  # to be changed to
        self._earlier: tuple[Mapping[str, float], ...] = ()  # metrics of the steps under earlier plans
        self._begin_plan(graph, plan)
        self._signals = Signals(lambda: not self.session.ended and not self.session.is_forked and self.session.ticked > self.session.first)
        self.notices: tuple[str, ...] = ()  # what works differently than asked, as reported by workers
        self._console = Terminal(stderr=True, highlight=False)
        self.session = self._new_session()
        self._asked = self._finished = 0
        self._stepped = False
        self._published_bytes = 0
        self._last_s = self._start_s = self._launch_s = 0.0
        self.recorder = RecorderPort(graph, self._tell)

    def _begin_plan(self, graph: Graph, plan: Plan) -> None:
        """Set what belongs to a plan: its first one, or one that the job changes to."""
        self.plan, self._graph = plan, graph
        self._spans, self._metrics = Spans(KEPT_SPANS), Metrics(KEPT_STEPS)
        self._sampled: deque[Sampled] = deque(maxlen=KEPT_SAMPLED)
        self._monitor = InvariantMonitor(plan)
        self._poison_prompts = PoisonPrompts(graph, plan)
        self._exports = JobExports(graph, plan, self._checkpoints)
        if self._checkpoints is not None:
            self._checkpoints.graph, self._checkpoints.plan = graph, plan

    def _new_session(self, start: Start | None = None, hosts_s: float = 0.0) -> Session:
        links, name = self._links.with_wait(hosts_s), self._dispatch_name
        return Session(self._graph, self.plan, dispatch_name=name, deadline_s=self._deadline_s, start=start, links=links)

    @property
    def finished_steps(self) -> int:
        """The number of finished steps: steps yielded so far, and steps in the checkpoint from which the job resumed."""
        return self._finished

    finished = old_attribute("finished", "finished_steps")

    @property
    def pids(self) -> Mapping[str, int]:
        """The process id of each worker, by its name in the plan."""
        return self.session.pids

    def under_way(self) -> str:
        """Describe the work and the progress of the nodes, e.g. `rollout 34 of 128 responses, update 2 of 6 micro-batches`."""
        return self.session.under_way()

    def start(self) -> "Job":
        """Start the workers without a `with` block, e.g. in a notebook whose later cells run the steps; `close()` stops them.

        >>> job = plan.launch().start()  # doctest: +SKIP
        >>> next(job.steps(1)).index  # doctest: +SKIP
        0
        >>> job.close()  # doctest: +SKIP
        """
        return self.__enter__()

    def __enter__(self) -> "Job":
        if self._launch_s:
            raise RlgraphError(
                "the job is closed; launch the plan again"
                if self.session.ended
                else "the job is already running: enter it once, and launch the plan again for a second one"
            )
        sys.stdout.flush()  # a start is slow: show what the program has printed so far, also if the output is not a terminal
        self._launch_s = time.monotonic()
        self._signals.install()
        try:
            if self._checkpoints is not None:
                self._checkpoints.open()
                self._finished = self._checkpoints.newest
                if self._finished:
                    self._say(f"resuming from the checkpoint after {self._finished} steps in '{self._checkpoints.recovery.folder}'")
                self.session = self._new_session(self._checkpoints.start())
            self._start()
        except BaseException:
            self._release()
            raise
        self._change_s = time.monotonic() - self._launch_s
        self._uses_all = not self._links.follows or self.session.dispatch.devices().hosts == self._first.hosts
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.session.abandon()
        self.notice("" if kind is not None or self._stepped else NO_STEP)
        self.close()
        if kind is None and self._signals.asked is not None:
            Signals.stop(self._signals.asked)

    @check_arguments(PlanError)
    def steps(self, count: Natural) -> Iterator[Step]:
        """Run the next `count` steps of the run and yield each as it finishes; the steps after it are already in flight.

        * `count`: the number of steps. After a resume from a checkpoint it includes the steps in the checkpoint, which are not yielded
          again: the same program, run again, does the remaining steps.

        Ctrl-C and SIGTERM end the program once the steps in flight are done and saved.

        Raises NodeError for a node that failed, WorkerDied for a worker that ended, DispatchError for a process of Ray that ended, and
        ChannelTimeout for a deadline that expired, if no more `restarts` are left. Raises CertificateError for a run that violates its
        certificate. The job is closed by then.
        """
        before, self._stepped = self._asked, True
        self._asked += count
        try:
            self._change_plan_if_due()
            while self._finished < (last := self._last()):
                self.session.check_runs()
                step = self._next(min(last, self._exports.next_due(self._finished)))
                self._export_due()
                yield step
                self._settle()
                self._look_for_plan(step.seconds)
                self._change_plan_if_due()
        finally:  # if the caller leaves the loop early, the remaining steps no longer count as asked for
            self._asked -= max(before + count - max(self._finished, before), 0)
        if self._signals.asked is not None:
            self.close()
            Signals.stop(self._signals.asked)

    def _last(self) -> int:
        ends = self._signals.asked is not None or self._coming is not None
        return min(self._asked, self.session.ticked) if ends else self._asked

    def _next(self, last: int) -> Step:
        """Wait for the next step to yield; steps that a restart repeats are not yielded again."""
        self._start_s = self._start_s or time.monotonic()
        self._last_s = self._last_s or self._start_s
        while True:
            step = self.session.reported
            reports = self._reports(last)
            self.recorder.take(self.session.take_samples(), self._finished)
            self._hear()
            if step == self._finished and reports is not None:
                return self._step(step, reports)

    def _reports(self, last: int) -> Sequence[Report] | None:
        """Wait for what the workers report; None if one of them failed and all were started again."""
        try:
            return self.session.step(last)
        except RlgraphError as error:
            self._restart(error)
            return None

    def _start(self) -> None:
        """Start the workers; a worker that dies during the start is handled like one that dies later."""
        try:
            self.session.start()
        except RlgraphError as error:
            self._restart(error)
        else:
            self._begin_session()

    def _restart(self, error: Exception) -> None:
        """Start the workers again from the newest checkpoint. Raises the error if no restart is left."""
        self._settle()
        patience_s = HOST_LOST_S if self._links.follows else HOST_BACK_S
        while True:
            newest = self._checkpoints.newest if self._checkpoints else 0
            if not self._restarts.allows(error, newest, ready=self.session.is_ready):
                raise error
            first = str(error).splitlines()[0]
            self._say(
                f"{first}\nstarting again after step {newest}, {self._restarts.used} of {self._restarts.allowed} restarts without progress"
            )
            assert self._checkpoints is not None
            self._look_for_poison(self._checkpoints)
            try:
                self._restart_workers(self._checkpoints, patience_s)
            except RlgraphError as again:
                error, patience_s = again, HOST_BACK_S
            else:
                self._begin_session()
                return

    def _restart_workers(self, checkpoints: Checkpoints, patience_s: float) -> None:
        """Start the workers from the newest checkpoint; with too few hosts, under a plan for those that are left."""
        self.session = self._new_session(checkpoints.start(self._poison_prompts.probe), patience_s)
        try:
            self.session.start()
        except PlanError:
            left = self.session.left
            if left is None or left.hosts >= self.plan.cluster.hosts or self._replanner is None:
                raise
            before, plan = self.plan.split_text, self._replanner.fit(self.trace(), self.plan, left)
            graph = plan.facade.checked_source(plan)
            self._take_plan(graph, replace(plan, source=graph), time.monotonic())
            hosts = f"{plan.cluster.hosts} of {self._first.hosts} hosts"
            self.notice(f"after step {checkpoints.newest}, with {hosts} left: {before} -> {plan.split_text}")
            self._restart_workers(checkpoints, patience_s)

    def _begin_session(self) -> None:
        self._signals.install()
        self.recorder.begin_session()
        self.notice(self.session.notice)

    def _tell(self, message: Message) -> None:
        if self.session.is_ready and not self.session.ended:
            self.session.tell(message)

    def _look_for_poison(self, checkpoints: Checkpoints) -> None:
        """Set aside the prompt that has killed its worker twice, if there is one."""
        place = self._poison_prompts.saw(self.session.did, checkpoints.set_aside)
        if place is not None:
            checkpoints.set_aside = (*checkpoints.set_aside, place)
            self._say(f"{self._poison_prompts.describe(place)} has killed its worker twice: it is set aside and will not be trained on")

    @property
    def set_aside(self) -> Sequence[int]:
        """The places in the data order of the prompts that the job skips, because each killed its worker twice."""
        return self._checkpoints.set_aside if self._checkpoints else ()

    def _step(self, index: int, reports: Sequence[Report]) -> Step:
        now = time.monotonic()
        seconds, self._last_s, self._finished = now - self._last_s, now, index + 1
        spans = [span for report in reports for span in report.spans]
        self._spans.add(spans)
        self._sampled += [sampled for report in reports for sampled in report.sampled]
        self._published_bytes = sum(report.published_bytes for report in reports)
        for text in dict.fromkeys(text for told in reports for text in told.notices):
            self.notice(text)
        metrics = average_metrics(report.metrics for report in reports)
        metrics |= (
            oldest(metrics) | timings(self.plan, spans) | bits(self.plan) | {"timing_s/step": seconds, "training/global_step": float(index)}
        )
        behind = int(metrics.get("staleness/max", 0))
        self._exports.note(metrics)
        if self._checkpoints is not None:
            self._checkpoints.note(index, metrics)
        peaks = {slots.end: slots.peak for report in reports for slots in report.slots}
        self._monitor.check(index, spans, behind, peaks, self.session.clock_slack_s, behind_by_loop(self.plan, metrics))
        self._metrics.add(metrics)
        return Step(index, metrics, behind, seconds)

    def _hear(self) -> None:
        if self._checkpoints is None:
            return
        for news in self.session.news():
            self._checkpoints.hear(news)

    def _settle(self) -> None:
        """Finish the checkpoints whose steps have all been yielded, and report checkpoints that could not be written."""
        if self._checkpoints is None:
            return
        self._hear()
        self._commit(self._checkpoints)
        for trouble in self._checkpoints.troubles:
            self._say(f"{trouble}\nthe run continues; the newest checkpoint is of step {self._checkpoints.newest}")
        self._checkpoints.troubles.clear()

    def _commit(self, checkpoints: Checkpoints) -> None:
        if checkpoints.list_complete(self._finished):
            self.recorder.before_commit()
        checkpoints.commit(self._finished)

    def _save(self) -> None:
        """Make a last checkpoint if no worker is beyond the last yielded step, otherwise finish the one that is being written."""
        checkpoints, session = self._checkpoints, self.session
        if checkpoints is None or session.ended or not session.is_ready:
            return
        every, idle = checkpoints.recovery.every, session.ticked == session.reported == self._finished
        last = self._finished if idle else self._finished // every * every
        self._settle()
        if checkpoints.tried < last:
            session.save(last)  # a worker beyond this step has written it or is writing it
            while not checkpoints.has_all_answers(last):
                session.listen()
                self._hear()
            self._commit(checkpoints)
        if idle and checkpoints.newest < last:
            raise CheckpointError("\n".join([*checkpoints.troubles, f"the newest checkpoint is of step {checkpoints.newest}"]))

    def notice(self, text: str) -> None:
        """Report once that something works differently than asked: print `text`, and add it to `notices` and the report."""
        if text and text not in self.notices:
            self.notices = (*self.notices, text)
            self._say(text)

    @check_arguments(PlanError)
    def export(
        self, folder: str | Path, *, dtype: ExportDtype = "bfloat16", policy: str | None = None, adapter: AdapterForm = "merged"
    ) -> Exported:
        """Write the trained model as a Hugging Face folder, which transformers, vLLM and others load; see docs/checkpoints.md.

            with plan.launch() as job:
                for step in job.steps(100):
                    ...
                print(job.export("model"))  # model: 134,515,008 parameters after step 100, bfloat16, 0.27 GB

        The workers first finish the steps in flight: `Exported.step` is the number of steps that the weights have seen. Each worker writes
        its own shard of the weights.

        * `folder`: the new folder.
        * `dtype`: "bfloat16" or "float32", of the weights in the folder.
        * `policy`: the name of one of several trained models. None: the only one.
        * `adapter`: `"merged"` merges a trained adapter into its model; `"apart"` writes only the adapter, as a folder in PEFT's format.

        Raises ExportError for a folder that exists or cannot be written, and for a full disk: no folder is left, and the job continues.
        If a worker dies meanwhile, it raises as `steps` does, unless a restart is left; then call `export` again.
        """
        self.session.check_runs()
        try:
            return self._exports.write(self.session, folder, dtype, policy, adapter)
        except ExportError:
            raise
        except RlgraphError as error:
            self._restart(error)
            raise ExportError(f"export('{folder}'): {str(error).splitlines()[0]}\nthe workers were started again; export later") from error

    def _export_due(self) -> None:
        """Make the export that is due after the last step. One that fails does not stop the run."""
        folder = self._exports.due(self._finished)
        if folder is not None:
            try:
                self.export(folder)
            except ExportError as error:
                self._say(f"{error}\nthe run continues without this export")

    @check_arguments(PlanError)
    def replan(self, plan: Plan) -> None:
        """Continue under another plan of the same nodes, with other shares of the devices or other pools, after the steps in flight.

            with plan.launch(checkpoint="checkpoints") as job:
                for step in job.steps(500):
                    if step.index == 100:
                        job.replan(rg.compile(graph(trainers=3), rg.cluster()))

        The job saves, ends its workers, and starts the workers of the new plan. Batches, losses and weights are the same as if the run had
        been stopped, and resumed with that plan. Inside of `rg.runs.warm()` workers start in seconds. If they cannot start, the job
        continues under the plan before. Spans, costs and report are of the present plan; metrics are of all steps.

        * `plan`: of a graph with the same nodes, columns, batch sizes and depths. Columns cross processes by the default transport.

        Raises PlanError without checkpoints, and for a plan that could not resume from one.
        """
        self.session.check_runs()
        if self._checkpoints is None:
            raise PlanError("job.replan(…): the run continues from a checkpoint; launch with checkpoint='folder'")
        if self._links.encrypt:
            check_encrypted(plan)
        graph = plan.facade.checked_source(plan)
        if found := difference(fingerprint(self._graph, self.plan), fingerprint(graph, plan)):
            raise PlanError(f"job.replan(…): the plan is of another graph: {found}; only pools and their devices may change")
        self._coming = graph, replace(plan, source=graph)

    def _devices(self) -> Cluster:
        """Describe the devices that a plan may use now: those of the first plan, or of all hosts that there are if it used all."""
        if not self._links.follows:
            return self.plan.cluster
        try:
            found = self.session.dispatch.devices()
        except DispatchError:  # the job hears of Ray's death otherwise
            return self.plan.cluster
        return found if self._uses_all or found.hosts < self._first.hosts else self._first

    def _leave_hosts(self, replanner: Replanner) -> None:
        """Change to a plan without the hosts that are about to end. If none fits, continue until they have ended."""
        try:
            plan = replanner.fit(self.trace(), self.plan, self._devices())
        except PlanError as error:
            self._needs_all = True
            self._say(f"a host is about to end, and the run cannot do without it: {error}")
            return
        self.notice(f"after step {self._finished}, a host is about to end: {self.plan.split_text} -> {plan.split_text}")
        self.replan(plan)

    def _look_for_plan(self, seconds: float) -> None:
        """Look for a faster plan if it is time, or for one without a host that is about to end; the last step lasted `seconds`."""
        left, replanner = self._asked - self._finished, self._replanner
        if replanner is None or self._coming is not None or left <= 0:
            return
        if self._links.follows and not self._needs_all and self.session.dispatch.loses_hosts():
            self._leave_hosts(replanner)
        elif replanner.note(seconds):
            change = replanner.look(self.trace(), self.plan, self._devices(), steps_left=left, change_s=self._change_s)
            if change is not None:
                self.notice(f"after step {self._finished}, {change}")
                self.replan(change.after)

    def _change_plan_if_due(self) -> None:
        """Change the plan if another is to come, steps are left, and those in flight are done."""
        if self._coming is not None and self._finished < self._asked and self._finished == self.session.ticked:
            self._change_plan(*self._coming)

    def _take_plan(self, graph: Graph, plan: Plan, began_s: float) -> None:
        """Continue under another plan, whose workers are to be started; the change began at `began_s`."""
        self._launch_s, self._start_s, self._earlier = began_s, 0.0, (*self._earlier, *self._metrics)
        self._begin_plan(graph, plan)

    def _change_plan(self, graph: Graph, plan: Plan) -> None:
        """Save, end the workers, and start the workers of another plan. If they cannot start, continue under the plan before."""
        assert self._checkpoints is not None
        before, began_s, self._coming = (self._graph, self.plan), time.monotonic(), None
        try:
            self._save()
        except CheckpointError as error:
            self._say(f"{error}\nthe plan stays as it is")
            return
        self.session.close()
        self._take_plan(graph, plan, began_s)
        self.session = self._new_session(self._checkpoints.start())
        try:
            self.session.start()
        except RlgraphError as error:
            self._say(f"{str(error).splitlines()[0]}\nthese workers could not start, so the run continues under the plan before")
            self._begin_plan(*before)
            self.session = self._new_session(self._checkpoints.start())
            self._start()
        else:
            self._begin_session()
        self._change_s = time.monotonic() - began_s
        self._say(f"the run continues under {self.plan.split_text} after {self._change_s:.0f} s")

    def spans(self) -> Sequence[Span]:
        """Return the spans of each worker so far, in seconds from the first tick."""
        return self._spans.since(self._start_s)

    def trace(self) -> Trace:
        """Return the firings of the run so far, from which `costs` are fitted and which `rlgraph.planning.replay` plays again."""
        return Trace(self.plan.values, tuple(self.spans()), tuple(self._sampled), self._published_bytes, self.session.window)

    @property
    def observed_maxima(self) -> Observed:
        """The highest staleness, and the most open batches and slots in use so far. The plan's certificate bounds each."""
        return self._monitor.observed

    observed = old_attribute("observed", "observed_maxima")

    def run(self) -> Run:
        """Build the run so far as values, from which bubbles, advice and report are made; `Run.save` writes it.

        While steps are still to be yielded, it ends where the first worker's last report ends. In a run so long that its first spans are no
        longer stored, it begins with the first whole step.
        """
        spans = self.spans()
        start_s = self._launch_s - self._start_s if self._start_s else 0.0
        if self._spans.full:
            start_s = max(span.end_s for span in spans if span.step == spans[0].step)
        ends = [max((s.end_s for s in spans if s.worker == worker.name), default=0.0) for worker in self.plan.workers]
        return Run(
            plan=self.plan.values,
            steps=tuple(self._metrics),
            spans=tuple(spans),
            start_s=start_s,
            end_s=min(ends) if self.session.in_flight else max(ends),
            priced=compile_plan(self._graph, self.plan.cluster, self.costs()) if len(self._metrics) > 1 else None,
            settings=self.settings(),
            observed=self.observed_maxima,
            notices=self.notices,
            earlier=self._earlier,
        )

    def settings(self) -> Mapping[str, Mapping[str, str]]:
        """Return the settings of each model and node, as text."""
        return graph_settings(self._graph, self.plan)

    def bubbles(self) -> Bubbles:
        """Attribute every device-second since the launch: rows that add up to 100 %, as data, and as a table when printed."""
        return self.run().bubbles

    def advice(self) -> tuple[str, ...]:
        """Return sentences that advise what to change after this run, most important first."""
        return findings(self.run())

    def report(self, path: str | Path) -> None:
        """Write the report of the run so far to `path`: one HTML file that needs no server and no network."""
        self.plan.facade.report(self.run(), path)

    def costs(self) -> Costs:
        """Fit the costs of each node to this run, for `rlgraph.compile(graph, cluster, costs)` and `rlgraph.tune`.

        The fit leaves out the first step, which warms up. The lengths of the responses come from all steps.
        """
        return costs_of([self.trace()])

    def close(self) -> None:
        """Stop the workers: idle workers shut down, and workers that do not answer are killed. Nothing is left behind.

        In a fork of the program it does nothing: the job continues. Raises CheckpointError if the steps since the newest checkpoint
        could not be saved.
        """
        if self.session.is_forked:
            return
        try:
            self._save()
        finally:
            self._release()

    def _release(self) -> None:
        with hold_signals("ending the workers"):
            self.session.close()
            if self._checkpoints is not None:
                if not self.session.failed:  # workers write their shards before they end, also if the caller left the loop early
                    self._settle()
                self._checkpoints.close()
        self._signals.restore()

    def _say(self, text: str) -> None:
        self._console.print(text)
