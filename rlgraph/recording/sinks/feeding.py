"""Feed sinks on threads of their own, from queues with a bound, so that no sink can delay or end a run."""

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from rlgraph.analysis.samples import Sample, read_samples
from rlgraph.recording.sinks.base import Ended, RecordedRun, Sink

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
            self._notice(f"sink {self.name}: {reason}; the run goes on, and further failures are counted")


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
                step, _ = values.pop("step"), values.pop("staleness", None)  # which is no metric of a step's own
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
                feed.put(lambda path=path, sink=feed.sink: sink.artifact(path))  # type: ignore[misc]
            feed.put(lambda sink=feed.sink: sink.close(ended))  # type: ignore[misc]
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
