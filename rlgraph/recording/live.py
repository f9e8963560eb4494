"""Keep the folder of a run readable while it goes on: `run.json` every few seconds, and `state.json` with each step."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

FILE = "state.json"
LEAST_S = 5.0  # between two writes of run.json
PART = 0.02  # of a run's time that writing it may take


@dataclass(frozen=True)
class RunState:
    """How far a recorded run is: `step` of `steps` are done, and the process `pid` on `host` is at it, or it was until `time_s`."""

    state: Literal["running", "ended", "failed"]
    step: int
    steps: int
    pid: int
    host: str
    time_s: float

    def said(self) -> str:
        """Say it in words, for the head of a page."""
        words = {"running": "running", "ended": "ended", "failed": "ended by an error"}
        stopped = self.state == "running" and self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()
        return f"{'killed' if stopped else words[self.state]} after {self.step} of {self.steps} steps"

    @property
    def goes_on(self) -> bool:
        """Whether the run is still at work, as far as can be seen from here."""
        return self.said().startswith("running")


def read_state(folder: Path) -> RunState | None:
    """Read how far the run of a folder is; None where that is not known."""
    try:
        return RunState(**json.loads((folder / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


class LiveFiles:
    """Writes what a run's folder says of the run so far."""

    def __init__(self, job: "Job", folder: Path, steps: int) -> None:
        self.job, self.folder, self.steps = job, folder, steps
        self._due_s = 0.0
        self.say("running", job.finished)

    def say(self, state: Literal["running", "ended", "failed"], step: int) -> None:
        """Write `state.json`."""
        _write(self.folder / FILE, json.dumps(asdict(RunState(state, step, self.steps, os.getpid(), socket.gethostname(), time.time()))))

    def step(self, index: int) -> None:
        """Note that a step is done, and write the run so far if that is due."""
        self.say("running", index + 1)
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self.job.run().save(self.folder)
            took_s = time.monotonic() - began_s
            self._due_s = time.monotonic() + max(LEAST_S, took_s / PART)


def _write(path: Path, text: str) -> None:
    """Replace a file at once, so that a reader never finds half of it."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
