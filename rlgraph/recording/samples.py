"""Record samples of a run: what the policy was asked, what it wrote, and how that was rewarded."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rlgraph.analysis.samples import Sample, parquet
from rlgraph.engines.hf_models.tokenizer import load_tokenizer
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph
from rlgraph.plan.plan import Plan
from rlgraph.recording.sample_files import SampleFiles
from rlgraph.recording.sample_records import TokenTexts, records
from rlgraph.runtime.driver.sample_sources import sample_sources
from rlgraph.runtime.messages import SampledRows
from rlgraph.setting_types import Range
from rlgraph.settings import Count, Fraction, Natural, check, refuse_unknown

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

WAITING = 8  # steps whose samples may wait to be decoded and written before the loop over the steps waits


@refuse_unknown
@dataclass(frozen=True)
class Samples:
    """The samples that `rg.record` writes: a `share` of each step's responses, at most `most`, drawn by `seed`.

    >>> import rlgraph as rg
    >>> rg.Samples(share=0.1, most=64)
    Samples(share=0.1, most=64, seed=0, format="jsonl", file_bytes=67108864)

    They go to files of about `file_bytes` in `samples/` of the run's folder, as JSON lines, or as parquet files (which need pyarrow:
    `pip install 'rlgraph-dataflow[data]'`). `rlgraph.analysis.samples.FIELDS` lists what a record holds. At least one response of a step
    is recorded, unless `share` is 0.

    Raises PlanError for a share outside of 0 to 1, and for parquet without pyarrow.
    """

    share: Fraction = 1.0
    most: Count | None = None
    seed: Natural = 0
    format: Literal["jsonl", "parquet"] = "jsonl"
    file_bytes: Annotated[int, Range(least=1, rule="a whole number of bytes, at least 1: 1 << 26 is usual")] = 1 << 26

    def __post_init__(self) -> None:
        check(self, PlanError)
        if self.format == "parquet":
            parquet()

    def __repr__(self) -> str:
        values = f"share={self.share:g}, most={self.most}, seed={self.seed}"
        return f'Samples({values}, format="{self.format}", file_bytes={self.file_bytes})'


class SampleRecorder:
    """Decodes and writes the samples of a job on a thread. What goes wrong there is said once, and the run goes on without samples."""

    def __init__(self, job: "Job", folder: Path, samples: Samples, heard: Callable[[int, Sequence[Sample]], None]) -> None:
        plan: Plan = job.plan
        assert isinstance(plan.source, Graph)
        self._graph, self._sources, self._heard = plan.source, sample_sources(plan.source), heard
        self._files = SampleFiles(folder, job.finished, table=samples.format == "parquet", file_bytes=samples.file_bytes)
        self._waiting: queue.Queue[tuple[int, Sequence[SampledRows]] | None] = queue.Queue(WAITING)
        self._failed, self._notice = False, job.notice
        job.recorder.request_samples(samples.share, samples.most, samples.seed)
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def take(self, step: int, rows: Sequence[SampledRows]) -> None:
        """Take the rows of a step, to be decoded and written; none where no worker has sent any."""
        self._waiting.put((step, rows))

    def flush(self) -> None:
        """Wait until the samples of all steps taken so far are in their files."""
        self._waiting.join()

    def close(self) -> None:
        """Write what is left, and end the newest file."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        decoders: dict[str, TokenTexts] | None = None
        while True:
            taken = self._waiting.get()
            try:
                if taken is None:
                    self._files.close()
                    return
                samples: Sequence[Sample] = ()
                try:
                    if taken[1] and not self._failed:
                        decoders = decoders if decoders is not None else self._decoders()
                        samples = records(*taken, self._sources, decoders)
                        self._files.write(samples)
                finally:
                    self._heard(taken[0], samples)
            except Exception as error:  # noqa: BLE001 (the outer edge of a thread: training does not end for want of samples)
                self._failed = True
                self._notice(f"no more samples are recorded: {type(error).__name__}: {error}")
            finally:
                self._waiting.task_done()

    def _decoders(self) -> dict[str, TokenTexts]:
        """Load the tokenizer of each rollout's model; a model without one has samples without texts."""
        found: dict[str, TokenTexts] = {}
        by_path: dict[str, TokenTexts] = {}
        for rollout in {source.rollout for source in self._sources}:
            node = self._graph.node(rollout)
            if node.model is None or "responses" not in node.writes:
                continue
            path = node.model.path
            if path not in by_path:
                by_path[path] = TokenTexts(load_tokenizer(path))
            found[rollout] = by_path[path]
        return found
