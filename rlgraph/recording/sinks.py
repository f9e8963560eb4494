"""Where a run's numbers, samples and files go while it is recorded: TensorBoard, Weights & Biases, MLflow, or a sink of your own."""

import json
import math
import queue
import re
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from rlgraph.analysis.samples import Sample, read_samples
from rlgraph.errors import PlanError
from rlgraph.settings import Name, check, refuse_unknown

Ended = Literal["ended", "failed"]
COLUMNS = ("step", "row", "prompt", "response", "reward", "advantage", "finish", "response_tokens", "version_min", "version_max", "kind")


@dataclass(frozen=True)
class RecordedRun:
    """The facts that a sink gets at the start: the run's `name` and `folder`, its settings as text, and how far it was if it resumed.

    `finished` steps are in the checkpoint from which the run goes on; 0 for a new run. `first` is the first step that the sink is given:
    an earlier one, if some of these steps had not come to it. `id` is the same for all parts of one run, and `resumed` says whether the
    sink has begun it before.

    >>> RecordedRun("math", Path("runs/math"), {"rollout.group_size": "8"}, "1f3870be", finished=20, resumed=True).id
    '1f3870be'

    * `settings`: the run's settings as text, by their dotted names.
    """

    name: str
    folder: Path
    settings: Mapping[str, str]
    id: str
    finished: int = 0
    resumed: bool = False
    first: int = 0


class Sink(ABC):
    """A logger for `rg.record(…, to=[…])`. Derive from it for one of your own.

    >>> class Printed(Sink):
    ...     def scalars(self, step, values):
    ...         print(step, values)
    >>> Printed().scalars(3, {"loss": 0.5})
    3 {'loss': 0.5}

    All methods of a sink are called on one thread of its own, so a slow or broken one never delays a step: what it raises is said once
    and counted, and what does not fit into its queue is dropped and counted. Each step comes once, in order. A sink that
    can drop what it has of later steps sets `rewinds`: after a resume it gets all steps since the checkpoint again. A run that was
    killed within `scalars` or `samples` gives that step again after the resume, since nobody knows how far it came.
    """

    rewinds: ClassVar[bool] = False

    def start(self, run: RecordedRun) -> str | None:  # noqa: B027 (a sink that needs no start has none)
        """Begin, or go on with the run; may give the id under which the sink knows the run, which replaces `run.id` from then on."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    def samples(self, step: int, rows: Sequence[Sample]) -> None:  # noqa: B027
        """Log the recorded samples of a step, as `rlgraph.analysis.samples.FIELDS` names their values."""

    def artifact(self, path: Path) -> None:  # noqa: B027
        """Keep a file of the run, such as its report, once the run has ended."""

    def close(self, ended: Ended) -> None:  # noqa: B027
        """End, after everything else; `ended` says whether the loop over the steps ended or raised."""


def needs(sink: Sink, package: str, extra: str) -> None:
    """Raise PlanError with the command that installs a sink's package, if it is missing. Imports nothing."""
    if find_spec(package) is None:
        raise PlanError(f"sinks.{type(sink).__name__}: the package {package} is not installed: pip install 'rlgraph-dataflow[{extra}]'")


class Names:
    """Metric names as a sink takes them: `@` becomes `_at_`, other characters that it refuses `_`; no two names become one.

    With `files` each name is a path of a file, so none is the folder of another.

    >>> names = Names(r"[^\\w./-]")
    >>> names["val/acc/mean@8"], names["a b"], names["a_b"], names["a b"]
    ('val/acc/mean_at_8', 'a_b', 'a_b_2', 'a_b')
    >>> files = Names(r"[^\\w./-]", files=True)
    >>> files["turns"], files["turns/p90"], files["loss/mean"], files["loss"]
    ('turns', 'turns.p90', 'loss/mean', 'loss_2')
    """

    def __init__(self, refused: str, files: bool = False) -> None:
        self._refused, self._files = re.compile(refused), files
        self._given: dict[str, str] = {}

    def __getitem__(self, name: str) -> str:
        if name not in self._given:
            plain = self._refused.sub("_", self._refused.sub(lambda found: "_at_" if found[0] == "@" else found[0], name))
            if self._files and any(plain.startswith(f"{other}/") for other in self._given.values()):
                plain = plain.replace("/", ".")
            number, given = 1, plain
            while self._is_taken(given):
                number += 1
                given = f"{plain}_{number}"
            self._given[name] = given
        return self._given[name]

    def _is_taken(self, name: str) -> bool:
        return any(name == other or (self._files and other.startswith(f"{name}/")) for other in self._given.values())


def table(rows: Sequence[Sample]) -> list[list[object]]:
    """List the values of `COLUMNS` of each sample."""
    return [[row[name] for name in COLUMNS] for row in rows]


# Feed sinks on threads of their own, from queues with a bound, so that no sink can delay or end a run.

FILE = "sinks.json"
WAITING = 256  # steps in the queue of a sink; what comes when it is full is dropped
CLOSE_S = 60.0  # for a sink to log what is left and end

Work = Callable[[], None]
Notice = Callable[[str], None]


class SinkFeed:
    """One sink with its thread. What it raises, and what it has no room for, is said once and counted in `lost`."""

    def __init__(self, sink: Sink, run: RecordedRun, logged: int, save: Callable[[str, int], None], notice: Notice) -> None:
        """Start the sink; in an earlier part of the run it logged the first `logged` steps."""
        self.sink, self.lost = sink, 0
        self.first = min(logged, run.finished) if sink.rewinds else logged  # the first step that it is given
        self._logged = logged
        self.name = type(sink).__name__
        self._run, self._save, self._notice = replace(run, first=self.first), save, notice
        self._work: queue.Queue[Work | None] = queue.Queue(WAITING)
        self._started = False
        self._thread = threading.Thread(target=self._serve, name=f"sink {self.name}", daemon=True)
        self._thread.start()

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Queue the metrics and samples of a step, unless the sink has it already."""
        if step >= self.first:
            self.put(lambda: self._log(step, values, samples))

    def put(self, work: Work) -> None:
        """Queue a call; drop it if the queue is full."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self._lose(f"it is too slow: {WAITING} steps wait for it")

    def close(self, end_s: float) -> None:
        """Wait until all is logged and the sink has ended, at most until `end_s`; then say what was lost."""
        try:
            self._work.put(None, timeout=max(end_s - time.monotonic(), 0.0))
            self._thread.join(max(end_s - time.monotonic(), 0.0))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._lose(f"it has not ended within {CLOSE_S:g} s; {self._work.qsize()} steps were left")
        if self.lost:
            self._notice(f"sink {self.name}: {self.lost} calls failed or were dropped")

    def _log(self, step: int, values: Mapping[str, float], samples: Sequence[Sample]) -> None:
        self.sink.scalars(step, values)
        if samples and step >= self._logged:  # TensorBoard drops numbers of later steps after a resume, and no texts
            self.sink.samples(step, samples)
        self._save(self._run.id, step + 1)  # after both: a run that is killed before this gives the step again

    def _serve(self) -> None:
        try:
            known = self.sink.start(self._run)
            self._run = replace(self._run, id=known or self._run.id)
            self._save(self._run.id, self._logged)
            self._started = True
        except BaseException as error:  # noqa: BLE001 (the outer edge of a thread, into which a library may even raise SystemExit)
            self._lose(f"it cannot start: {type(error).__name__}: {error}")
        while (work := self._work.get()) is not None:
            if not self._started:
                self.lost += 1
                continue
            try:
                work()
            except BaseException as error:  # noqa: BLE001
                self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self.lost == 1:
            self._notice(f"sink {self.name}: {reason}; the run continues, and further failures are counted")


class SinkFeeds:
    """The sinks of a recorded run. `sinks.json` in its folder says under which id each knows the run, and which step comes next."""

    def __init__(self, sinks: Sequence[Sink], run: RecordedRun, notice: Notice) -> None:
        self._path, self._lock = run.folder / FILE, threading.Lock()
        self._state: dict[str, dict[str, str | int]] = _read(self._path) if run.finished else {}
        keys = [f"{type(sink).__name__} {number}" for number, sink in enumerate(sinks)]
        self._feeds = [self._feed(sink, key, run, notice) for sink, key in zip(sinks, keys, strict=True)]
        if any(feed.first < run.finished for feed in self._feeds):
            self._catch_up(run.folder, run.finished)

    def _feed(self, sink: Sink, key: str, run: RecordedRun, notice: Notice) -> SinkFeed:
        known = self._state.get(key)
        mine = replace(run, id=str(known["id"]) if known is not None else run.id, resumed=known is not None)
        logged = int(known["next"]) if known is not None else 0
        return SinkFeed(sink, mine, logged, lambda id, step: self._save(key, id, step), notice)

    def _save(self, key: str, id: str, step: int) -> None:
        with self._lock:
            self._state[key] = {"id": id, "next": step}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._state))
            part.replace(self._path)

    def _catch_up(self, folder: Path, finished: int) -> None:
        """Give the sinks the steps that the run's files have and they do not: those that were queued when it was killed."""
        least = min(feed.first for feed in self._feeds)
        steps = ((sample["step"], sample) for sample in read_samples(folder) if least <= sample["step"] < finished)
        samples = {step: [sample for _, sample in found] for step, found in groupby(steps, key=lambda pair: pair[0])}
        with (folder / "metrics.jsonl").open() as lines:
            for values in map(json.loads, lines):
                step, _ = values.pop("step"), values.pop("staleness", None)  # which is not a metric of the step
                if least <= step < finished:
                    self.step(step, values, samples.get(step, ()))

    def step(self, step: int, values: Mapping[str, float], samples: Sequence[Sample] = ()) -> None:
        """Queue the metrics and samples of a step for every sink."""
        for feed in self._feeds:
            feed.step(step, values, samples)

    def close(self, ended: Ended, files: Sequence[Path]) -> None:
        """Give the sinks the files of the run, and end them."""
        end_s = time.monotonic() + CLOSE_S
        for feed in self._feeds:
            for path in files:
                feed.put(partial(feed.sink.artifact, path))
            feed.put(partial(feed.sink.close, ended))
        for feed in self._feeds:
            feed.close(end_s)


def new_id() -> str:
    """Make an id for a run, as loggers that leave it to us take it."""
    return uuid.uuid4().hex[:8]


def _read(path: Path) -> dict[str, dict[str, str | int]]:
    try:
        found: dict[str, dict[str, str | int]] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


# The sink MLflow.

REFUSED = r"[^\w\-. :/]"
VALUE = 500  # characters of a parameter
BATCH = 100  # parameters of one call; it takes 1,000 metrics


@refuse_unknown
@dataclass
class MLflow(Sink):
    """Log a run to MLflow: scalars, settings as parameters, the samples of each step as a table in JSON, and the report as an artifact.

    >>> import rlgraph as rg
    >>> rg.runs.sinks.MLflow(uri="http://127.0.0.1:5000", experiment="math").experiment
    'math'

    `uri` is the server's address or a local store; without it `MLFLOW_TRACKING_URI`, else a store beside the run's folder: `mlflow.db`
    (SQLite) with the extra's sqlalchemy, and else the folder `mlruns`. A run that was killed while it sent a step leaves no value twice.
    MLflow refuses `@` in names of metrics: `val/acc/mean@8` is `val/acc/mean_at_8` there. A run that resumed goes on in the same run.
    Needs the extra `mlflow`.

    * `name`: the run's name; None: that of its folder.
    """

    uri: Name | None = None
    experiment: Name = "rlgraph"
    name: Name | None = None
    _client: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, PlanError)
        needs(self, "mlflow", "mlflow")

    def start(self, run: RecordedRun) -> str:
        import os

        from mlflow import MlflowClient

        uri = self.uri or os.environ.get("MLFLOW_TRACKING_URI") or local_store(run.folder)
        in_files = urlsplit(uri).scheme in ("", "file") and not uri.startswith("databricks")  # a metric is one, in folders of its name
        self._names = Names(REFUSED, files=in_files)
        if in_files:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # asked for by choosing it; mlflow would refuse it else
        self._client = MlflowClient(uri)
        self._resumed = run.resumed
        if run.resumed:
            self._run = run.id
            self._client.update_run(self._run, status="RUNNING")
            return self._run
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self.experiment, self._artifacts(uri, run.folder))
        self._run = self._client.create_run(experiment, run_name=self.name or run.name).info.run_id
        self._parameters(run.settings)
        return str(self._run)

    def _artifacts(self, uri: str, folder: Path) -> str | None:
        """Say where the files of a new experiment lie: beside our own database. MLflow's default is below the current folder."""
        return (folder.absolute().parent / "mlartifacts").as_uri() if uri == local_store(folder) and uri.startswith("sqlite:") else None

    def _parameters(self, settings: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        names = Names(REFUSED)
        found = [Param(names[name], value[:VALUE]) for name, value in settings.items()]
        for first in range(0, len(found), BATCH):
            self._client.log_batch(self._run, params=found[first : first + BATCH])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        found = [Metric(self._names[name], value, now_ms, step) for name, value in values.items() if math.isfinite(value)]
        if self._resumed:  # the run may have been killed while it sent this step: the server has all of it, a part, or nothing
            found = [metric for metric in found if not self._has(metric.key, step)]
            self._resumed = False
        if found:
            self._client.log_batch(self._run, metrics=found)

    def _has(self, name: str, step: int) -> bool:
        """Whether the run has a value of a metric at a step."""
        from mlflow.exceptions import MlflowException

        try:
            return any(metric.step == step for metric in self._client.get_metric_history(self._run, name))
        except MlflowException:  # a store of files has no such metric
            return False

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        # MLflow's log_table reads and writes all rows so far at each call; a file for each step does not.
        self._client.log_dict(self._run, {"columns": list(COLUMNS), "data": table(rows)}, f"samples/step-{step:08d}.json")

    def artifact(self, path: Path) -> None:
        self._client.log_artifact(self._run, str(path))

    def close(self, ended: Ended) -> None:
        self._client.set_terminated(self._run, "FINISHED" if ended == "ended" else "FAILED")


def local_store(folder: Path) -> str:
    """Name the store beside a run's folder, which its neighbours share: SQLite where its library is, else files."""
    from importlib.util import find_spec

    beside = folder.absolute().parent
    return f"sqlite:///{beside / 'mlflow.db'}" if find_spec("sqlalchemy") else (beside / "mlruns").as_uri()


# The sink TensorBoard, by tensorboardX, which needs no TensorFlow.

FLUSH_S = 10
CHARACTERS = 4000  # of a text in a table


@dataclass
class TensorBoard(Sink):
    """Write event files for TensorBoard: scalars, and the samples of a step as a text table.

    >>> import rlgraph as rg
    >>> rg.runs.sinks.TensorBoard()  # for rg.record(job, 100, "runs/math", to=[…]); look with: tensorboard --logdir runs/math
    TensorBoard(folder=None)

    `folder` is `tensorboard/` in the run's folder if it is not given. After a resume, TensorBoard drops what an earlier part of the run
    had written of later steps. Needs the extra `tensorboard`.
    """

    rewinds: ClassVar[bool] = True
    folder: str | Path | None = None
    _writer: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, PlanError)
        needs(self, "tensorboardX", "tensorboard")

    def start(self, run: RecordedRun) -> None:
        from tensorboardX import SummaryWriter

        self._names = Names(r"[^\w./-]")
        folder = Path(self.folder) if self.folder is not None else run.folder / "tensorboard"
        # Files are named by the second, and read in the order of their names.
        options = {"purge_step": run.first, "filename_suffix": f".{run.first:08d}"}
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH_S, **options)
        rows = "\n".join(f"| {_cell(name)} | {_cell(value)} |" for name, value in run.settings.items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", run.finished)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(self._names[name], value, step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        lines = [" | ".join(map(_cell, row)) for row in (COLUMNS, ["---"] * len(COLUMNS), *table(rows))]
        self._writer.add_text("samples", "\n".join(f"| {line} |" for line in lines), step)

    def close(self, ended: Ended) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """Write a value into a cell of a Markdown table, where a bar or the end of a line would end it."""
    return escape(str(value))[:CHARACTERS].replace("|", "\\|").replace("\n", "<br>")


# The sink Weights & Biases.


@refuse_unknown
@dataclass
class WandB(Sink):
    """Log a run to Weights & Biases: scalars, settings, the samples of each step as a table, and the report as an artifact.

    >>> import rlgraph as rg
    >>> rg.runs.sinks.WandB(project="math", mode="offline").mode  # upload later by `wandb sync`
    'offline'

    `name` is the name of the run's folder if it is not given. `mode` None is as the environment says (`WANDB_MODE`). A run that resumed
    goes on under the same id. Needs the extra `wandb`.

    * `entity`: the user or team that owns the project.
    * `group`: the group of the run, for runs that belong together.
    * `tags`: its tags.
    * `folder`: where wandb writes its own files; None: into the run's folder.
    """

    project: Name = "rlgraph"
    name: Name | None = None
    entity: Name | None = None
    group: Name | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    folder: str | Path | None = None
    _run: Any = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self, PlanError)
        needs(self, "wandb", "wandb")

    def start(self, run: RecordedRun) -> None:
        import wandb

        folder = Path(self.folder) if self.folder is not None else run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            group=self.group,
            tags=self.tags,
            dir=folder,
            mode=self.mode,
            id=run.id,
            resume="allow",
            config=dict(run.settings),
            reinit="create_new",  # another run of this process goes on undisturbed
            settings=wandb.Settings(console="off", silent=True),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(columns=list(COLUMNS), data=table(rows))}, step=step)  # a table of its own for each step

    def artifact(self, path: Path) -> None:
        import wandb

        kept = wandb.Artifact(f"{self._run.id}-{path.stem}", type="record")
        kept.add_file(str(path))
        self._run.log_artifact(kept)

    def close(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "ended" else 1)
