"""Sinks get each step once, also over a resume, and no failure of theirs reaches the run. What they wrote is read back."""

import importlib.util
import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import fakes, forked_workers  # noqa: F401 (a way of dispatch)
from support.sampled_runs import HOSTILE, sample

import rlgraph as rg
from rlgraph.analysis.samples import Sample
from rlgraph.errors import PlanError
from rlgraph.recording import sinks
from rlgraph.recording.sinks import Ended, RecordedRun, Sink
from rlgraph.runtime.checkpoint.store import Recovery
from rlgraph.runtime.driver.job import Job

STEPS = 12


def record(folder: Path, to: Sequence[Sink], steps: int = STEPS, fail_at: int | None = None) -> Job:
    """Record a job with a checkpoint after each four steps; or fail after one, and lose what was done since then."""
    graph = fakes.vector_loop(1)
    recovery = Recovery(folder / "checkpoints", 4, 2)
    job = Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0, recovery=recovery)
    with job:
        for step in rg.record(job, steps, folder / "run", samples=0.5, to=to, quiet=True):
            if fail_at is not None and step.index >= fail_at and step.index % 4 == 1:
                if any((folder / "checkpoints").glob("step-*")):
                    raise ZeroDivisionError
                time.sleep(1.0)  # the checkpoint is on its way to the disk
    return job


def twice(folder: Path, make: Any) -> None:
    """Record a run that fails, and goes on from its last checkpoint."""
    with pytest.raises(ZeroDivisionError):
        record(folder, [make()], fail_at=4)
    record(folder, [make()])


def loss_of(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice(tmp_path, rg.runs.sinks.TensorBoard)
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0}).Reload()
    losses = [(event.step, event.value) for event in found.Scalars("loss")]
    assert losses == [(step, pytest.approx(value, rel=1e-6)) for step, value in loss_of(tmp_path).items()]
    assert [step for step, _ in losses] == list(range(STEPS))
    assert {"rewards/max", "timing_s/step"} <= set(found.Tags()["scalars"])
    texts = found.Tensors("samples/text_summary")
    assert [event.step for event in texts] == list(range(STEPS))
    assert "item " in texts[0].tensor_proto.string_val[0].decode()


BLOCK, HEADER = 32768, 7


def wandb_messages(path: Path) -> Iterator[bytes]:
    """Read the messages of a file of wandb: after seven bytes, a log of LevelDB with blocks of 32 KiB."""
    data, place, message = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + HEADER])
        message += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield message
            message = b""


def wandb_records(folder: Path) -> tuple[set[str], list[tuple[int, dict[str, Any]]], dict[str, Any]]:
    """Read the offline files of wandb: ids of runs, (step, values) of each line of the history, and the settings."""
    from wandb.proto import wandb_internal_pb2

    ids, history, settings = set(), [], {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_messages(path):
            found = wandb_internal_pb2.Record()
            found.ParseFromString(data)
            if found.WhichOneof("record_type") == "run":
                ids.add(found.run.run_id)
                settings |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in found.run.config.update}
            elif found.WhichOneof("record_type") == "history":
                values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in found.history.item}
                history.append((found.history.step.num, values))
    return ids, history, settings


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline_goes_on_with_the_same_run_and_no_step_comes_twice(tmp_path: Path) -> None:
    twice(tmp_path, lambda: rg.runs.sinks.WandB(project="test", mode="offline"))
    ids, history, settings = wandb_records(tmp_path / "run")
    assert len(ids) == 1
    steps = [step for step, values in history if "loss" in values]
    assert steps == list(range(STEPS))
    assert {step: values["loss"] for step, values in history if "loss" in values} == pytest.approx(loss_of(tmp_path))
    assert [values["samples/_type"] for _, values in history if "samples/_type" in values] == ["table-file"] * STEPS
    files = list((tmp_path / "run" / "wandb").rglob("*.table.json"))
    assert any("item " in json.loads(file.read_text())["data"][0][2] for file in files)
    assert settings["node rollout/rows"] == "4"


@pytest.mark.filterwarnings("ignore")
def test_mlflow_goes_on_with_the_same_run_and_no_step_comes_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    twice(tmp_path, lambda: rg.runs.sinks.MLflow(experiment="test"))
    client = MlflowClient(
        (tmp_path / "mlruns").as_uri() if not importlib.util.find_spec("sqlalchemy") else f"sqlite:///{tmp_path}/mlflow.db"
    )
    experiment = client.get_experiment_by_name("test")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss")
    assert {metric.step: metric.value for metric in history} == pytest.approx(loss_of(tmp_path))
    assert len(history) == STEPS
    assert run.info.status == "FINISHED"
    assert run.data.params["node rollout/rows"] == "4"
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"samples", "run.html", "plan.json"}
    assert len(client.list_artifacts(run.info.run_id, "samples")) == STEPS


STORES = ["file", *(["sqlite"] if importlib.util.find_spec("sqlalchemy") else [])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", STORES)
def test_a_step_that_mlflow_had_in_part_when_the_run_was_killed_is_completed_and_not_repeated(store: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    uri = (tmp_path / "store").as_uri() if store == "file" else f"sqlite:///{tmp_path}/store.db"
    first = rg.runs.sinks.MLflow(uri=uri)
    known = first.start(RecordedRun("run", tmp_path, {}, "id"))
    first.scalars(0, {"loss": 0.5, "reward": 1.0})
    client = MlflowClient(uri)
    client.log_batch(known, metrics=[Metric("loss", 0.25, 1, 1)])  # killed in the middle of step 1
    again = rg.runs.sinks.MLflow(uri=uri)
    assert again.start(RecordedRun("run", tmp_path, {}, known, finished=1, resumed=True)) == known
    for step in (1, 2):
        again.scalars(step, {"loss": 0.25, "reward": float(step), "new": 3.0})
    assert {name: sorted(metric.step for metric in client.get_metric_history(known, name)) for name in ("loss", "reward", "new")} == {
        "loss": [0, 1, 2], "reward": [0, 1, 2], "new": [1, 2]
    }  # fmt: skip


def test_a_step_counts_as_logged_once_its_samples_are(tmp_path: Path) -> None:
    seen: list[int] = []

    class Asking(Sink):
        def scalars(self, step: int, values: Any) -> None:
            seen.append(self.logged())

        def samples(self, step: int, rows: Any) -> None:
            seen.append(self.logged())

        def logged(self) -> int:
            return int(json.loads((tmp_path / sinks.FILE).read_text())["Asking 0"]["next"])

    feeds = sinks.SinkFeeds([Asking()], RecordedRun("run", tmp_path, {}, "id"), lambda text: None)
    for step in range(2):
        feeds.step(step, {}, [{"step": step}])
    feeds.close("ended", [])
    assert seen == [0, 0, 1, 1]
    assert json.loads((tmp_path / sinks.FILE).read_text())["Asking 0"]["next"] == 2


def test_names_that_mlflow_refuses_are_mapped_and_numbers_that_are_none_left_out(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    sink = rg.runs.sinks.MLflow(uri=(tmp_path / "store").as_uri())
    id = sink.start(RecordedRun("run", tmp_path, {"a@b": "x" * 1000}, "0"))
    sink.scalars(0, {"val/acc/mean@8": 0.5, "what?": 1.0, "what!": 2.0, "loss": float("nan")})
    data = MlflowClient((tmp_path / "store").as_uri()).get_run(id).data
    assert data.metrics == {"val/acc/mean_at_8": 0.5, "what_": 1.0, "what__2": 2.0}
    assert data.params == {"a_at_b": "x" * 500}


def test_a_metric_whose_name_is_a_folder_of_another_is_kept_in_a_store_of_files(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    sink = rg.runs.sinks.MLflow(uri=str(tmp_path / "store"))
    id = sink.start(RecordedRun("run", tmp_path, {}, "0"))
    for step in range(2):
        sink.scalars(step, {"turns": 3.0, "turns/p90": 5.0, "loss/mean": 0.5, "loss": 0.25})
    assert MlflowClient((tmp_path / "store").as_uri()).get_run(id).data.metrics == {
        "turns": 3.0, "turns.p90": 5.0, "loss/mean": 0.5, "loss_2": 0.25
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_tensorboard_had_in_part_when_the_run_was_killed_is_there_once_and_has_no_other_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = {step: {"loss": float(step)} for step in range(3)}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "staleness": 1, **values}) + "\n" for step, values in losses.items())
    )
    for finished, steps in ((0, (0, 1)), (2, (2,))):
        feeds = sinks.SinkFeeds([rg.runs.sinks.TensorBoard()], RecordedRun("run", tmp_path, {}, "id", finished=finished), print)
        for step in steps:
            feeds.step(step, losses[step])
        feeds.close("ended", [])
        state = json.loads((tmp_path / sinks.FILE).read_text())
        state["TensorBoard 0"]["next"] = 1  # killed before it was noted that step 1 is there
        (tmp_path / sinks.FILE).write_text(json.dumps(state))
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(step, float(step)) for step in range(3)]
    assert found.Tags()["scalars"] == ["loss"]


def test_texts_of_samples_stay_in_their_cell_of_a_table_of_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = rg.runs.sinks.TensorBoard(folder=tmp_path)
    sink.start(RecordedRun("run", tmp_path, {}, "0"))
    sink.samples(0, [sample(0, 0, response=f"a | b\n{HOSTILE}")])
    sink.close("ended")
    found = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    lines = found.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode().split("\n")
    assert len(lines) == 3
    assert "a \\| b<br>&lt;/script&gt;" in lines[2]


@dataclass
class Mine(Sink):
    """A sink of a user's own that raises, hangs or keeps what it is given."""

    what: str = "keep"
    steps: list[int] = field(default_factory=list)
    samples_of: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def start(self, run: RecordedRun) -> None:
        if self.what == "start":
            raise SystemExit("no network")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self.what == "raise":
            raise OSError(28, "No space left on device")
        while self.what == "hang":
            time.sleep(0.05)
        self.steps.append(step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        self.samples_of.append(step)

    def artifact(self, path: Path) -> None:
        self.files.append(path.name)

    def close(self, ended: Ended) -> None:
        self.ended.append(ended)


def test_a_sink_that_raises_or_hangs_never_stops_the_run_and_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "WAITING", 3)
    monkeypatch.setattr(sinks, "CLOSE_S", 1.0)
    kept, raising, hanging, dead = Mine(), Mine("raise"), Mine("hang"), Mine("start")
    monkeypatch.setattr(sinks.SinkFeed, "put", patient_for(kept, sinks.SinkFeed.put))
    job = record(tmp_path, [kept, raising, hanging, dead])
    hanging.what = "keep"
    assert job.finished_steps == STEPS
    assert kept.steps == kept.samples_of == list(range(STEPS))
    assert kept.files == ["run.html", "plan.json", "costs.yaml"]
    assert kept.ended == ["ended"]
    said = "\n".join(job.notices)
    assert said.count("OSError: [Errno 28] No space left on device; the run continues") == 1
    assert said.count("it is too slow: 3 steps wait for it") == 1
    assert said.count("it cannot start: SystemExit: no network") == 1
    assert len(re.findall(r"\d+ calls failed or were dropped", said)) >= 2  # that of two sinks may be one text


def patient_for(sink: Sink, put: Any) -> Any:
    """Let one sink have room for all, whatever the machine does."""

    def patient(feed: sinks.SinkFeed, work: Any) -> None:
        if feed.sink is sink:
            feed._work.put(work, timeout=30)
        else:
            put(feed, work)

    return patient


def test_a_run_that_fails_tells_its_sinks(tmp_path: Path) -> None:
    mine = Mine()
    graph = fakes.vector_loop(1)
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0) as job:
        steps = rg.record(job, 3, tmp_path, to=[mine], quiet=True)
        next(steps)
        with pytest.raises(ZeroDivisionError):
            steps.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    assert mine.ended == ["failed"]


def test_steps_that_a_killed_run_had_queued_come_from_its_files(tmp_path: Path) -> None:
    """The first part of the run logs nothing, as if it had been killed with all steps in the queue."""
    with pytest.raises(ZeroDivisionError):
        record(tmp_path, [Mine("raise")], fail_at=4)
    mine = Mine()
    record(tmp_path, [mine])
    assert mine.steps == mine.samples_of == list(range(STEPS))


@pytest.mark.parametrize(("sink", "extra"), [("TensorBoard", "tensorboard"), ("WandB", "wandb"), ("MLflow", "mlflow")])
def test_a_missing_package_is_an_error_with_the_command(sink: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlgraph.recording.sinks.find_spec", lambda name: None)
    with pytest.raises(PlanError, match=rf"pip install 'rlgraph-dataflow\[{extra}\]'"):
        getattr(rg.runs.sinks, sink)()


def test_importing_and_declaring_sinks_imports_no_logger() -> None:
    code = (
        "import sys, rlgraph as rg; rg.runs.sinks.TensorBoard(), rg.runs.sinks.WandB(), rg.runs.sinks.MLflow();"
        "print([m for m in ('wandb', 'mlflow', 'tensorboardX', 'pyarrow') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True)
    assert found.stdout.strip() == "[]"


def test_what_is_no_sink_is_refused_where_the_run_is_declared(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="to"):
        rg.record(None, 3, tmp_path, to=["tensorboard"])  # type: ignore[arg-type, list-item]
