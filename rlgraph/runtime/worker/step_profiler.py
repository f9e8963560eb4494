"""Profile some steps of a worker: torch's profiler, and the history of CUDA's memory."""

from pathlib import Path
from typing import Any

from rlgraph import notices
from rlgraph.analysis.samples import MEMORY, OPERATORS, TRACE
from rlgraph.runtime.messages import ProfileRequest

ENTRIES = 100_000  # of the history of the memory, the newest
ROWS = 60  # of the table of operators


class StepProfiler:
    """Starts before the first step that was asked for and writes its files after the last. What fails is said, and the run goes on."""

    def __init__(self, worker: str, gpus: bool) -> None:
        self.worker, self.gpus = worker, gpus
        self.request: ProfileRequest | None = None
        self._began: int | None = None
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Begin, if the step is among those asked for and nothing has begun."""
        wanted = self.request
        if wanted is None or self._began is not None or not wanted.first <= step <= wanted.last or self.worker not in wanted.workers:
            return
        self._began = step
        try:
            self._begin(wanted)
        except Exception as error:  # noqa: BLE001 (a run does not end for want of a profile)
            self._give_up(error)

    def after(self, step: int) -> None:
        """Write the files, if this was the last step asked for."""
        wanted = self.request
        if wanted is None or self._began is None or step < wanted.last:
            return
        try:
            self._write(wanted, Path(wanted.folder), f"{self.worker}-steps-{self._began}-{step}")
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
