"""Sandboxes that stay: one of this machine, and one over HTTP on a real server. Files stay between runs, whatever a run does."""

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scripted_conversations import Rolled, wait_until
from support.templates import model_with

import rlgraph as rg
from rlgraph.errors import GraphError
from rlgraph.nodes.sandbox import Limits

pytestmark = pytest.mark.sandbox

QUICK = Limits(seconds=20, memory_bytes=512 << 20, output_bytes=2000, file_bytes=1 << 20)
EXAMPLE = Path(__file__).parents[2] / "recipes" / "tasks" / "http_sandbox.py"
LISTED = "import os; sorted(os.listdir('.'))"
Make = Callable[[], rg.agents.Sandbox]


def using(make: Make, work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        sandbox = make()
        try:
            return await work(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(run())


@pytest.fixture(scope="module", params=["local", "http"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    if request.param == "local":
        yield lambda: rg.agents.LocalSandbox(QUICK)
        return
    spec = importlib.util.spec_from_file_location("http_sandbox", EXAMPLE)
    example: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(example)  # type: ignore[union-attr]
    server = subprocess.Popen([sys.executable, str(EXAMPLE)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url, key = server.stdout.readline().split()
    yield lambda: example.HttpSandbox(url, key)
    with pytest.raises(rg.agents.ToolError, match="the key is wrong"):
        asyncio.run(example.HttpSandbox(url, "other").exec("1"))
    server.terminate()
    server.wait(20)
    server.stdout.close()
    with pytest.raises(rg.agents.ToolError, match="does not answer"):
        asyncio.run(example.HttpSandbox(url, key).exec("1"))


def test_files_stay_between_runs_and_variables_do_not(make: Make) -> None:
    async def work(sandbox: rg.agents.Sandbox) -> None:
        await sandbox.write("data/numbers.txt", b"1 2 3")
        first = await sandbox.exec("x = sum(map(int, open('data/numbers.txt').read().split()))\nopen('sum', 'w').write(str(x))\nx")
        assert first == rg.agents.Executed("6\n")
        assert await sandbox.read("sum") == b"6"
        assert (await sandbox.exec("x")).output == "NameError: name 'x' is not defined\n"
        await sandbox.write("bytes", bytes(range(256)) * 1000)
        assert await sandbox.read("bytes") == bytes(range(256)) * 1000

    using(make, work)


def test_what_cannot_be_read_or_written_is_said_and_two_sandboxes_share_nothing(make: Make) -> None:
    async def work(sandbox: rg.agents.Sandbox) -> None:
        await sandbox.exec("import os; os.symlink('/etc/passwd', 'link'); os.symlink('/', 'root')")
        for path in ("missing", "link", "root/etc/passwd", "/etc/passwd", "../etc/passwd"):
            with pytest.raises(rg.agents.ToolError):
                await sandbox.read(path)
        for path in ("link", "root/x", "/x", "/usr/lib/x"):
            with pytest.raises(rg.agents.ToolError):
                await sandbox.write(path, b"x")
        for path in ("", "a\0b"):
            with pytest.raises(rg.agents.ToolError):
                await sandbox.read(path)
        other = make()
        assert await other.exec(LISTED) == fresh
        await other.close()

    async def listed(sandbox: rg.agents.Sandbox) -> rg.agents.Executed:
        return await sandbox.exec(LISTED)

    fresh = using(make, listed)  # empty, but for the folder of a Python that lies below /tmp
    assert not fresh.failed
    using(make, work)


def test_a_run_that_fills_the_memory_says_so_in_a_word() -> None:
    fill = "x = []\nwhile True: x.append(bytearray(1 << 20))"

    async def work(sandbox: rg.agents.Sandbox) -> None:
        for code in (fill, "def f():\n    " + fill.replace("\n", "\n    ") + "\nf()"):
            assert await sandbox.exec(code) == rg.agents.Executed("MemoryError\n")

    using(lambda: rg.agents.LocalSandbox(QUICK), work)


STOPPED = {
    "loops": "while True: pass",
    "sleeps": "import time; time.sleep(10 ** 6)",
    "closes its output": "import os\nos.close(1); os.close(2)\nimport time; time.sleep(10 ** 6)",
    "leaves a thread": "import threading, time; threading.Thread(target=time.sleep, args=(10 ** 6,)).start()",
}
KILLED = {
    "prints without end": ("while True: print('y' * 100)", "more than 2000 bytes"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "fills its folder": ("for i in range(96): open(f'f{i}', 'wb').write(bytes(1 << 20))", ""),
    "answers for the holder": ("import os\nfor h in range(64):\n    try: os.write(h, b'\\x00' * 64)\n    except OSError: pass", ""),
    "reads what the holder reads": ("import os; os.read(0, 9)", ""),
}


def test_a_run_that_is_killed_costs_its_own_work_alone() -> None:
    async def work(sandbox: rg.agents.Sandbox) -> None:
        await sandbox.write("kept", b"it stays")
        for name, (code, failed) in KILLED.items():
            done = await sandbox.exec(code)
            assert failed in done.failed, (name, done)
            assert bool(failed) == bool(done.failed), (name, done)
            assert len(done.output) <= 2000, name
            assert await sandbox.read("kept") == b"it stays", name
            assert (await sandbox.exec("40 + 2")).output == "42\n", name

    using(lambda: rg.agents.LocalSandbox(QUICK), work)


def test_a_run_that_never_ends_is_stopped_and_its_sandbox_stays() -> None:
    limits = Limits(seconds=3, memory_bytes=512 << 20, output_bytes=2000, file_bytes=1 << 20)

    async def stopped(name: str) -> None:
        sandbox = rg.agents.LocalSandbox(limits)
        try:
            await sandbox.write("kept", b"it stays")
            assert "more than 3 s" in (await sandbox.exec(STOPPED[name])).failed, name
            assert await sandbox.read("kept") == b"it stays", name
            assert (await sandbox.exec("40 + 2")).output == "42\n", name
        finally:
            await sandbox.close()

    async def together() -> None:
        await asyncio.gather(*map(stopped, STOPPED))

    asyncio.run(together())


def test_a_run_inherits_nothing_but_its_output() -> None:
    code = "import os\nfound = []\nfor h in range(1024):\n    try: os.fstat(h); found.append(h)\n    except OSError: pass\nfound"
    found = using(lambda: rg.agents.LocalSandbox(QUICK), lambda sandbox: sandbox.exec(code))
    assert found.output == "[0, 1, 2]\n"


def test_code_imports_the_packages_that_are_given(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text("answer = 42")
    tmp_path.chmod(0o755)
    given = rg.agents.LocalSandbox(QUICK, packages=(str(tmp_path),))
    assert using(lambda: given, lambda sandbox: sandbox.exec("import answers; answers.answer")).output == "42\n"
    assert "ModuleNotFoundError" in using(lambda: rg.agents.LocalSandbox(QUICK), lambda sandbox: sandbox.exec("import answers")).output


def holders(mark: str) -> int:
    found = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found += mark in Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
    return found


def test_a_sandbox_ends_when_it_is_closed_and_with_the_process_that_made_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    made = rg.agents.LocalSandbox(QUICK, packages=(str(tmp_path),))

    async def work(sandbox: rg.agents.Sandbox) -> int:
        await sandbox.exec("1")
        return holders(str(tmp_path))

    assert using(lambda: made, work) >= 1
    wait_until(lambda: holders(str(tmp_path)) == 0)
    with pytest.raises(rg.agents.ToolError, match="the sandbox is closed"):
        asyncio.run(made.exec("1"))
    code = (
        "import asyncio, sys, rlgraph as rg\nasync def main():\n    await rg.agents.LocalSandbox(packages=(sys.argv[1],)).exec('1')\n"
        "    print('up', flush=True)\n    await asyncio.sleep(300)\nasyncio.run(main())"
    )
    worker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert worker.stdout.readline() == b"up\n"
    worker.kill()
    worker.wait()
    worker.stdout.close()
    wait_until(lambda: holders(str(tmp_path)) == 0)


def test_a_wrong_sandbox_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="name layers that this machine may lack"):
        rg.agents.LocalSandbox(accept_missing=("walls",))
    for path, message in ((tmp_path / "missing", "is not a folder"), (tmp_path, "that everyone may read")):
        tmp_path.chmod(0o700)
        with pytest.raises(GraphError, match=message):
            rg.agents.LocalSandbox(packages=(str(path),))
    done = using(lambda: rg.agents.LocalSandbox(QUICK, accept_missing=("namespaces",)), lambda sandbox: sandbox.exec("6 * 7"))
    assert done.output == "42\n"


def test_calls_of_the_python_tool_share_files_within_a_conversation(tmp_path: Path) -> None:
    folder = model_with(tmp_path / "qwen2_5", "qwen2_5")
    call = '<tool_call>{"name": "python", "arguments": {"code": "%s"}}</tool_call>'
    code = "import os; open('n', 'a').write('x'); print('size', os.path.getsize('n'))"

    def script(text: str) -> str:
        return "done" if text.count("<tool_response>") >= 2 else call % code

    tools = rg.Tools([rg.tools.python(keep_files=True)], pool=rg.Pool("tools", cpus=2))
    rolled = Rolled(folder, script, [{"prompt": "a"}, {"prompt": "b"}], tools=tools, max_tokens=900)
    for row in range(2):
        assert ["size 1" in rolled.read(row)[0], "size 2" in rolled.read(row)[1]] == [True, True], rolled.read(row)
