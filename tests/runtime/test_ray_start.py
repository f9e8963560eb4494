"""Ray's own processes get the time that a busy machine takes to start them, and one token; one that ends is named, and none is left."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import ray
from support import namespaces
from support.forked_workers import traces
from support.paths import PROGRAMS, TESTS
from support.scripted_conversations import wait_until

from rlgraph.errors import DispatchError
from rlgraph.runtime.driver import ray_cluster

DYING = """
import os, signal, sys, time, psutil, ray
from rlgraph.runtime.driver import ray_cluster

get_node, killed = ray._private.services.get_node, []

def get_node_of_dying_ray(*which):
    raylets = [each for each in psutil.Process().children() if each.name() == "raylet" and each.status() != psutil.STATUS_ZOMBIE]
    if raylets and len(killed) < int(sys.argv[1]):
        killed.append(next(part for part in raylets[0].cmdline() if "session_" in part).partition("session_")[2].split("/")[0])
        raylets[0].kill()
        while raylets[0].status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        raylets = []
    if not raylets:
        raise RuntimeError("it has not registered yet")
    return get_node(*which)

ray._private.services.get_node = get_node_of_dying_ray
try:
    ray_cluster.start_ray()
    print(ray.get(ray.remote(lambda: "a task ran").remote()))
    ray_cluster.stop_ray()
finally:
    end, left = time.monotonic() + 10, [""]
    while left and time.monotonic() < end:  # an agent that had just begun to start sees last that its raylet has ended
        time.sleep(0.1)
        lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
        left = [line for line in lines if any(session in line for session in killed)]
    print(len(killed), "killed, left:", left)
"""


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of the token in an empty home."""
    for name in (ray_cluster.MODE, ray_cluster.FILE, ray_cluster.TOKEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ray" / "auth_token"


@pytest.mark.timeout(20)
def test_a_wait_for_the_port_of_a_gcs_server_that_has_ended_ends_at_once(tmp_path: Path) -> None:
    def ended() -> NoReturn:
        raise ray_cluster._Died("it has ended")

    with ray_cluster._patient(ended), pytest.raises(ray_cluster._Died):
        ray._private.node.wait_for_persisted_port(str(tmp_path), "00" * 28, "gcs_server_port", timeout_ms=15_000)


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(("room", "why"), [(1 << 62, "File too large|No space left"), (1, "Not a directory")])
def test_a_temporary_folder_without_room_or_that_cannot_be_written_is_named(
    room: int, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" if room == 1 else tmp_path
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", None)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(ray_cluster, "ROOM", room)
    with pytest.raises(DispatchError, match=rf"temporary folder '{folder}/ray' cannot hold .* \(({why})\); free room there"):
        ray_cluster.start_ray()


@pytest.mark.ray
@pytest.mark.stage("kills")
@pytest.mark.parametrize(("killed", "says"), [(1, "a task ran"), (ray_cluster.STARTS, "Ray's raylet on this host ended with status -9")])
def test_a_ray_whose_raylet_ends_as_it_starts_is_started_again_and_nothing_is_left(killed: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", DYING, str(killed)], capture_output=True, text=True, timeout=250, check=False)
    assert says in done.stdout + done.stderr, done.stderr
    assert f"{killed} killed, left: []" in done.stdout
    assert (done.returncode != 0) == (killed == ray_cluster.STARTS)


@pytest.mark.usefixtures("token")
def test_ray_is_started_with_that_time_for_each_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.delenv("RAY_gcs_server_port_wait_time_s", raising=False)
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "7")  # the user's own choice stays
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *mode, **options: given.update(options))
    assert ray_cluster.start_ray()
    assert given["_system_config"]["worker_register_timeout_seconds"] == ray_cluster.START_S >= 180
    assert [os.environ[f"RAY_{process}_wait_time_s"] for process in ("gcs_server_port", "raylet_start")] == ["180", "7"]


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("limit", ["START_S", "STOPPED_S"])
def test_a_start_of_ray_that_hangs_is_an_error_at_its_deadline_and_soon_after_a_signal(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *mode, **options: end.wait(60))
    monkeypatch.setattr(ray_cluster, limit, 0.2)
    for process in ("gcs_server_port", "raylet_start"):
        monkeypatch.setenv(f"RAY_{process}_wait_time_s", "7")  # not the seconds of this test
    try:
        with pytest.raises(DispatchError, match="Ray has not started within 0 s"):
            ray_cluster.start_ray(stopped=lambda: limit == "STOPPED_S")
    finally:
        end.set()


@pytest.mark.usefixtures("token")
def test_what_ray_raises_as_it_starts_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home(*mode: Any, **options: Any) -> NoReturn:
        Path("/proc/nothome").mkdir()

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", without_home)
    with pytest.raises(DispatchError, match=r"Ray did not start: FileNotFoundError: .*/proc/nothome"):
        ray_cluster.start_ray()


@pytest.mark.stage("hosts")
@pytest.mark.skipif(bool(namespaces.explain_refusal()), reason="no network namespaces here")
def test_a_launch_without_the_loopback_interface_says_how_to_bring_it_up() -> None:
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support import fakes; import rlgraph as rg; "
    code += "rg.compile(fakes.vector_loop(1), rg.Cluster(cpus=2)).launch().__enter__()"
    command = namespaces.isolate_command([sys.executable, "-c", code])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "this machine does not reach itself at 127.0.0.1 (Network is unreachable)" in done.stderr
    assert "bring lo up with `ip link set lo up`" in done.stderr


@pytest.mark.parametrize(
    ("logged", "says"),
    [
        (
            "E agent_manager.cc:87: because one Ray agent failed, agent_name = dashboard_agent.\n",
            "dashboard_agent on this host ended; its log ",
        ),
        (
            "F main.cc:1: Check failed: no room\n\n",
            "raylet on this host ended with status 3; its log {}/raylet.err ends: F main.cc:1: Check failed",
        ),
        ("", "raylet on this host ended with status 3; its log is {}/raylet.out"),
    ],
)
def test_the_process_of_ray_that_ended_is_named_with_its_log(logged: str, says: str, tmp_path: Path) -> None:
    logs = tmp_path / "session_1_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text(logged)
    raylet = tmp_path / "raylet"
    raylet.symlink_to("/bin/sh")
    command = [str(raylet), "-c", "exit 3", str(logs)]
    ended = subprocess.Popen(command)
    ended.wait()
    assert ray_cluster.Daemon.of(ended, command).death().startswith(f"Ray's {says.format(logs)}")


FORKS_CRASH = """
import ctypes, signal, subprocess
libc = ctypes.CDLL(None)
libc["__register_atfork"](None, None, libc.abort, None)  # what some libraries of C register, with a fault in it
assert subprocess.Popen(["true"], preexec_fn=lambda: None).wait() == -signal.SIGABRT

from rlgraph.runtime.driver import ray_cluster
ray_cluster.start_ray()
import ray
print(ray.get(ray.remote(lambda: "a task ran").remote()))
ray_cluster.stop_ray()
"""


@pytest.mark.ray
@pytest.mark.stage("jobs")
def test_ray_starts_from_a_program_in_which_a_fork_crashes() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS_CRASH], capture_output=True, text=True, timeout=200)
    assert "a task ran" in done.stdout, done.stderr[-2000:]


@pytest.mark.ray
@pytest.mark.stage("kills")
def test_an_agent_of_ray_that_ended_is_named_and_ends_what_there_is_of_the_job(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "killed_driver.py"), str(tmp_path), "100000"]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    any(line.startswith("did") for line in program.stdout)
    family = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
    next(each for each in family if each.name() == "ray::RuntimeEnvAgent").kill()
    errors = program.communicate(timeout=100)[1]
    assert re.search(r"DispatchError: Ray's runtime_env_agent on this host ended; its log /\S+/runtime_env_agent.log ends: ", errors), (
        errors
    )
    wait_until(lambda: traces(tmp_path / "none", {each.pid for each in family}) == [], 20.0)


@pytest.mark.parametrize("mode", ["", "token"])
def test_a_token_is_made_once_for_this_user_alone(mode: str, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ray_cluster.MODE, mode)
    ray_cluster.make_token()
    made = token.read_text()
    ray_cluster.make_token()
    assert (token.read_text(), len(made), token.stat().st_mode & 0o777) == (made, 64, 0o600)
    assert list(token.parent.iterdir()) == [token]


def test_of_two_programs_that_start_at_once_both_have_the_first_ones_token(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(count: int) -> str:
        token.write_text("the other's")
        return "ours"

    monkeypatch.setattr(ray_cluster.secrets, "token_hex", meanwhile)
    ray_cluster.make_token()
    assert token.read_text() == "the other's"
    assert list(token.parent.iterdir()) == [token]


def test_without_a_home_that_can_be_written_the_token_lies_apart(token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/nothome")
    monkeypatch.setenv(ray_cluster.FILE, "")  # so that the variable is undone
    ray_cluster.make_token()
    apart = ray_cluster.token_file()
    assert (len(apart.read_text()), apart.stat().st_mode & 0o777, apart.parent.stat().st_mode & 0o777) == (64, 0o600, 0o700)
    ray_cluster.make_token()
    assert ray_cluster.token_file() == apart
    assert not token.exists()


@pytest.mark.parametrize("name", [ray_cluster.MODE, ray_cluster.FILE, ray_cluster.TOKEN])
def test_a_token_of_the_users_own_choice_is_left_to_ray(token: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "disabled")
    ray_cluster.make_token()
    assert not token.exists()
