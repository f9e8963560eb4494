"""A process that imports what workers need, and forks one whenever the driver asks: `python -m rlgraph.runtime.worker.template FD PREPARE`.

Itself it runs nothing but imports, so a worker that is forked from it begins as one that imported the same. FD is a socket: a message on it
asks for a worker. The template ends when the driver closes its end, or dies; the kernel then ends the workers, whatever they do.
"""

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import msgspec

NODES = (
    "ray.cloudpickle",
    "rlgraph.api",
    "rlgraph.nodes.rollout.rollout",
    "rlgraph.nodes.rewards.reward",
    "rlgraph.nodes.training.advantages",
    "rlgraph.nodes.training.critic",
    "rlgraph.nodes.training.policy",
    "rlgraph.runtime.worker.process",
)
FDS = 4  # of a message: where the worker writes its output and its errors, its order, and where its process id goes
PID_BYTES = 8
PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
GPU = "/dev/nvidia"


class ForkOrder(msgspec.Struct, frozen=True):
    """What a worker is started with. `spec` is pickled: what it names is found once `path` is."""

    folder: str
    path: tuple[str, ...]
    spec: bytes
    driver: str


def main() -> None:
    """Import, then fork workers until the driver is gone."""
    asked, prepare = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    imported(prepare)
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes away what ended
    opened = [name for name in open_files() if name.startswith(GPU)]
    if opened:
        sys.exit(f"the imports of '{prepare}' opened {opened[0]}, and a GPU does not live through a fork: launch outside of rg.warm()")
    while True:
        message, fds, _, _ = socket.recv_fds(asked, 1, FDS)
        if not message:
            return
        template = os.getpid()
        pid = os.fork()
        if not pid:
            asked.close()
            libc.prctl(PDEATHSIG, signal.SIGKILL)
            if os.getppid() == template:  # else it has ended before
                be(fds)
            os._exit(1)
        with contextlib.suppress(OSError):  # nobody wants to know any more
            os.write(fds[-1], pid.to_bytes(PID_BYTES, "little"))
        for fd in fds:
            os.close(fd)


def imported(prepare: str) -> None:
    """Import what workers need; what cannot be imported is left for the worker that needs it, whose error says what is missing."""
    module, function = prepare.split(":")
    gc.disable()  # a sixth of the time of the imports
    for load in (lambda: vars(import_module(module))[function](), *(lambda name=name: import_module(name) for name in NODES)):
        try:
            load()
        except Exception:  # noqa: BLE001 (whatever a library raises)
            traceback.print_exc()
    gc.enable()
    gc.freeze()


def open_files() -> Sequence[str]:
    """Name the files that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the one of this listing
            continue
    return found


def be(fds: Sequence[int]) -> None:
    """Be a worker until the driver says stop, in a process that was forked for it."""
    try:
        output, errors, given, reply = fds
        os.dup2(output, 1)
        os.dup2(errors, 2)
        with open(given, "rb") as file:
            order = msgspec.msgpack.decode(file.read(), type=ForkOrder)
        for fd in (output, errors, reply):
            os.close(fd)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # as in a process of its own; Python's own generator does so by itself
        os.chdir(order.folder)
        sys.path[:] = order.path
        from rlgraph.runtime.worker.process import serve

        serve(pickle.loads(order.spec), order.driver)  # of its own program, which Ray would have sent it
    except BaseException:  # noqa: BLE001 (the outer edge of a process)
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
