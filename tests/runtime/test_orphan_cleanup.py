"""What a killed job leaves behind is removed, and which notes are believed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.namespaces import explain_refusal, isolate_command

from rlgraph.nodes import sandbox
from rlgraph.nodes.environments import leases
from rlgraph.runtime.driver import orphan_cleanup

DEAD = [1, 12345]  # process 1 did not begin then


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody may remove."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "data").write_text("kept")
    yield folder
    assert (folder / "data").read_text() == "kept"


def claimed_by(owner: str, folder: Path) -> "subprocess.Popen[str]":
    """Return a process that has claimed the folder: as a driver that is gone, or one that lives until its input ends."""
    code = "import sys; from pathlib import Path; from rlgraph.runtime.driver.orphan_cleanup import claim"
    code += f"; claim(Path({str(folder)!r}), (), ())"
    wait = "; print('claimed', flush=True); sys.stdin.read()" if owner == "living" else ""
    return subprocess.Popen([sys.executable, "-c", code + wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def of_a_dead_driver(folder: Path, also: tuple[str, ...] = (), mode: int = 0o700, note_mode: int = 0o600) -> Path:
    """Make a folder with the note of a driver that is gone."""
    folder.mkdir(mode=mode)
    folder.chmod(mode)
    note = folder / orphan_cleanup.NOTE
    note.write_text(json.dumps({"owner": DEAD, "workers": [], "also": also}))
    note.chmod(note_mode)
    return folder


def test_the_folder_of_a_dead_driver_is_swept_and_that_of_a_living_one_is_not() -> None:
    folders = [Path(orphan_cleanup.make_job_folder()) for _ in range(3)]
    claimed_by("dead", folders[0]).communicate()
    os.mkfifo(folders[0] / "worker.stacks")  # which nobody opens any more
    (folders[0] / "inner").mkdir()
    os.mkfifo(folders[0] / "inner" / "pipe")
    living = claimed_by("living", folders[1])
    assert living.stdout is not None
    living.stdout.readline()
    assert orphan_cleanup.sweep() == [str(folders[0])]
    assert [folder.exists() for folder in folders] == [False, True, True]
    living.communicate("")
    assert orphan_cleanup.sweep() == [str(folders[1])]


@pytest.mark.skipif(bool(explain_refusal()), reason="no namespaces here")
def test_a_job_of_another_pid_namespace_that_shares_the_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "_MINE", {})
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    folder = Path(orphan_cleanup.make_job_folder())
    code = "from rlgraph.runtime.driver import orphan_cleanup as jobs; from rlgraph.nodes.environments import leases"
    code += "; print(jobs.sweep(), leases.sweep())"
    held = leases.lease(["touch", str(tmp_path / "freed")])
    orphan_cleanup.claim(folder, (), ())
    try:
        swept = subprocess.run(
            isolate_command([sys.executable, "-c", code]), capture_output=True, text=True, check=True, timeout=60, env=environment
        )
        assert swept.stdout.split() == ["[]", "[]"]
        assert (folder / orphan_cleanup.NOTE).exists()
        assert held.path.exists()
        assert not (tmp_path / "freed").exists()
    finally:
        held.end()


@pytest.mark.parametrize(("name", "born"), [("same", 0), ("reused", -5)])
def test_the_worker_of_a_dead_driver_is_ended_but_not_another_process_that_has_its_id_now(name: str, born: int) -> None:
    folder = Path(orphan_cleanup.make_job_folder())
    with subprocess.Popen(["sleep", "100"]) as worker:
        orphan_cleanup.claim(folder, [worker.pid], ())
        note = json.loads((folder / orphan_cleanup.NOTE).read_text())
        note["owner"] = DEAD
        note["workers"][0][1] += born
        (folder / orphan_cleanup.NOTE).write_text(json.dumps(note))
        orphan_cleanup.sweep()
        if name == "same":
            assert worker.wait(60) == -signal.SIGKILL
        else:
            assert worker.poll() is None
            worker.kill()


def test_at_once_a_dead_drivers_workers_and_semaphores_are_ended_and_its_folder_stays_until_the_next_start() -> None:
    folder, own = Path(orphan_cleanup.make_job_folder()), Path(f"/dev/shm/sem.hdr{os.getpid()}-1")
    with subprocess.Popen(["sleep", "100"]) as worker:
        orphan_cleanup.claim(folder, [worker.pid], ())
        note = json.loads((folder / orphan_cleanup.NOTE).read_text())
        (folder / orphan_cleanup.NOTE).write_text(json.dumps(note | {"owner": DEAD}))
        dead = [Path(f"/dev/shm/sem.{kind}{worker.pid}-1") for kind in ("hdr", "obj")]
        for path in (own, *dead):
            path.touch()
        subprocess.run(orphan_cleanup.sweep_command(), env=os.environ | {"TMPDIR": str(folder.parent)}, cwd="/", check=True)
        assert worker.wait(60) == -signal.SIGKILL
    orphan_cleanup.free_semaphores()
    assert [path.exists() for path in (folder, own, *dead)] == [True, True, False, False]
    own.unlink()


def test_a_folder_that_a_note_names_is_not_removed(tmp_path: Path, victim: Path) -> None:
    folder = of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1", also=(str(victim),))
    assert orphan_cleanup.sweep() == [str(folder)]


def test_the_session_of_a_dead_drivers_own_ray_is_removed_and_no_other(tmp_path: Path) -> None:
    sessions = [tmp_path / "ray" / f"session_2026-01-02_03-04-05_678901_{pid}" for pid in (DEAD[0], 2)]
    for session in sessions:
        (session / "logs").mkdir(parents=True)
    link = tmp_path / "ray" / f"session_2026-01-02_03-04-05_000000_{DEAD[0]}"
    link.symlink_to(sessions[1])
    of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1", also=tuple(map(str, (*sessions, link))))
    orphan_cleanup.sweep()
    assert [session.exists() for session in sessions] == [False, True]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o1700])
def test_a_folder_that_others_may_enter_is_none_of_the_librarys(mode: int, tmp_path: Path) -> None:
    folder = of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1", mode=mode)
    assert orphan_cleanup.sweep() == []
    assert folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user, which root alone may")
def test_a_folder_of_another_user_is_left_alone(tmp_path: Path) -> None:
    folder = of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1")
    try:
        os.chown(folder, 12345, -1)
    except OSError as error:
        pytest.skip(f"another user's folder cannot be made here: {error}")
    assert orphan_cleanup.sweep() == []
    assert folder.exists()


def test_a_note_that_others_may_write_or_that_is_a_link_or_a_pipe_is_not_believed(tmp_path: Path, victim: Path) -> None:
    writable = of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1", note_mode=0o666)
    linked, hard, pipe = (tmp_path / f"{orphan_cleanup.PREFIX}{name}" for name in ("2", "3", "4"))
    for folder in (linked, hard, pipe):
        folder.mkdir(mode=0o700)
    (victim / orphan_cleanup.NOTE).write_bytes((writable / orphan_cleanup.NOTE).read_bytes())
    (victim / orphan_cleanup.NOTE).chmod(0o600)
    (linked / orphan_cleanup.NOTE).symlink_to(victim / orphan_cleanup.NOTE)
    (hard / orphan_cleanup.NOTE).hardlink_to(victim / orphan_cleanup.NOTE)
    os.mkfifo(pipe / orphan_cleanup.NOTE, 0o600)
    (tmp_path / f"{orphan_cleanup.PREFIX}5").symlink_to(victim)
    assert orphan_cleanup.sweep() == []
    assert all(folder.exists() for folder in (writable, linked, hard, pipe))


def test_what_a_swept_folder_links_to_stays(tmp_path: Path, victim: Path) -> None:
    folder = of_a_dead_driver(tmp_path / f"{orphan_cleanup.PREFIX}1")
    (folder / "link").symlink_to(victim)
    assert orphan_cleanup.sweep() == [str(folder)]
    assert not folder.exists()


@pytest.mark.sandbox
def test_no_folder_that_a_tools_code_writes_into_has_the_name_of_a_jobs(tmp_path: Path) -> None:
    """So that no note of its own is ever read, also where the generator is killed and the folder stays."""

    async def seen_during_a_run() -> set[str]:
        code = f"import time; open('{orphan_cleanup.NOTE}', 'w').write('x'); time.sleep(0.5)"
        running = asyncio.create_task(sandbox.run(code, sandbox.Limits()))
        names: set[str] = set()
        while not running.done():
            names |= set(os.listdir(tmp_path))
            await asyncio.sleep(0.01)
        assert await running == ""
        return names

    assert not [name for name in asyncio.run(seen_during_a_run()) if name.startswith("rlgraph-")]
