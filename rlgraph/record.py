"""Record a run: show its progress and write a folder of metrics, pictures and data."""

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rlgraph.analysis import words
from rlgraph.analysis.findings import findings
from rlgraph.analysis.samples import Sample
from rlgraph.analysis.words import Terminal
from rlgraph.errors import PlanError, show_value
from rlgraph.recording.samples import Profile, SampleRecorder, Samples, take_request
from rlgraph.recording.sinks import RecordedRun, Sink, SinkFeeds, new_id
from rlgraph.recording.watch import LiveFiles
from rlgraph.render import charts, plan_picture, report, timeline
from rlgraph.render.charts import REWARD
from rlgraph.render.timeline import last_steps, predicted_steps
from rlgraph.runtime.checkpoint.store import lock_file, unlock_file
from rlgraph.runtime.measure import Step
from rlgraph.settings import Fraction, Natural, check_arguments

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

DEFAULT_SAMPLES = Samples(share=0.02, most=8)
TIMELINE_STEPS = 6
BAR_S, LINE_S = 0.5, 10.0  # between two updates of the progress: in the bar, and in lines if the output is not a terminal
LOCK = "record.lock"
KEPT_BY_SINKS = ("run.html", "plan.json", "costs.yaml")
FILES = {
    "run.html": "the report; open it in a browser",
    "run.json": "the run as data",
    "metrics.jsonl": "metrics, one line per step",
    "timeline.json": "simulated and measured timelines, for ui.perfetto.dev",
    "graph.svg": "a picture of the plan",
    "reward.svg": "mean reward by step",
    "samples": "prompts and responses",
    "profiles": "torch.profiler traces and memory snapshots",
    "plan.json": "the plan as data",
    "costs.yaml": "node costs, for compile and tune",
    "trace.json": "all firings, for replay",
}


@check_arguments(PlanError)
def record(
    job: "Job",
    steps: Natural,
    out: str | Path,
    *,
    samples: Samples | Fraction = DEFAULT_SAMPLES,
    to: Sequence[Sink] = (),
    profile: Profile | None = None,
    quiet: bool = False,
) -> Iterator[Step]:
    """Run `steps` steps of a job and yield each, like `job.steps`; show a progress bar and write a folder of records.

        with plan.launch() as job:
            for step in rg.record(job, 100, "runs/grpo"):
                print(step.index, step.metrics["critic/rewards/mean"])

    As steps finish, the folder gets `metrics.jsonl` (one line per step), `plan.json` and `graph.svg`. At the end it gets `run.html` (the
    report), `run.json` (the run as data), `timeline.json` (predicted and measured, for ui.perfetto.dev), `costs.yaml`, `trace.json` and
    `reward.svg`, and picture and prediction use the measured seconds of each node if there are enough steps.

    * `job`, `steps`: the job, and the steps to run.
    * `out`: the folder. Files of an earlier run are replaced; a folder that another job records into is refused. A job that resumed from
      a checkpoint continues `metrics.jsonl`, with one line for each step, and its report draws them all.
    * `samples`: the share of each step's prompts and responses that `samples/` gets, with rewards, advantages and versions, or
      `rg.runs.Samples(…)`. The report shows them.
    * `to`: loggers that also get metrics, samples and the report during the run, e.g.
      `[rg.runs.sinks.TensorBoard(), rg.runs.sinks.WandB(project="math")]`. The failure of a logger is reported once and never stops the
      run. A resumed job continues the same run of each logger.
    * `profile`: `rg.planning.Profile(steps=(3, 5), workers="policy")` writes traces of torch.profiler and CUDA's memory snapshots to
      `profiles/`. `rlgraph run RECIPE.py --profile 3-5 --worker policy` does the same for any recipe.
    * `quiet`: prints nothing.

    >>> import tempfile, torch, rlgraph as rg
    >>> @rg.node(reads="prompt_texts", writes="rewards")
    ... def brevity(batch):
    ...     return {"rewards": torch.tensor([-float(len(text)) for text in batch["prompt_texts"]])}
    >>> plan = rg.compile(rg.Graph("lengths", brevity(rg.prompts([{"prompt": "1 + 1 ="}], count=4))), rg.Cluster(cpus=2))
    >>> with plan.launch() as job:  # doctest: +SKIP
    ...     print([step.index for step in rg.record(job, 3, tempfile.mkdtemp(), quiet=True)])
    [0, 1, 2]
    """
    from rlgraph.runtime.local import LocalJob

    if isinstance(job, LocalJob):
        raise PlanError(f"record(job={show_value(job)}): record a job of plan.launch(); other jobs have job.steps(n)")
    with prepared_folder(job, Path(out)) as folder:
        profile = take_request() or profile
        if profile is not None:
            job.recorder.request_profile(profile.request(job.plan, steps, folder))
        with record_run(job, steps, folder, samples, to, Terminal(quiet=quiet)) as keep:
            for step in job.steps(steps):
                keep(step)
                yield step


@contextmanager
def record_run(
    job: "Job", steps: int, folder: Path, samples: Samples | float, to: Sequence[Sink], console: Console
) -> Iterator[Callable[[Step], None]]:
    """Open what is written while a run goes on, and write the rest at its end; what the context gives records a step."""
    done: list[Step] = []
    live, sinks = LiveFiles(job, folder, steps), started_sinks(job, folder, to)
    ended: Literal["ended", "failed"] = "failed"
    try:
        with recorded_steps(job, folder, samples, sinks) as write, shown_progress(job, steps, console) as show:

            def keep(step: Step) -> None:
                done.append(step)
                write(step)
                live.step(step.index)
                show(step)

            yield keep
        ended = "ended"
    except GeneratorExit:  # the caller's loop was left
        ended = "ended"
        raise
    finally:
        live.say(ended, job.finished_steps)
        if done:
            _write_results(job, done, folder, console)
        sinks.close(ended, [folder / name for name in KEPT_BY_SINKS if (folder / name).exists()])


@contextmanager
def prepared_folder(job: "Job", folder: Path) -> Iterator[Path]:
    """Make the folder of a run, with what is known before its first step, and lock it while the run is recorded.

    Raises PlanError for a path that is a file, cannot be written, or is the folder of a run that is being recorded.
    """
    where = f"record(out='{folder}')"
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"{where}: it is a file; pass a folder, which is created if missing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_file(folder / LOCK)
    except BlockingIOError:
        raise PlanError(f"{where}: another job records into this folder; give each run its own folder, or wait until it ends") from None
    except OSError as error:
        raise PlanError(f"{where}: the folder cannot be written ({error}); pass a writable one") from None
    try:
        job.plan.draw(folder / "graph.svg")
        (folder / "plan.json").write_text(job.plan.to_json())
        yield folder
    finally:
        unlock_file(lock)


def started_sinks(job: "Job", folder: Path, to: Sequence[Sink]) -> SinkFeeds:
    """Start the sinks of a run, on threads of their own."""
    settings = {f"{part}/{name}": value for part, values in job.settings().items() for name, value in values.items()}
    name = folder.absolute().name
    return SinkFeeds(to, RecordedRun(name, folder, settings, new_id(), job.finished_steps), job.notice)


@contextmanager
def recorded_steps(job: "Job", folder: Path, samples: Samples | float, sinks: SinkFeeds) -> Iterator[Callable[[Step], None]]:
    """Open the files that grow with each step; what the context gives writes a step to them, and to the sinks."""
    waiting: dict[int, Mapping[str, float]] = {}  # metrics of steps whose samples are being decoded: a sink gets both together

    def write_to_sinks(step: int, found: Sequence[Sample]) -> None:
        sinks.step(step, waiting.pop(step), found)

    wanted = samples if isinstance(samples, Samples) else Samples(share=samples)
    with open_metrics(folder / "metrics.jsonl", job.finished_steps) as lines, ExitStack() as stack:
        recorder = SampleRecorder(job, folder, wanted, write_to_sinks) if wanted.share else None
        if recorder is not None:
            stack.callback(recorder.close)
            job.recorder.before_commit = recorder.flush

        def write(step: Step) -> None:
            lines.write(json.dumps({"step": step.index, "staleness": step.staleness, **step.metrics}) + "\n")
            lines.flush()
            waiting[step.index] = step.metrics
            if recorder is not None:
                recorder.take(step.index, job.recorder.sampled_rows(step.index))
            else:
                write_to_sinks(step.index, ())

        yield write


@contextmanager
def shown_progress(job: "Job", steps: int, console: Console) -> Iterator[Callable[[Step], None]]:
    """Show a bar, or lines if the output is not a terminal; what the context gives shows that a step is done."""
    fields = (TextColumn("{task.fields[last]}", markup=False), TimeElapsedColumn(), TextColumn("{task.fields[now]}", markup=False))
    progress = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), *fields, console=console, disable=not console.is_terminal)
    with progress, ExitStack() as stack:
        task = progress.add_task("steps", total=steps, completed=job.finished_steps, last="starting the first step", now="")

        def show_progress() -> None:
            now = job.under_way()
            progress.update(task, now=now)
            if now and not console.is_terminal:
                console.print(f"step {job.finished_steps + 1}/{steps}  {now}", highlight=False, markup=False, soft_wrap=True)

        postpone = stack.enter_context(call_every(BAR_S if console.is_terminal else LINE_S, show_progress))

        def show(step: Step) -> None:
            postpone()
            progress.update(task, advance=1, last=_summary(step))
            if not console.is_terminal:
                console.print(f"step {step.index + 1}/{steps}  {_summary(step)}", highlight=False)

        yield show


@contextmanager
def call_every(seconds: float, function: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call `function` on a thread every `seconds`; calling what the context gives starts the current wait again."""
    lock, ended = threading.Condition(), False
    due_s = time.monotonic() + seconds

    def postpone() -> None:
        nonlocal due_s
        with lock:
            due_s = time.monotonic() + seconds

    def run() -> None:
        while True:
            with lock:
                if lock.wait_for(lambda: ended, timeout=max(due_s - time.monotonic(), 0.01)):
                    return
                if time.monotonic() < due_s:
                    continue
            function()
            postpone()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield postpone
    finally:
        with lock:
            ended = True
            lock.notify()
        thread.join()


def open_metrics(path: Path, finished: int) -> TextIO:
    """Open the file of metrics for appending; keep the lines of the first `finished` steps and cut off the rest."""
    file = path.open("a+" if finished else "w+")
    file.seek(0)
    end = 0
    while (line := file.readline()).endswith("\n") and json.loads(line)["step"] < finished:
        end = file.tell()
    file.seek(end)
    file.truncate()
    return file


def _summary(step: Step) -> str:
    reward = f"reward {step.metrics[REWARD]:.3f}  " if REWARD in step.metrics else ""
    return f"{reward}staleness {step.staleness}  {step.seconds:.2f} s"


def _earlier_steps(first: int, path: Path) -> Iterator[Mapping[str, float]]:
    """Read the metrics of the steps before the first one of a job that resumed."""
    if first:
        with path.open() as lines:
            for line in map(json.loads, lines):
                if line["step"] < first:
                    yield {name: value for name, value in line.items() if name not in ("step", "staleness")}


def _write_results(job: "Job", done: list[Step], folder: Path, console: Console) -> None:
    """Write the files that need the whole run, and print where each one is."""
    run = job.run()  # of the present plan
    first = int(run.steps[0]["training/global_step"]) if run.steps else done[0].index
    run = replace(run, earlier=tuple(_earlier_steps(first, folder / "metrics.jsonl")))
    run.save(folder)
    report.write(folder / report.FILE, run, folder)
    last = done[-1].index
    count = min(TIMELINE_STEPS, last + 1)
    predicted = predicted_steps(run.priced or run.plan, last, count).spans
    timeline.write_two_traces(folder / "timeline.json", predicted, last_steps(run.spans, count).spans, run.plan)
    xs, rewards = zip(*((step["training/global_step"], step.get(REWARD, math.nan)) for step in run.all_steps), strict=True)
    (folder / "reward.svg").write_text(charts.svg("mean reward", xs, {"reward": rewards}, "reward"))
    seen, proof = job.observed_maxima, job.plan.certificate
    stale = f"staleness {seen.staleness} of at most {proof.staleness_bound}"
    console.print(f"the certificate held: {stale}, {seen.open_batches} of at most {proof.open_batches} batches open", highlight=False)
    job.costs().to_file(folder / "costs.yaml")
    job.trace().to_file(folder / "trace.json")
    if run.priced is not None:
        (folder / "graph.svg").write_text(plan_picture.svg(run.priced), encoding="utf-8")
        simulated = words.seconds(run.priced.prediction.step_s)
        console.print(f"median step: {words.seconds(run.step_s)}; simulated from measured node times: {simulated}", highlight=False)
    for line in findings(run):
        console.print(f"advice: {line}", highlight=False)
    for name, what in ((name, what) for name, what in FILES.items() if (folder / name).exists()):
        console.print(f"  {folder / name}: {what}", highlight=False)
