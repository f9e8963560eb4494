"""When a job may start again, and whose leftovers a job sweeps."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlgraph.errors import CheckpointError, NodeError, StalenessError, WorkerDied
from rlgraph.runtime import leftovers
from rlgraph.runtime.restarts import Restarts
from rlgraph.runtime.signals import Signals


def test_failures_in_a_row_are_counted_and_a_further_checkpoint_makes_them_count_anew() -> None:
    restarts = Restarts(2)
    assert [restarts.allows(WorkerDied("died"), 10, ready=True) for _ in range(3)] == [True, True, False]
    assert restarts.allows(WorkerDied("died"), 20, ready=True)


@pytest.mark.parametrize("error", [CheckpointError("no room"), StalenessError("too old")])
def test_an_error_that_would_come_again_ends_the_job(error: Exception) -> None:
    assert not Restarts(5).allows(error, 0, ready=True)


def test_an_engine_that_cannot_be_loaded_is_not_tried_again_but_one_that_was_killed_is() -> None:
    assert not Restarts(5).allows(NodeError("no such model"), 0, ready=False)
    assert Restarts(5).allows(WorkerDied("killed while it was loading"), 0, ready=False)


def claimed_by(owner: str, folder: Path) -> "subprocess.Popen[str]":
    """Return a process that has claimed the folder: as a driver that is gone, or one that lives until its input ends."""
    code = f"import sys; from pathlib import Path; from rlgraph.runtime import leftovers; leftovers.claim(Path({str(folder)!r}), (), ())"
    wait = "; print('claimed', flush=True); sys.stdin.read()" if owner == "living" else ""
    return subprocess.Popen([sys.executable, "-c", code + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_the_folder_of_a_dead_driver_is_swept_and_that_of_a_living_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folders = {name: tmp_path / f"rlgraph-{name}" for name in ("dead", "living", "unclaimed")}
    for folder in folders.values():
        folder.mkdir()
    claimed_by("dead", folders["dead"]).communicate()
    living = claimed_by("living", folders["living"])
    assert living.stdout is not None
    living.stdout.readline()
    assert leftovers.sweep() == [str(folders["dead"])]
    assert [folder.exists() for folder in folders.values()] == [False, True, True]
    living.communicate("")
    assert leftovers.sweep() == [str(folders["living"])]


def test_the_worker_of_a_dead_driver_is_ended_but_not_another_process_that_has_its_id_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name, born in (("same", 0), ("reused", -5)):
        folder = tmp_path / f"rlgraph-{name}"
        folder.mkdir()
        with subprocess.Popen(["sleep", "100"]) as worker:
            leftovers.claim(folder, [worker.pid], ())
            note = json.loads((folder / leftovers.NOTE).read_text())
            note["owner"] = [1, 12345]  # process 1 was not born then
            note["workers"][0][1] += born
            (folder / leftovers.NOTE).write_text(json.dumps(note))
            leftovers.sweep()
            if name == "same":
                assert worker.wait(10) == -signal.SIGKILL
            else:
                assert worker.poll() is None
                worker.kill()


def test_the_first_signal_asks_for_an_end_and_the_second_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signals = Signals(lambda: True)
    signals.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.asked == signal.SIGTERM
        assert "finishing the steps in flight; once more stops at once" in capsys.readouterr().err
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 128 + signal.SIGTERM
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_nothing_is_in_flight_ends_at_once() -> None:
    signals = Signals(lambda: False)
    signals.install()
    try:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()
