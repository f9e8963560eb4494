"""Whatever a model's code tries, nothing outside of its sandbox is read, changed, reached or slowed down."""

import asyncio
import os
import platform
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.sandbox_escapes import OUTSIDE, PRELUDE, WITHIN
from support.sandbox_outside import World, run_without_sandbox, users, world

from rlgraph.nodes.sandbox import Executed, Limits, LocalSandbox, ToolError, run

pytestmark = [pytest.mark.stage("exhaustive"), pytest.mark.sandbox]

LIMITS = Limits(seconds=20, memory_bytes=512 << 20, output_bytes=4000, file_bytes=4 << 20)
SHORT = Limits(seconds=1, memory_bytes=512 << 20, output_bytes=4000, file_bytes=4 << 20)
MARK = "=== "
SESSION = False
EACH = """
for name, code in {0!r}.items():
    print('=== ' + name, flush=True)
    os.chdir(mine)
    try:
        exec(code, globals().copy())
    except BaseException as error:
        print(type(error).__name__ + ': ' + str(error))
"""
WRONG = ("NameError", "SyntaxError", "ImportError", "AttributeError", "TypeError", "struct.error", "ctypes.ArgumentError")


@pytest.fixture(scope="module", params=[*users(), *(f"{user} in a session" for user in users())])
def outside(request: pytest.FixtureRequest) -> Iterator[World]:
    """The world outside, and how the code runs: once, or in a sandbox that stays."""
    user, _, session = request.param.partition(" in a ")
    with world(user) as made, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "SESSION", bool(session))
        yield made


def batched(names: Iterable[str], size: int) -> list[list[str]]:
    rest = list(names)
    return [rest[at : at + size] for at in range(0, len(rest), size)]


async def in_session(code: str, limits: Limits) -> str:
    """Run code in a sandbox that has run some before and is used afterwards."""
    sandbox = LocalSandbox(limits)
    try:
        await sandbox.write("before", b"it was here")
        done = await sandbox.exec(code)
        if await sandbox.read("before") != b"it was here":
            done = Executed("ESCAPED into the next run")
    finally:
        await sandbox.close()
    return f"ToolError: {done.output}{done.failed}" if done.failed else done.output


def tried(code: str, limits: Limits = LIMITS) -> str:
    try:
        return asyncio.run(in_session(code, limits) if SESSION else run(code, limits))
    except ToolError as error:
        return f"ToolError: {error}"


@pytest.fixture(scope="module")
def said(outside: World) -> dict[str, str]:
    """What each attempt said; several are made in one run, after which nothing outside has changed."""
    found: dict[str, str] = {}
    attempts = {**OUTSIDE, **WITHIN}
    os.environ["SECRET"] = "of the parent"
    for names in batched(attempts, 8):
        before = outside.state()
        code = EACH.format({name: attempts[name] for name in names})
        said = tried(PRELUDE + outside.names.replace(str(outside.mine), "/tmp") + code)
        found |= dict(part.split("\n", 1) for part in said.split(MARK)[1:])
        changed = [what for what, value in outside.state().items() if value != before[what]]
        assert not changed, f"one of {names} changed {changed}"
    del os.environ["SECRET"]
    return found


@pytest.mark.parametrize("attempt", [*OUTSIDE, *WITHIN])
def test_an_attempt_fails(attempt: str, said: dict[str, str]) -> None:
    assert "ESCAPED" not in said[attempt]
    assert "rror: " in said[attempt]  # it was tried, and refused
    assert not any(mistake in said[attempt] for mistake in WRONG), said[attempt]


def test_nothing_but_its_output_is_inherited(outside: World) -> None:
    code = "import os\nfound = []\nfor h in range(1024):\n    try: os.fstat(h); found.append(h)\n    except OSError: pass\nfound"
    assert tried(code) == "[0, 1, 2]\n"
    assert tried("import os\nos.readlink('/proc/self/fd/0') if os.path.exists('/proc') else os.read(0, 1)") == "b''\n"


@pytest.mark.parametrize("attempt", OUTSIDE)
def test_the_attempt_would_be_noticed_without_a_sandbox(attempt: str) -> None:
    with world("self") as own:
        before = own.state()
        said = run_without_sandbox(PRELUDE + own.names + OUTSIDE[attempt], own)
        end = time.monotonic() + 60  # for a process that was signalled to end
        while not (noticed := "ESCAPED" in said or own.state() != before) and time.monotonic() < end:
            time.sleep(0.01)
        assert noticed, said


BOMBS = {
    "forks": ("import os\nfor _ in range(100):\n    if not os.fork(): os._exit(0)", "PermissionError"),
    "threads": (
        "import threading, time\nthreading.stack_size(32768)\nn = 0\ntry:\n    while n < 2000:\n"
        "        threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nimport os\nprint(n < 200, flush=True); os._exit(0)",
        "True",
    ),
    "memory": ("x = []\nwhile len(x) < 2000: x.append(bytearray(1 << 20))", "MemoryError"),
    "shared memory": ("import mmap\nx = [mmap.mmap(-1, 1 << 20) for _ in range(2000)]", "Cannot allocate memory"),
    "memory without a file": ("import os\nx = os.memfd_create('m'); os.ftruncate(x, 1 << 30)", "PermissionError"),
    "files": ("for i in range(96): open(f'f{i}', 'wb').write(bytes(1 << 20))", "No space left on device"),
    "empty files": ("for i in range(10 ** 5): open(f'f{i}', 'x')", "No space left on device"),
    "folders": ("import os\nfor i in range(10 ** 5): os.mkdir(f'f{i}')", "No space left on device"),
    "a sparse file": ("import os\nos.truncate(os.open('f', os.O_CREAT | os.O_RDWR) and 'f', 1 << 40)", "File too large"),
    "descriptors": ("import os\nx = [os.open('/dev/null', os.O_RDONLY) for _ in range(1000)]", "Too many open files"),
    "pipes": (
        "import os\nn = 0\ntry:\n    while n < 1 << 30:\n        r, w = os.pipe(); os.set_blocking(w, False)\n"
        "        while True:\n            try: n += os.write(w, bytes(65536))\n            except BlockingIOError: break\n"
        "except OSError: pass\nn < 64 << 16",
        "True",
    ),
    "pairs of sockets": (
        "import socket\nn, x = 0, []\ntry:\n    while n < 1 << 30:\n        a, b = socket.socketpair(); x += [a, b]; a.setblocking(False)\n"
        "        while True:\n            try: n += a.send(bytes(4096))\n            except BlockingIOError: break\n"
        "except OSError: pass\nn < 64 << 20",
        "True",
    ),
    "output": ("while True: print('y' * 1000)", "printed more than 4000 bytes"),
    "output of errors": ("import os\nwhile True: os.write(2, bytes(1000))", "printed more than 4000 bytes"),
    "output of threads": (
        "import threading, os\nfor _ in range(8): threading.Thread(target=lambda: [os.write(1, b'y' * 99) for _ in range(10**6)]).start()",
        "printed more than 4000 bytes",
    ),
}
STOPPED = {
    "a loop": "while True: pass",
    "a sleep": "import time; time.sleep(10 ** 6)",
    "a loop that hears no signal": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    ),
    "a loop without an output": "import os\nos.close(0); os.close(1); os.close(2)\nwhile True: pass",
    "a thread that stays": "import threading, time; threading.Thread(target=time.sleep, args=(10 ** 6,)).start()",
    "a wait for itself": "import signal; signal.sigwait([signal.SIGUSR1])",
    "a read of nothing": "import os\nr, w = os.pipe(); os.read(r, 1)",
    "frames without end": (
        "import sys\nsys.setrecursionlimit(10 ** 8)\ndef f(): return f()\nwhile True:\n    try: f()\n    except BaseException: pass"
    ),
    "a slow number": "9 ** 9 ** 9",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_meets_a_limit(bomb: str, outside: World) -> None:
    code, refusal = BOMBS[bomb]
    assert refusal in tried(code)
    assert outside.victim.poll() is None


def test_what_never_ends_is_stopped_and_leaves_no_process(outside: World) -> None:
    async def all_at_once() -> list[str | BaseException]:
        runs = (in_session(code, SHORT) if SESSION else run(code, SHORT) for code in STOPPED.values())
        return await asyncio.gather(*runs, return_exceptions=True)

    before = outside.state()
    for name, result in zip(STOPPED, asyncio.run(all_at_once()), strict=True):
        assert SESSION or isinstance(result, ToolError), name
        assert "more than 1 s" in str(result) or "killed by" in str(result), (name, result)
    assert outside.state() == before
    assert not [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _is_of_the_tool(pid)]


def _is_of_the_tool(pid: Path) -> bool:
    """Whether a process was started by this test as a tool."""
    try:
        environment, parent = (pid / "environ").read_bytes(), (pid / "stat").read_text().rsplit(")", 1)[1].split()[1]
    except OSError:
        return False
    return int(parent) in (1, os.getpid()) and b"OPENBLAS_NUM_THREADS=1\0" in environment and b"PATH=\0" in environment


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of another word size are x86's")
@pytest.mark.parametrize(
    "code",
    [
        "call(0x40000000 | 39)",
        "m = mmap.mmap(-1, 4096, prot=7); m.write(bytes.fromhex('b814000000cd80c3')); "
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
    ],
)
def test_calls_of_another_word_size_end_the_process(code: str) -> None:
    assert "killed by SIGSYS" in tried(PRELUDE + "import mmap\n" + code)
