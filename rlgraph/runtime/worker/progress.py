"""Track how far a worker has fired, and profile some of its steps."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlgraph import notices
from rlgraph.analysis.samples import MEMORY, OPERATORS, TRACE
from rlgraph.plan.schedule import Span
from rlgraph.runtime.checkpoint.gathering import make_sender
from rlgraph.runtime.checkpoint.worker_snapshot import Fired, OnSaved, WorkerSnapshots, restore
from rlgraph.runtime.messages import ProfileRequest, SampledRows
from rlgraph.runtime.worker.executor import Worker
from rlgraph.runtime.worker.spec import file_name

# Profile some steps of a worker: torch's profiler, and the history of CUDA's memory.

ENTRIES = 100_000  # newest entries of the memory history
ROWS = 60  # of the table of operators


class StepProfiler:
    """Starts before the first requested step and writes its files after the last. A failure is reported, and the run continues."""

    def __init__(self, worker: str, gpus: bool) -> None:
        self.worker, self.gpus = worker, gpus
        self.request: ProfileRequest | None = None
        self._began: int | None = None
        self._profiler: Any = None

    def begin_step(self, step: int) -> None:
        """Begin, if the step was requested and profiling has not begun."""
        wanted = self.request
        if wanted is None or self._began is not None or not wanted.first <= step <= wanted.last or self.worker not in wanted.workers:
            return
        self._began = step
        try:
            self._begin(wanted)
        except Exception as error:  # noqa: BLE001 (a failed profile must not end the run)
            self._give_up(error)

    def after(self, step: int) -> None:
        """Write the files, if this was the last requested step."""
        wanted = self.request
        if wanted is None or self._began is None or step < wanted.last:
            return
        try:
            self._write(wanted, Path(wanted.folder), f"{file_name(self.worker)}-steps-{self._began}-{step}")
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
        self.request = self._profiler = self._began = None

    def _begin(self, wanted: ProfileRequest) -> None:
        from torch import cuda
        from torch.profiler import ProfilerActivity, profile

        if self._snapshot(wanted):
            cuda.memory._record_memory_history(max_entries=ENTRIES)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.gpus else [])]
        self._profiler = profile(activities=activities, record_shapes=wanted.shapes, with_stack=wanted.stacks)
        self._profiler.start()

    def _write(self, wanted: ProfileRequest, folder: Path, name: str) -> None:
        from torch import cuda

        self._profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(folder / f"{name}{TRACE}"))
        by = "self_cuda_time_total" if self.gpus else "self_cpu_time_total"
        (folder / f"{name}{OPERATORS}").write_text(self._profiler.key_averages().table(sort_by=by, row_limit=ROWS))
        if self._snapshot(wanted):
            cuda.memory._dump_snapshot(str(folder / f"{name}{MEMORY}"))
            cuda.memory._record_memory_history(enabled=None)

    def _snapshot(self, wanted: ProfileRequest) -> bool:
        return wanted.memory and self.gpus

    def _give_up(self, error: Exception) -> None:
        self.request = None
        notices.here.say(f"worker '{self.worker}' could not be profiled: {type(error).__name__}: {error}")


# Track how far a worker has fired: ahead of the ticks if a checkpoint needs it, and from the checkpoint's cut after a resume.

Reported = tuple[Mapping[str, float], list[Span]]


class Progress:
    """A worker and the steps that it has fired. It calls `told` for each checkpoint that it has written."""

    def __init__(self, worker: Worker, told: OnSaved) -> None:
        self.worker = worker
        self.recent: dict[int, Fired] = {}  # the last steps, `lookahead` many
        self.reports: dict[int, Reported] = {}  # of steps that the driver has not ticked yet
        self.profiler = StepProfiler(worker.spec.worker.name, gpus=bool(worker.spec.worker.gpus))
        self.samples: list[SampledRows] = []  # not sent yet
        self.fired = worker.spec.first
        self.saving = worker.spec.saving
        self.saved = 0
        self._snapshots = WorkerSnapshots(worker, self.saving, told, make_sender(worker.spec)) if self.saving else None

    @property
    def lookahead(self) -> int:
        """The number of firings by which this worker is ahead of the trained weights at a checkpoint."""
        return self.saving.lookahead if self.saving else 0

    def load(self) -> None:
        """Load the worker, and restore its state if it resumes from a checkpoint."""
        self.worker.load()
        resume = self.worker.spec.resume
        if resume is not None:
            self.recent = restore(self.worker, resume)
            self.saved = resume.step
            since = {step: fired for step, fired in self.recent.items() if step >= resume.step}
            self.reports = {step: (fired.metrics, []) for step, fired in since.items()}
            self.samples = [rows for fired in since.values() for rows in fired.samples]
            self.worker.reopen(resume.step, {step: fired.columns for step, fired in self.recent.items()})

    def step(self, step: int) -> Reported:
        """Fire the nodes for `step` unless they have fired, and later steps for which others wait; make the report of the step."""
        self._fire_until(step + 1 + self.worker.spec.ahead)
        return self.reports.pop(step)

    def taken_samples(self) -> list[SampledRows]:
        """Return the recorder's rows that have not been sent, including rows of steps fired ahead."""
        found, self.samples = self.samples, []
        return found

    def save(self, step: int) -> None:
        """Complete the checkpoint after `step` steps: fire ahead the steps that it needs, and write it unless it is written."""
        self._fire_until(step + self.lookahead)
        if step > self.saved:
            self._take(step)

    def _fire_until(self, fired: int) -> None:
        while self.fired < fired:
            self.profiler.begin_step(self.fired)
            self.worker.step(self.fired)
            self.profiler.after(self.fired)
            self.finish(self.fired)

    def finish(self, step: int) -> None:
        """Record that all nodes have fired for `step`, and take the snapshot if one is due."""
        self.fired = step + 1
        metrics, spans = self.worker.report()
        samples = self.worker.tap.take()
        self.samples += samples
        if self.saving is not None:
            self.recent[step] = Fired(metrics, self.worker.kept, samples)
            self.worker.kept = {}
            due = self.fired - self.lookahead
            self.recent = {at: fired for at, fired in self.recent.items() if at >= due - self.saving.back}
            if due > self.saved and due % self.saving.every == 0:
                metrics = {**metrics, "timing_s/save_checkpoint": self._take(due)}
        self.reports[step] = (metrics, spans)

    def _take(self, step: int) -> float:
        assert self._snapshots is not None
        self.saved = step
        return self._snapshots.take(step, self.recent)

    def wait(self) -> None:
        """Wait until the current write is on disk."""
        if self._snapshots is not None:
            self._snapshots.wait()

    def close(self, *, keep: bool = False) -> None:
        """End the worker, once its current write is on disk; with `keep` its engine may be held for another job."""
        self.wait()
        self.worker.close(keep=keep)
