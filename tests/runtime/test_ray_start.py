"""Ray's own processes get the time that a busy machine takes to start them, and one token."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
import ray

from rlgraph.runtime.driver import ray_cluster

LATE = RuntimeError("it has not registered yet")
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


def test_a_node_of_ray_that_registers_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def late(*which: Any) -> str:
        asked.append(which)
        if len(asked) < 3:
            raise LATE
        return "the node"

    monkeypatch.setattr(ray._private.services, "get_node", late)
    with ray_cluster._patient(lambda: None):
        assert ray._private.services.get_node("address", "id") == "the node"
    assert asked == [("address", "id")] * 3
    assert ray._private.services.get_node is late


def test_a_node_of_ray_that_never_registers_is_an_error_after_the_time_for_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*which: Any) -> NoReturn:
        raise LATE

    monkeypatch.setattr(ray._private.services, "get_node", never)
    monkeypatch.setattr(ray_cluster, "START_S", 0)
    with ray_cluster._patient(lambda: None), pytest.raises(RuntimeError, match="not registered yet"):
        ray._private.services.get_node("address", "id")


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


def test_a_token_is_made_once_for_this_user_alone(token: Path) -> None:
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
