"""Leases: what an environment holds is freed when its process is killed, and only then."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.forked_workers import alive
from support.paths import PROGRAMS
from support.scripted_conversations import wait_until

from rlgraph.nodes.environments import leases

HOLDER = """
import subprocess, sys, time
from rlgraph.nodes.environments.leases import lease, leased_command
mark, server = sys.argv[1:]
lease(["/bin/sh", "-c", f"echo freed >> {mark}"])
lease(["/bin/sh", "-c", f"echo never >> {mark}"]).end()
command, _ = leased_command(["/bin/sh", "-c", "trap '' TERM HUP; sleep 600 & echo $!; wait"])
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
grandchild = int(child.stdout.readline())
pids = [child.pid, grandchild]
if server:
    import asyncio
    import rlgraph as rg
    tools = {tool.name: tool for tool in rg.environments.mcp(sys.executable, server, "--stay")}
    async def talk():
        own = {tool.name: tool for tool in rg.environments.mcp(sys.executable, server, "--stay", own=True)}["process"]
        print(*pids, await tools["process"].function(), await own.function(own.keeps()), flush=True)
        await asyncio.sleep(600)
    asyncio.run(talk())
print(*pids, flush=True)
time.sleep(600)
"""


def holder(mark: Path, server: str = "") -> tuple[subprocess.Popen[str], list[int]]:
    """Start a process that holds a command, a stubborn child and its child, and return their ids."""
    found = subprocess.Popen([sys.executable, "-c", HOLDER, str(mark), server], stdout=subprocess.PIPE, text=True)
    assert found.stdout is not None
    return found, [int(pid) for pid in found.stdout.readline().split()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.mark.stage("kills")
def test_what_a_killed_process_held_is_freed_at_once_and_once(tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    process, pids = holder(tmp_path / "mark", str(PROGRAMS / "mcp_server.py"))
    assert len(pids) == 4  # a child, its own child, and servers of MCP, shared and own, that stay when their client has gone
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids), 60)
    wait_until(lambda: not list(tmp_path.glob(f"{leases.PREFIX}*")), 60)
    assert leases.sweep() == []
    assert (tmp_path / "mark").read_text() == "freed\n"


@pytest.mark.stage("kills")
def test_the_next_rollout_sweeps_where_the_sweeper_was_killed_too(tmp_path: Path) -> None:
    process, pids = holder(tmp_path / "mark")
    [mine] = tmp_path.glob(f"{leases.PREFIX}*")
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and str(mine).encode() in _command(entry):
            os.kill(int(entry.name), signal.SIGKILL)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert alive(pids[0])
    assert leases.sweep() == [mine.name]
    assert (tmp_path / "mark").read_text() == "freed\n"
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_leases_of_a_process_that_lives_are_left_alone(tmp_path: Path) -> None:
    process, pids = holder(tmp_path / "mark")
    try:
        assert leases.sweep() == []
        assert all(alive(pid) for pid in pids)
    finally:
        process.terminate()
        process.communicate()
    wait_until(lambda: not any(alive(pid) for pid in pids))  # it has ended in the usual way, and is swept as well


def test_a_folder_that_others_may_write_to_is_not_believed(tmp_path: Path) -> None:
    false = tmp_path / f"{leases.PREFIX}{os.getuid()}-1-1-{leases.namespaces()}"
    false.mkdir(mode=0o777)
    false.chmod(0o777)
    (false / "1.command").write_text(f'["touch", "{tmp_path / "mark"}"]')
    assert leases.sweep() == []
    assert not (tmp_path / "mark").exists()


def _command(entry: Path) -> bytes:
    try:
        command = (entry / "cmdline").read_bytes()
    except OSError:
        return b""
    return command if command.startswith(b"/bin/sh\0-c\0read -r _") else b""
