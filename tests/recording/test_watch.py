"""The live view of a run: it renews itself in a real browser while steps finish, and serves this machine alone."""

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from programs import recorded_program
from rich.console import Console
from support import fakes, forked_programs, forked_workers  # noqa: F401 (a way of dispatch)
from support.browser import Browser, needs_browser
from support.sampled_runs import sample, write

import rlgraph as rg
from rlgraph.analysis.samples import PROFILES_FOLDER as PROFILES
from rlgraph.errors import DataError
from rlgraph.recording import watch
from rlgraph.recording.watch import RunState, Watch, read_state
from rlgraph.runtime.driver.job import Job

pytestmark = pytest.mark.stage("recipes")

PROGRAM = Path(recorded_program.__file__)


def answer(view: Watch, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(view.url.rstrip("/").rpartition(":")[2]), timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    found = connection.getresponse()
    return found.status, found.read()


@pytest.fixture
def job() -> Iterator[Job]:
    graph = fakes.vector_loop(1)
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0) as running:
        yield running


@needs_browser
def test_a_browser_sees_steps_come_in_and_keeps_what_was_chosen(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_S", 0.0)
    monkeypatch.setattr(watch, "PART", 1e9)
    folder = tmp_path / "run"
    folder.mkdir()
    with rg.runs.watch(folder) as view, Browser(tmp_path) as browser:
        browser.open(view.url)
        browser.until("document.getElementById('state')?.textContent === 'No step of this run is done yet.'")
        steps = rg.record(job, 12, folder, samples=1.0, quiet=True)
        for _ in range(3):
            next(steps)
        browser.until("document.querySelector('header')?.textContent.includes('running after 3 of 12 steps')")
        browser.until("document.querySelectorAll('#samples-list tbody tr').length === 12")
        browser.value("const f = document.querySelector('#filters [name=step-most]'); f.value = '1'; f.dispatchEvent(new Event('input'))")
        browser.value("document.querySelector('#samples-list tbody tr:nth-child(6)').click()")
        chosen = browser.value("document.querySelector('#sample h3').textContent")
        browser.value("document.querySelector('details').open = false; document.activeElement.blur()")
        for _ in range(4):
            next(steps)
        browser.until("document.querySelector('#found')?.textContent === '8 of 28 samples'")
        assert browser.value("document.querySelector('#filters [name=step-most]').value") == "1"
        assert browser.value("document.querySelector('#sample h3').textContent") == chosen
        assert browser.value("document.querySelector('details').open") is False
        assert browser.value("document.querySelectorAll('section').length") == 9
        list(steps)
        browser.until("document.getElementById('state').textContent === 'ended after 12 of 12 steps'")
        view.close()
        browser.until("document.getElementById('state').textContent === 'the live view has ended'")
        assert browser.complaints == []
    assert "fetch(" not in (folder / "run.html").read_text()


def test_it_listens_on_loopback_alone_and_refuses_other_names_and_files(tmp_path: Path) -> None:
    write(tmp_path, [sample(0, 0)])
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / PROFILES).mkdir()
    (tmp_path / PROFILES / "policy-0.trace.json").write_text("{}")
    with rg.runs.watch(tmp_path) as view:
        assert view._server.server_address[0] == "127.0.0.1"
        assert answer(view, "/")[0] == 200
        assert json.loads(answer(view, "/state")[1])["said"] == "not known to run"
        assert answer(view, f"/{PROFILES}/policy-0.trace.json") == (200, b"{}")
        for path in ("/secret.txt", f"/{PROFILES}/../secret.txt", f"/{PROFILES}/%2e%2e/secret.txt", "/samples/samples-00000.jsonl"):
            assert answer(view, path)[0] == 404
        assert answer(view, "/", host="rebound.example:80")[0] == 403


def test_a_report_of_a_run_that_was_killed_is_there(tmp_path: Path) -> None:
    with forked_programs.Program(str(PROGRAM), str(tmp_path), "500", "1", "jsonl", cwd=tmp_path) as program:
        next(line for line in program.stdout if line == "did 5\n")
        os.killpg(program.pid, signal.SIGKILL)
    state = read_state(tmp_path)
    assert state is not None
    assert state.sentence() == f"killed after {state.step} of 500 steps"
    assert not (tmp_path / "run.html").exists()
    assert rg.report(tmp_path) == tmp_path / "run.html"
    assert "sample-data" in (tmp_path / "run.html").read_text()


def test_a_run_that_fails_and_one_that_is_left_say_so(job: Job, tmp_path: Path) -> None:
    steps = rg.record(job, 6, tmp_path / "left", quiet=True)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert read_state(tmp_path / "left") == RunState("ended", 1, 6, os.getpid(), socket.gethostname(), pytest.approx(0, abs=1e12))
    failing = rg.record(job, 6, tmp_path / "failed", quiet=True)
    next(failing)
    with pytest.raises(ZeroDivisionError):
        failing.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    state = read_state(tmp_path / "failed")
    assert state is not None
    assert state.sentence() == "ended by an error after 2 of 6 steps"


def test_a_folder_that_is_not_there_and_a_port_in_use_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder; pass the one that"):
        rg.runs.watch(tmp_path / "none")
    with rg.runs.watch(tmp_path) as view, pytest.raises(DataError, match="Address already in use; pass a port that is free"):
        rg.runs.watch(tmp_path, int(view.url.rstrip("/").rpartition(":")[2]))


def test_recording_into_a_file_is_an_error_of_rlgraph(job: Job, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(rg.errors.PlanError, match="it is a file; pass a folder"):
        next(rg.record(job, 1, tmp_path / "run"))
    with pytest.raises(rg.errors.PlanError, match=r"cannot be written .*Not a directory.*; pass a writable one"):
        next(rg.record(job, 1, tmp_path / "run" / "run"))


def test_a_folder_belongs_to_one_recording_at_a_time(job: Job, tmp_path: Path) -> None:
    first = rg.record(job, 2, tmp_path, quiet=True)
    next(first)
    with pytest.raises(rg.errors.PlanError, match=f"out='{tmp_path}'.*another job records into this folder; give each run its own folder"):
        next(rg.record(job, 2, tmp_path, quiet=True))
    if (child := os.fork()) == 0:  # a fork of the program that outlives the recording does not keep the folder
        signal.pause()
    first.close()  # type: ignore[attr-defined]
    try:
        list(rg.record(job, 2, tmp_path, quiet=True))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == list(range(3))


def test_brackets_and_escapes_in_names_are_text_in_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = fakes.vector_loop(1, middle=lambda rollout: fakes.score(rollout, name="[/bold]\x1b[2J"))
    with Job(graph, rg.compile(graph, rg.Cluster(cpus=2)), dispatch_name="forked", deadline_s=60.0) as running:
        list(rg.record(running, 2, tmp_path / "[" / "b]"))
        Console(file=StringIO()).print(running.bubbles())
        assert "[/bold]" in str(running.bubbles())
    said = capsys.readouterr()
    assert "[/b]/metrics.jsonl" in said.out.replace("\n", "")
    assert "[/bold]\\x1b[2J" in said.err
    assert "\x1b" not in said.out + said.err
