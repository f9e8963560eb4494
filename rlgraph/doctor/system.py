"""The operating system: shared memory, temporary folder, limits, the sandbox of tools, Ray's port."""

import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlgraph.analysis import words
from rlgraph.doctor.check import Check, State
from rlgraph.errors import GraphError
from rlgraph.nodes import sandbox

SHM = Path("/dev/shm")
SHM_LEAST, SHM_ENOUGH = 128 << 20, 2 << 30  # Ray's object store takes 100 MiB; NCCL and engines over several GPUs take more
TEMPORARY_LEAST, TEMPORARY_ENOUGH = 1 << 30, 5 << 30
PATH_MOST = 40  # characters of the temporary folder: a Unix socket's path has 107, and Ray's own part of it is long
FILES_LEAST, FILES_ENOUGH = 1024, 8192  # Ray and a worker open some hundred each
PROCESSES_ENOUGH = 4096  # threads count
RAY_PORT = 6379


def system_checks() -> Iterator[Check]:
    """Check what the operating system gives."""
    linux = sys.platform == "linux"
    yield Check("system", "ok" if linux else "problem", sys.platform, "" if linux else "run it on Linux")
    yield space_check(str(SHM), shutil.disk_usage(SHM).free if SHM.is_dir() else 0, SHM_LEAST, SHM_ENOUGH, "docker run --shm-size=8g")
    yield from temporary_checks(tempfile.gettempdir())
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield limit_check("open files", files, FILES_LEAST, FILES_ENOUGH, f"ulimit -n {min(65536, most) if most >= 0 else 65536}")
    yield limit_check("processes", resource.getrlimit(resource.RLIMIT_NPROC)[0], 256, PROCESSES_ENOUGH, "ulimit -u 65536")
    yield from (layer_check(layer) for layer in sandbox.LAYERS)
    yield port_check(RAY_PORT)


def space_check(place: str, free: int, least: int, enough: int, fix: str) -> Check:
    """Compare the free bytes of a folder with what runs take.

    >>> space_check("/dev/shm", 64 << 20, 128 << 20, 2 << 30, "docker run --shm-size=8g").state
    'problem'
    """
    state: State = "ok" if free >= enough else "warning" if free >= least else "problem"
    found = f"{words.size(free)} free" + ("" if state == "ok" else f"; {words.size(enough)} is enough")
    return Check(place, state, found, "" if state == "ok" else fix)


def temporary_checks(folder: str) -> Iterator[Check]:
    """Check the room of the folder of jobs and of Ray's sessions, and the length of its path."""
    yield space_check(folder, shutil.disk_usage(folder).free, TEMPORARY_LEAST, TEMPORARY_ENOUGH, "free it, or set TMPDIR and RAY_TMPDIR")
    if len(folder) > PATH_MOST:
        found = f"{len(folder)} characters; sockets in it need {PATH_MOST} or fewer"
        yield Check("temporary folder's path", "problem", found, "set TMPDIR to a shorter path, as /tmp")


def limit_check(name: str, soft: int, least: int, enough: int, fix: str) -> Check:
    """Compare a limit of this process with what runs take; below zero is unlimited.

    >>> limit_check("open files", 2048, 1024, 8192, "ulimit -n 65536")
    Check(name='open files', state='warning', found='at most 2048; 8192 is enough', fix='ulimit -n 65536')
    """
    state: State = "ok" if soft < 0 or soft >= enough else "warning" if soft >= least else "problem"
    found = "unlimited" if soft < 0 else f"at most {soft}" + ("" if state == "ok" else f"; {enough} is enough")
    return Check(name, state, found, "" if state == "ok" else fix)


def layer_check(layer: str) -> Check:
    """Try the sandbox of the tool `python` with this layer required and the others accepted as missing."""
    others = tuple(other for other in sandbox.LAYERS if other != layer)
    try:
        sandbox.check(sandbox.Limits(), others)
    except GraphError as error:
        fix = f"docs/security.md says what takes it away; or run without it: rg.tools.python(accept_missing=('{layer}',))"
        return Check(f"sandbox: {layer}", "warning", str(error).splitlines()[0], fix)
    return Check(f"sandbox: {layer}", "ok", "works")


def port_check(port: int) -> Check:
    """Check that Ray's port is free. Only plans of several hosts use it; a plan of one host starts a Ray of its own."""
    address = os.environ.get("RAY_ADDRESS")
    said = f"; RAY_ADDRESS={address} counts for plans of several hosts alone" if address else ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            fix = "if it is not your `ray start`, start Ray elsewhere: ray start --head --port=6380"
            return Check("Ray's port", "warning", f"{port} is taken ({error.strerror}){said}", fix)
    return Check("Ray's port", "ok", f"{port} is free{said}")
