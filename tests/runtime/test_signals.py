"""Signals that come at a bad time, as a terminal sends them, to a program as a user writes it: it ends clean, with the signal's status."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.paths import TESTS

pytestmark = pytest.mark.stage("kills")

PROGRAM = """
import sys, time
sys.path.insert(0, {tests!r})
from support import fakes
import rlgraph as rg
from rlgraph.runtime.driver import ray_dispatch as dispatch
from rlgraph.runtime.driver import session

def end(then):
    def ending(*arguments):
        print("ending", flush=True)
        sys.stdin.readline()  # until the test closes it
        return then(*arguments)
    return ending

dispatch.ray.init = (lambda start: lambda *a, **k: [print("starting Ray", flush=True), start(*a, **k)][1])(dispatch.ray.init)
session.Session._end = end(session.Session._end)
plan = rg.compile(fakes.vector_loop(1, generate_s=0.1, train_s=0.1), rg.Cluster(cpus=2))
with plan.launch() as job:
    for step in job.steps(1000):
        print("did", step.index, flush=True)
"""


def run_until(*signals: tuple[str, int, float]) -> tuple[int, str, list[int], list[str]]:
    """Send each signal so many seconds after the line that the program says; return status, what it said as errors, and what is left."""
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    program = started(mark)
    ours: set[int] = set()
    for awaited, number, after_s in signals:
        read_until(program, awaited)
        time.sleep(after_s)
        ours |= set(marked(mark))
        os.killpg(program.pid, number)  # Ctrl-C reaches the whole group of a terminal
    time.sleep(0.1)
    _, errors = program.communicate(timeout=250)
    wait_until(lambda: not marked(mark))
    made = {str(pid) for pid in ours}
    left = [path.name for path in Path("/dev/shm").iterdir() if made & set(re.findall(r"\d+", path.name))]
    return program.returncode, errors, marked(mark), left


def started(mark: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", PROGRAM.format(tests=str(TESTS))]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RLGRAPH_MARK": mark},
    )


def read_until(program: "subprocess.Popen[str]", awaited: str) -> None:
    assert program.stdout is not None
    for line in program.stdout:
        if line.strip() == awaited:
            return


def marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"RLGRAPH_MARK={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except OSError:
            continue
    return found


def wait_until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("signals", "says"),
    [
        ([("did 2", signal.SIGINT, 0.0), ("ending", signal.SIGINT, 0.0)], "SIGINT: ending the workers first"),
        ([("starting Ray", signal.SIGTERM, 0.7)], "SIGTERM: waiting until Ray has started"),
    ],
    ids=["twice", "while Ray starts"],
)
def test_a_signal_at_a_bad_time_leaves_nothing_and_gives_its_own_status(signals, says) -> None:
    status, errors, processes, shared = run_until(*signals)
    assert says in errors
    assert status in ({-signal.SIGINT} if signals[0][1] == signal.SIGINT else {128 + signal.SIGTERM, -signal.SIGTERM, signal.SIGTERM}), (
        errors
    )
    assert (processes, shared) == ([], [])


@pytest.mark.ray
def test_a_signal_to_the_whole_group_is_left_to_the_program_and_ray_goes_on_until_its_end() -> None:
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    program = started(mark)
    read_until(program, "did 2")
    daemons = [pid for pid in marked(mark) if re.search(rb"gcs_server|raylet/raylet", Path(f"/proc/{pid}/cmdline").read_bytes())]
    groups = [os.getpgid(pid) for pid in daemons]
    os.killpg(program.pid, signal.SIGTERM)  # as `timeout` and job schedulers send it
    read_until(program, "ending")
    alive = set(daemons) <= set(marked(mark))
    _, errors = program.communicate(timeout=250)
    assert (program.returncode, "finishing the steps in flight" in errors) == (128 + signal.SIGTERM, True), errors
    assert (len(daemons), alive, program.pid in groups) == (2, True, False)
    wait_until(lambda: not marked(mark))
    assert marked(mark) == []
