"""Serve the report of a run while it goes on, on this machine alone."""

import hashlib
import json
import mimetypes
import os
import socket
import threading
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

from rlgraph.analysis import run as run_file
from rlgraph.analysis.run import Run
from rlgraph.analysis.samples import PROFILES_FOLDER as PROFILES
from rlgraph.analysis.samples import sample_files
from rlgraph.errors import DataError
from rlgraph.render import report

if TYPE_CHECKING:
    from rlgraph.runtime.driver.job import Job

# Keep the folder of a run readable while it goes on: `run.json` every few seconds, and `state.json` with each step.

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

    def sentence(self) -> str:
        """Say it in words, for the head of a page."""
        words = {"running": "running", "ended": "ended", "failed": "ended by an error"}
        stopped = self.state == "running" and self.host == socket.gethostname() and not Path(f"/proc/{self.pid}").exists()
        return f"{'killed' if stopped else words[self.state]} after {self.step} of {self.steps} steps"

    @property
    def goes_on(self) -> bool:
        """Whether the run is still at work, as far as can be seen from here."""
        return self.sentence().startswith("running")


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
        self.say("running", job.finished_steps)

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


LOOPBACK = "127.0.0.1"
WAITING = """<!DOCTYPE html>
<html lang="en" data-version=""><head><meta charset="utf-8"/><title>rlgraph</title><meta http-equiv="refresh" content="1"/></head>
<body><main><p id="state">No step of this run is done yet.</p></main></body></html>
"""


class Watch:
    """The live view of a run: serves until it is closed. A context manager; `rg.runs.watch` makes it.

    >>> import tempfile, rlgraph as rg
    >>> with rg.runs.watch(tempfile.mkdtemp()) as view:
    ...     view.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        try:
            self._server = _Server((LOOPBACK, port), _Handler)
        except OSError as error:
            raise DataError(f"watch(port={port}): {error.strerror or error}; pass a port that is free, or 0 for any") from None
        self._server.watch = self
        self._page: tuple[str, bytes] = ("", b"")
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._server.serve_forever, name="watch", daemon=True)
        self._thread.start()

    @cached_property
    def url(self) -> str:
        """The address of the page, for a browser on this machine."""
        return f"http://{LOOPBACK}:{self._server.server_address[1]}/"

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait(self) -> None:
        """Serve until Ctrl-C, also after the run has ended."""
        try:
            while self._thread.is_alive():
                self._thread.join(0.5)
        except KeyboardInterrupt:
            self.close()

    def version(self) -> str:
        """Name the content of the folder: it changes when there is something new to show."""
        files = [self.folder / run_file.FILE, *sample_files(self.folder)]
        found = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files if path.exists()]
        return hashlib.sha256(repr(found).encode()).hexdigest()[:16]

    def state(self) -> dict[str, str]:
        """Tell the page's script which version there is, and how far the run is."""
        state = read_state(self.folder)
        return {"version": self.version(), "said": state.sentence() if state else "not known to run"}

    def page(self) -> bytes:
        """Build the page of the run so far; the same version is built once."""
        with self._lock:
            version = self.version()
            if not (self.folder / run_file.FILE).exists():
                return WAITING.encode()
            if self._page[0] != version:
                scripts = (*report.SCRIPTS, "live.js")
                text = report.page(Run.load(self.folder), self.folder, state=self.state()["said"], scripts=scripts)
                self._page = version, text.replace('<html lang="en">', f'<html lang="en" data-version="{version}">', 1).encode()
            return self._page[1]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    watch: Watch


class _Handler(BaseHTTPRequestHandler):
    """Answers for the page, its state and the files that it links. Other hosts' names are refused: a page elsewhere may not read it."""

    server: _Server

    def do_GET(self) -> None:
        watch, path = self.server.watch, unquote(urlsplit(self.path).path)
        if self.headers.get("Host", "").rpartition(":")[0] not in (LOOPBACK, "localhost"):
            self._answer(403, "text/plain", b"this page is served to 127.0.0.1 alone")
        elif path == "/":
            self._answer(200, "text/html; charset=utf-8", watch.page())
        elif path == "/state":
            self._answer(200, "application/json", json.dumps(watch.state()).encode())
        elif (file := self._profile_file(path)) is not None:
            self._answer(200, mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes())
        else:
            self._answer(404, "text/plain", b"there is no such page")

    def _profile_file(self, path: str) -> Path | None:
        """Find a file of the run's profiles, and no other file."""
        folder = self.server.watch.folder / PROFILES
        return next((file for file in folder.glob("*") if f"/{PROFILES}/{file.name}" == path and file.is_file()), None)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
