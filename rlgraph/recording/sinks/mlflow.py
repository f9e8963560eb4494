"""The sink MLflow."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlgraph.analysis.samples import Sample
from rlgraph.errors import PlanError
from rlgraph.recording.sinks.base import COLUMNS, Ended, Names, RecordedRun, Sink, needs, table
from rlgraph.settings import Name, check

REFUSED = r"[^\w\-. :/]"
VALUE = 500  # characters of a parameter
BATCH = 100  # parameters of one call; it takes 1,000 metrics


@dataclass
class MLflow(Sink):
    """Log a run to MLflow: scalars, settings as parameters, the samples of each step as a table in JSON, and the report as an artifact.

    >>> import rlgraph as rg
    >>> rg.sinks.MLflow(uri="http://127.0.0.1:5000", experiment="math").experiment
    'math'

    `uri` is the server's address or a local store; without it `MLFLOW_TRACKING_URI`, else a store beside the run's folder: `mlflow.db`
    (SQLite) with the extra's sqlalchemy, and else the folder `mlruns`. A run that was killed while it sent a step leaves no value twice.
    MLflow refuses `@` in names of metrics: `val/acc/mean@8` is `val/acc/mean_at_8` there. A run that resumed goes on in the same run.
    Needs the extra `mlflow`.
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
