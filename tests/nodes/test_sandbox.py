"""A model's code in its sandbox: whatever it does, the caller gets a text, and nothing else is hurt."""

import asyncio
import errno
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.paths import PROGRAMS

import rlgraph as rg
from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import LAYERS, RUN, Limits, ToolError, check, run
from rlgraph.nodes.walls import session

pytestmark = pytest.mark.sandbox

BARE = f"""
import runpy, sys, types
sys.modules["rlgraph"] = types.ModuleType("rlgraph")  # without what all of it loads, which takes seconds
sys.modules["rlgraph"].__path__ = {rg.__path__!r}
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
QUICK = Limits(seconds=20, memory_bytes=512 << 20, output_bytes=2000, file_bytes=1 << 20)


def ran(code: str, limits: Limits = QUICK) -> str:
    return asyncio.run(run(code, limits))


def test_what_the_code_prints_comes_back_and_so_does_the_value_of_its_last_line() -> None:
    assert ran("print('a')\nx = 6\nx * 7") == "a\n42\n"


def test_an_exception_is_text_for_the_model_to_read() -> None:
    assert ran("1 / 0") == "ZeroDivisionError: division by zero\n"
    assert "SyntaxError" in ran("def f(:")


def test_code_that_never_ends_is_stopped() -> None:
    with pytest.raises(ToolError, match=r"more than 0\.5 s"):
        ran("while True: pass", Limits(seconds=0.5))


def test_code_that_takes_all_memory_gets_a_memory_error() -> None:
    assert ran("x = bytearray(10 ** 11)") == "MemoryError\n"


def test_code_that_prints_without_end_is_cut() -> None:
    assert ran("print('y' * 1999)") == "y" * 1999 + "\n", "as many bytes as it may print"
    with pytest.raises(ToolError, match="more than 2000 bytes") as caught:
        ran("while True: print('y' * 100)")
    assert len(str(caught.value)) < 2200


def test_code_that_prints_faster_than_it_is_read_is_cut_as_well() -> None:
    async def beside_other_work() -> str:
        loop = asyncio.get_running_loop()

        def work() -> None:
            sum(range(500_000))
            loop.call_soon(work)

        loop.call_soon(work)
        return await asyncio.wait_for(run("import os\nwhile True: os.write(1, b'y' * 65536)", QUICK), 60)

    with pytest.raises(ToolError, match="more than 2000 bytes"):
        asyncio.run(beside_other_work())


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.socket()",
        "import os; os.kill(os.getppid(), 0)",
        "open('/etc/passwd').read()",
        "import os; os.listdir('/dev/shm')",
        "import os; os.listdir('/proc')",
        "import ctypes; ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0) == 0 or 1 / 0",
    ],
)
def test_processes_network_signals_and_files_of_others_are_out_of_reach(code: str) -> None:
    assert "Error" in ran(code)


def test_the_files_of_this_process_can_be_neither_read_nor_made(tmp_path: Path) -> None:
    assert "Error" in ran(f"open({str(tmp_path / 'was-here')!r}, 'w')")
    assert not (tmp_path / "was-here").exists()
    secret = tmp_path / "weights"
    secret.write_text("secret")
    assert "FileNotFoundError" in ran(f"open({str(secret)!r}).read()")


def test_a_file_in_its_own_folder_can_be_written_up_to_a_limit_and_is_gone_afterwards() -> None:
    assert ran("open('f', 'w').write('ab'); import os; (open('f').read(), os.getcwd())").startswith("('ab'")
    assert "File too large" in ran("open('g', 'wb').write(bytes(2 << 20))")


def test_all_files_together_have_one_limit() -> None:
    """Ninety-six files of 1 MiB were written within a limit of 16 for each."""
    filled = "import os\nfor i in range(96): open(f'f{i}', 'wb').write(bytes(1 << 20))"
    assert "No space left on device" in ran(filled, Limits(seconds=20, file_bytes=16 << 20))
    counted = "import os\nfor i in range(10 ** 5): open(f'f{i}', 'x')"
    assert "No space left on device" in ran(counted, Limits(seconds=20))


def test_code_that_is_killed_is_named() -> None:
    with pytest.raises(ToolError, match="killed by signal 40"):
        ran("import signal; signal.raise_signal(40)")
    with pytest.raises(ToolError, match="killed by SIGKILL"):
        ran("import signal; signal.raise_signal(9)")
    with pytest.raises(ToolError, match="killed by SIGSEGV"):
        ran("import ctypes; ctypes.string_at(0)")


def test_nothing_of_the_environment_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "token")
    assert "token" not in ran("import os; dict(os.environ)")


def test_threads_and_the_standard_library_work() -> None:
    code = "import threading, json, math, fractions\nt = threading.Thread(target=print, args=('t',))\nt.start(); t.join()\nmath.comb(5, 2)"
    assert ran(code) == "t\n10\n"


def children() -> set[str]:
    """Return the processes that this one has, those that have ended but were not waited for included."""
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


def test_many_run_at_once_and_leave_no_process() -> None:
    before = children()

    async def many() -> list[str]:
        return await asyncio.gather(*(run(f"{i} * 2", QUICK) for i in range(8)))

    assert asyncio.run(many()) == [f"{2 * i}\n" for i in range(8)]
    assert children() <= before
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


def below(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    try:
        own = {int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()}
    except OSError:
        return set()
    return own.union(*(below(child) for child in own))


def test_code_ends_with_a_caller_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", BARE, PROGRAMS / "sandbox_caller.py"]) as caller:
        end = time.monotonic() + 60
        while len(tool := below(caller.pid)) < 3 and time.monotonic() < end:  # one outside, the first and the second of its namespace
            time.sleep(0.02)
        caller.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in tool) and time.monotonic() < end:
        time.sleep(0.02)
    assert len(tool) == 3
    assert not [pid for pid in tool if Path(f"/proc/{pid}").exists()]


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(GraphError, match="seconds=0"):
        Limits(seconds=0)


def test_code_uses_what_python_has_installed() -> None:
    assert ran("import numpy, asyncio, sqlite3\nasyncio.run(asyncio.sleep(0.001, int(numpy.arange(4).sum())))") == "6\n"
    assert ran("import shutil\nopen('a', 'w').write('b'); shutil.copyfile('a', 'c'); exit(open('c').read() != 'b')") == ""


@pytest.mark.parametrize("lacks", [*LAYERS, "namespaces mounts"])
def test_a_machine_that_lacks_a_layer_is_refused_with_its_name_unless_that_is_accepted(lacks: str) -> None:
    layer, _, mounts = lacks.partition(" ")
    command = [sys.executable, "-c", BARE, PROGRAMS / "sandbox_layers.py", *lacks.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    refused, written, of_another, in_thread, *stays = done.stdout.splitlines()
    assert f"lacks the layer '{layer}'" in refused
    assert f"rg.tools.python(accept_missing=('{layer}',))" in refused
    assert ("(sysctl -w user.max_user_namespaces=15000)" in refused) == (layer == "namespaces" and not mounts)
    assert written == "'written'"
    assert "Error" in of_another  # the layers that are left keep it
    assert in_thread == "in a thread"  # what could not be entered takes nothing away
    assert stays == ["'written'", "'written'"]


def test_root_that_is_the_only_user_of_its_container_has_the_sandbox_too(tmp_path: Path) -> None:
    script = tmp_path / "checks.py"
    script.write_text("from rlgraph.nodes.sandbox import Limits, check\ncheck(Limits())\n")
    done = subprocess.run(["unshare", "-Ur", sys.executable, "-c", BARE, script], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_the_sandbox_is_checked_where_an_event_loop_runs_as_in_a_notebook() -> None:
    async def cell() -> None:
        check(QUICK)

    asyncio.run(cell())


def test_a_system_without_room_for_a_process_is_named_and_a_sandbox_keeps_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    with pytest.raises(GraphError, match=r"the tool 'python' cannot be run here: .*temporarily unavailable"):
        check(QUICK)
    monkeypatch.setattr(session.os, "fork", full)
    status, said = session._run(RUN, b"", 1.0, 100, lambda: None)
    assert (status > 0, b"no process can be started" in said) == (True, True)


def test_a_layer_that_there_is_not_cannot_be_accepted_to_be_missing() -> None:
    with pytest.raises(GraphError, match="accept_missing"):
        rg.tools.python(accept_missing=("namespace",))
    assert rg.tools.python(accept_missing=("namespaces",)).accept_missing == ("namespaces",)


def test_the_tool_keeps_files_and_nothing_else_for_a_conversation() -> None:
    with pytest.raises(GraphError, match="keep_files=True"):
        rg.tools.Python(keeps=dict)  # type: ignore[arg-type]
