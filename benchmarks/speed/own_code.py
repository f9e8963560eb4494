"""Code of our own beside the library that does the same: stacks of stuck workers, and the handshake of two processes.

    python benchmarks/speed/own_code.py [--json PATH] [--py-spy PROGRAM]

Stacks: `rlgraph/runtime/worker/activity.py`, which is `faulthandler` with a pipe for each worker, and `py-spy dump` look at four workers at
a time, which sleep, hold the interpreter's lock in C code, or are stopped. Told are the seconds for all four and how many dumps name the
function that is stuck. `py-spy` asks once more as a user who may not trace the workers, as Yama and containers refuse it to their own
user. The handshake: `channels/host/connection.py` and `multiprocessing.connection` connect a hundred times, then meet a peer that is
silent, one that stops within a frame, one that sends a pickle, and a listener that does not know the key and passes on to one caller
what another answers.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import pickle
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

from rlgraph.channels.host.connection import Connection as AuthenticatedConnection
from rlgraph.channels.host.connection import set_deadline
from rlgraph.runtime.worker.activity import offer_stacks, read_stacks

KEY, CONNECTS, WORKERS, NOBODY = b"key", 100, 4, 65534
ROUNDS, TURNS = 5, 41
PATIENCE_S = 0.5
CHALLENGE = b"#CHALLENGE#"  # before each challenge of multiprocessing
Shake = Callable[[socket.socket, bytes, bool], object]


def sleeps_in_a_call() -> None:
    time.sleep(600)


def holds_the_lock_in_c_code() -> None:
    reading, _ = os.pipe()
    ctypes.PyDLL(None).read(reading, ctypes.create_string_buffer(1), 1)  # unlike CDLL it keeps the interpreter's lock


def stuck(folder: str, worker: str, where: str, started: Any, user: int) -> None:
    if user:
        os.setuid(user)
    offer_stacks(folder, worker)
    started.release()
    {"sleeps": sleeps_in_a_call, "holds the lock": holds_the_lock_in_c_code, "stopped": sleeps_in_a_call}[where]()


def measure_stacks(where: str, program: str | None, user: int = 0) -> list[dict[str, Any]]:
    """Dump four workers in one state, by each of the two; `user` is who asks, where it is not the workers' own."""
    context = multiprocessing.get_context("fork")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as folder:
        started = context.Semaphore(0)
        workers = [context.Process(target=stuck, args=(folder, f"w{i}", where, started, 0)) for i in range(WORKERS)]
        try:
            for worker in workers:
                worker.start()
            for _ in workers:
                started.acquire()
            time.sleep(0.2)  # the function is entered
            pids = {f"w{i}": worker.pid or 0 for i, worker in enumerate(workers)}
            if where == "stopped":
                for pid in pids.values():
                    os.kill(pid, signal.SIGSTOP)
            if not user:
                found.append(_told("stacks.py", where, lambda: list(read_stacks(folder, pids).values())))
            if program:
                name = "py-spy, by another user" if user else "py-spy"
                found.append(_told(name, where, lambda: [_spied(program, pid, user) for pid in pids.values()]))
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return found


def _told(by: str, where: str, dump: Callable[[], list[str]]) -> dict[str, Any]:
    seconds, dumps = [], [""]
    for _ in range(ROUNDS):
        since = time.monotonic()
        dumps = dump()
        seconds.append(time.monotonic() - since)
    name = "holds_the_lock_in_c_code" if where == "holds the lock" else "sleeps_in_a_call"
    return {
        "by": by,
        "worker": where,
        "named": sum(name in dump for dump in dumps),
        "of": len(dumps),
        "seconds": statistics.median(seconds),
        "said instead": dumps[0].partition(chr(10))[0] if name not in dumps[0] else "",
    }


def _spied(program: str, pid: int, user: int) -> str:
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=30, check=False, user=user or None
        )
    except subprocess.TimeoutExpired:
        return "(no answer in 30 s)"
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}: {' '.join(done.stderr.split())[:160]}"


def by_link(sock: socket.socket, key: bytes, server: bool) -> object:
    return AuthenticatedConnection(sock, key, PATIENCE_S, server=server)


def by_library(sock: socket.socket, key: bytes, server: bool) -> object:
    """Do what `Listener.accept` and `Client` do, over the same socket."""
    link = Connection(sock.detach())
    for step in (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge):
        step(link, key)
    return link


def by_library_with_deadline(sock: socket.socket, key: bytes, server: bool) -> object:
    set_deadline(sock, PATIENCE_S)
    return by_library(sock, key, server)


SHAKES: dict[str, Shake] = {
    "connection.py": by_link,
    "multiprocessing": by_library,
    "multiprocessing, SO_RCVTIMEO set by hand": by_library_with_deadline,
}


def connect(shake: Shake) -> float:
    """Time a hundred connections over a Unix-domain socket, the server on a thread of its own."""
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/door")
        listener.listen(CONNECTS)

        def serve() -> None:
            for _ in range(CONNECTS):
                close(shake(listener.accept()[0], KEY, True))

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        since = time.monotonic()
        for _ in range(CONNECTS):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(f"{folder}/door")
            close(shake(sock, KEY, False))
        server.join()
        return time.monotonic() - since


def close(link: Any) -> None:
    link.close()


def outcome(work: Callable[[], object]) -> str:
    """Run on a thread: the error's class, "accepted", or how long it was still blocked."""
    said: list[str] = []

    def go() -> None:
        try:
            work()
            said.append("accepted")
        except (OSError, EOFError, AuthenticationError, AssertionError) as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(4 * PATIENCE_S)
    return said[0] if said else f"blocked after {4 * PATIENCE_S:g} s"


def silent(shake: Shake) -> str:
    mine, theirs = socket.socketpair()
    with theirs:
        return outcome(lambda: shake(mine, KEY, True))


def half_a_frame(shake: Shake) -> str:
    mine, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"\0\0")
        return outcome(lambda: shake(mine, KEY, True))


class Bomb:
    """Notes that it was unpickled."""

    went_off = 0

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return went_off, ()


def went_off() -> None:
    Bomb.went_off += 1


def pickled(shake: Shake) -> str:
    """Send a pickle in place of an answer; then say whether anything ran it."""
    mine, theirs = socket.socketpair()
    data, before = pickle.dumps(Bomb()), Bomb.went_off
    with theirs:
        theirs.sendall(len(data).to_bytes(4, "big") + data + bytes(64))
        said = outcome(lambda: shake(mine, KEY, True))
    return f"{said}, {'unpickled' if Bomb.went_off > before else 'not unpickled'}"


def relayed_by_strangers(own: bool) -> str:
    """A listener without the key passes the challenge of its first caller to the second, and that one's answer back."""
    shake, ends = SHAKES["connection.py" if own else "multiprocessing"], [socket.socketpair() for _ in range(2)]
    first, second = (theirs for _, theirs in ends)
    said: list[str] = []
    caller = threading.Thread(target=lambda: said.append(outcome(lambda: shake(ends[0][0], KEY, False))), daemon=True)
    other = threading.Thread(target=lambda: outcome(lambda: shake(ends[1][0], KEY, False)), daemon=True)
    caller.start()
    other.start()
    for end in (first, second):
        set_deadline(end, 4 * PATIENCE_S)
    if own:
        challenge = first.recv(32)
        first.sendall(bytes(32))
        first.recv(32)
        second.recv(32)
        second.sendall(challenge)
        first.sendall(second.recv(32))
    else:
        there, back = Connection(os.dup(first.fileno())), Connection(os.dup(second.fileno()))
        there.send_bytes(CHALLENGE + bytes(20))
        there.recv_bytes()
        there.send_bytes(b"#WELCOME#")
        back.send_bytes(there.recv_bytes())
        there.send_bytes(back.recv_bytes())
    caller.join(8 * PATIENCE_S)
    return f"the caller: {said[0]}"


def handles() -> dict[str, bool]:
    """Whether each passes a file's handle to the other side."""
    mine, theirs = AuthenticatedConnection.pair("peer", "")
    with tempfile.TemporaryFile() as file:
        mine.send_handle(file.fileno())
        got = theirs.receive_handle()
        own = os.path.samestat(os.fstat(file.fileno()), os.fstat(got))
        os.close(got)
        left, right = (Connection(sock.detach()) for sock in socket.socketpair())
        send_handle(left, file.fileno(), os.getpid())
        got = recv_handle(right)
        library = os.path.samestat(os.fstat(file.fileno()), os.fstat(got))
        os.close(got)
    return {"connection.py": own, "multiprocessing": library}


def measure_handshakes() -> list[dict[str, Any]]:
    passes = handles()
    seconds: dict[str, list[float]] = {name: [] for name in SHAKES}
    for _ in range(TURNS):
        for name, shake in SHAKES.items():  # in turns, so that other work of the machine slows all of them
            seconds[name].append(connect(shake))
    return [
        {
            "by": name,
            "100 connects, seconds": {"median": statistics.median(seconds[name]), "least": min(seconds[name])},
            "a silent peer": silent(shake),
            "a peer that stops within a frame": half_a_frame(shake),
            "a pickle": pickled(shake),
            "a listener without the key that relays": relayed_by_strangers(name == "connection.py"),
            "passes handles": passes[name.partition(",")[0]],
        }
        for name, shake in SHAKES.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--py-spy", default=shutil.which("py-spy"), help="the program; the default is the one on the path, if any")
    options = parser.parse_args()
    program = options.py_spy
    stacks = [told for where in ("sleeps", "holds the lock", "stopped") for told in measure_stacks(where, program)]
    if program and os.getuid() == 0:
        stacks += measure_stacks("sleeps", program, NOBODY)
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip() if program else None
    figures = {
        "machine": {
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "py-spy": version,
            "yama ptrace_scope": yama.read_text().strip() if yama.exists() else None,
            "load": os.getloadavg()[0],
        },
        "stacks": stacks,
        "handshakes": measure_handshakes(),
    }
    text = json.dumps(figures, indent=1) + "\n"
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
