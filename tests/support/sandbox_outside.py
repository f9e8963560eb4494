"""What code in the sandbox must not touch, and a look at all of it from outside."""

import asyncio
import contextlib
import ctypes
import functools
import os
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlgraph.nodes import sandbox

NOBODY = 65534
PYTHON = "/usr/bin/python3"  # which another user may run, where that of the tests lies in a home
FENCE = ("/usr/bin/prlimit", "--as=4294967296", "--fsize=268435456", "--nofile=2048", "--cpu=60", "--")  # if nothing else holds
libc = ctypes.CDLL(None, use_errno=True)


def users() -> list[str]:
    """Who the code runs as: whoever runs the tests, and nobody where that is root."""
    version = [PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    others = os.getuid() == 0 and os.path.exists(PYTHON) and subprocess.run(version).returncode == 0
    return ["self", "nobody"] if others else ["self"]


@contextlib.contextmanager
def running_as(user: str) -> Iterator[dict[str, Any]]:
    """Have the tool's processes run as this user, and within limits of the tests; gives what `subprocess` needs to do so."""
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if user == "nobody" else {}
    start, command, paths = asyncio.create_subprocess_exec, sandbox._command, sandbox._paths
    python = sandbox.sys.executable

    def fenced(*arguments: Any) -> Any:
        return (*FENCE, *command(*arguments)) if os.path.exists(FENCE[0]) else command(*arguments)

    try:
        asyncio.create_subprocess_exec = functools.partial(start, **who)  # type: ignore[assignment]
        sandbox._command = fenced
        if user == "nobody":
            sandbox.sys.executable = PYTHON
            sandbox._paths = lambda: ([], [path for path in sandbox.LIBRARIES if os.path.exists(path)])  # type: ignore[assignment]
        yield who
    finally:
        asyncio.create_subprocess_exec, sandbox._command, sandbox._paths = start, command, paths  # type: ignore[assignment]
        sandbox.sys.executable = python


class World:
    """Files, a process, sockets and shared memory of the user, which no code of the tool may read or change."""

    def __init__(self, user: str, who: dict[str, Any]) -> None:
        self.name = f"rlgraph-outside-{secrets.token_hex(6)}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        self.mine = self.folder / "mine"
        self.mine.mkdir()
        for name, mode in (("secret", 0o600), ("public", 0o666), ("own", 0o600)):
            (self.folder / name).write_text(f"the content of {name}")
            (self.folder / name).chmod(mode)
        if who:
            for path in (self.folder / "own", self.folder / "secret", self.mine):
                os.chown(path, NOBODY, NOBODY)
        self.folder.chmod(0o777)
        self.victim = subprocess.Popen(["sleep", "600"], start_new_session=True, **who)
        self.tcp, self.udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.tcp.bind(("127.0.0.1", 0))
        self.udp.bind(self.tcp.getsockname())
        self.path, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.path.bind(str(self.folder / "listening"))
        (self.folder / "listening").chmod(0o777)
        self.abstract.bind(f"\0{self.name}")
        for listener in (self.tcp, self.path, self.abstract):
            listener.listen()
            listener.setblocking(False)
        self.udp.setblocking(False)
        self.segment = libc.shmget(0, 4096, 0o1666)
        self.shared = Path("/dev/shm") / self.name
        self.shared.write_text("shared")
        self.shared.chmod(0o666)

    @property
    def names(self) -> str:
        """The code's first lines, which say where all of it is."""
        values = {
            "folder": str(self.folder),
            "mine": str(self.mine),
            **{name: str(self.folder / name) for name in ("secret", "public", "own", "listening")},
            "victim": self.victim.pid,
            "port": self.tcp.getsockname()[1],
            "abstract": self.name,
            "segment": self.segment,
            "shared": self.name,
        }
        return "".join(f"{name} = {value!r}\n" for name, value in values.items())

    def state(self) -> dict[str, Any]:
        """All that would show that something was read, changed, reached or made."""
        pid, files = self.victim.pid, sorted(self.folder.rglob("*"))
        alive = self.victim.poll() is None
        with open(os.__file__, "rb") as file:
            library = os.fstat(file.fileno())
        return {
            "files": [(str(f), *_about(f)) for f in files if self.mine not in f.parents and f != self.mine],
            "library": (library.st_mode, library.st_mtime_ns, library.st_size, sorted(os.listdir(os.path.dirname(os.__file__)))),
            "victim": (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)) if alive else None,
            "its limits": Path(f"/proc/{pid}/limits").read_text() if alive else None,
            "its disk": libc.syscall(31 if os.uname().machine == "aarch64" else 252, 1, pid) if alive else None,
            "heard": [_heard(s) for s in (self.tcp, self.path, self.abstract, self.udp)],
            "segment": libc.shmctl(self.segment, 2, ctypes.create_string_buffer(256)),
            "shared": self.shared.read_text(),
            "this process": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_NOFILE)),
            "machine": socket.gethostname(),
            "mounts": Path("/proc/self/mountinfo").read_text(),
        }

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for listener in (self.tcp, self.udp, self.path, self.abstract):
            listener.close()
        libc.shmctl(self.segment, 0, 0)
        self.shared.unlink(missing_ok=True)
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def world(user: str) -> Iterator[World]:
    with running_as(user) as who:
        made = World(user, who)
        try:
            yield made
        finally:
            made.close()


def run_without_sandbox(code: str, world: World) -> str:
    """What the code prints where nothing holds it."""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=world.mine, capture_output=True, text=True, timeout=250)
    return done.stdout + done.stderr


def _about(path: Path) -> tuple[Any, ...]:
    found = path.lstat()
    content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
    attributes = [] if path.is_symlink() else os.listxattr(path)
    return found.st_mode, found.st_uid, found.st_nlink, found.st_mtime_ns, content, attributes


def _heard(listener: socket.socket) -> bool:
    try:
        if listener.type == socket.SOCK_DGRAM:
            listener.recv(1)
        else:
            listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True
