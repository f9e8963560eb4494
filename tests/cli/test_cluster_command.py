"""`rlgraph cluster`: what it writes, refuses and ends, without Ray. With Ray on hosts of their own: tests/runtime/test_ray_hosts.py."""

import io
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rlgraph.errors import ConfigError, PlanError
from rlgraph.nodes.environments.leases import began
from rlgraph.runtime.driver import ray_cluster
from rlgraph_cli import cluster


def test_a_token_can_be_read_by_its_user_alone_and_is_never_replaced(tmp_path: Path) -> None:
    file = tmp_path / "ray" / "token"
    cluster.write_token(file, "secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    with pytest.raises(FileExistsError):
        cluster.write_token(file, "another")


@pytest.mark.parametrize(
    ("there", "given", "error"),
    [
        ("", "secret\n", ""),
        ("secret", "secret\n", ""),
        ("secret", "another\n", "holds another token already"),
        ("", "", "standard input is empty"),
    ],
)
def test_a_token_from_a_pipe_is_kept_unless_the_file_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, given: str, error: str
) -> None:
    file = tmp_path / "token"
    if there:
        cluster.write_token(file, there)
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    if error:
        with pytest.raises(ConfigError, match=error):
            cluster._keep(file, "-")
    else:
        cluster._keep(file, "-")
        assert file.read_text() == "secret"


def test_a_head_that_does_not_answer_is_an_error_at_once_where_nobody_waits() -> None:
    with pytest.raises(PlanError, match=r"nothing answers at 127\.0\.0\.1:1 .*run `rlgraph cluster start` there first"):
        cluster._reach(("127.0.0.1", 1), 0)


def test_stop_ends_what_is_marked_with_its_children_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster, "MARK", f"RLGRAPH_CLUSTER_{os.getpid()}")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    stubborn = "trap '' TERM; env -i sleep 100 & echo up; wait; wait"  # its child has lost the mark
    marked = subprocess.Popen(
        ["bash", "-c", stubborn], env=os.environ | {cluster.MARK: "1"}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "100"])
    monkeypatch.setattr(cluster, "TERM_S", 0.2)
    try:
        assert marked.stdout is not None
        assert marked.stdout.readline() == "up\n"
        child = Path(f"/proc/{marked.pid}/task/{marked.pid}/children").read_text().split()
        cluster.stop()
        assert marked.wait(5) == -signal.SIGKILL
        assert child
        assert began(int(child[0])) == -1, "the child lives on"
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        if marked.stdout is not None:
            marked.stdout.close()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "RAY_AUTH_MODE is not set here, and the token's file is HOME/.ray/auth_token, which does not exist"),
        (
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": __file__},
            f"RAY_AUTH_MODE is token here, and the token's file is {__file__}, which is",
        ),
        ({"RAY_AUTH_TOKEN": "a"}, "the token is that of the variable RAY_AUTH_TOKEN, before any file"),
    ],
)
def test_an_error_names_the_mode_and_the_file(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (ray_cluster.MODE, ray_cluster.FILE, ray_cluster.TOKEN):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    assert said.replace("HOME", str(tmp_path)) in ray_cluster.describe_mode()


def test_a_ray_that_takes_no_jobs_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)  # as where one of them is missing
    with pytest.raises(ConfigError, match=r'start --jobs: this Ray accepts no jobs; run `pip install "ray\[default\]"`'):
        cluster.check_takes_jobs()
