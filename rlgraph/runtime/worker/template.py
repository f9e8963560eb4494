"""A process that imports what workers need, and forks one whenever the driver asks: `python -m rlgraph.runtime.worker.template FD PREPARE`.

It only imports, so a worker that is forked from it is in the same state as one that did these imports itself. FD is a socket: a message on
it asks for a worker. The template ends when the driver closes its end, or dies; the kernel then ends the workers, whatever they do.

With `alone` after PREPARE nothing is forked: the process itself becomes the requested worker, and its imports may open a GPU.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module

from rlgraph.runtime.messages import PID_BYTES, receive_order

NODES = (
    "rlgraph.api",
    "rlgraph.nodes.rollout.rollout",
    "rlgraph.nodes.rewards.reward",
    "rlgraph.nodes.training.advantages",
    "rlgraph.nodes.training.critic",
    "rlgraph.nodes.training.policy",
    "rlgraph.runtime.driver.sendable",  # with cloudpickle, which pickles orders
    "rlgraph.runtime.worker.warm_worker",
)
PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends
GPU = "/dev/nvidia"


def main() -> None:
    """Import, then fork workers until the driver ends; or become a worker."""
    asked, prepare, alone = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3:] == ["alone"]
    if alone:
        threading.Thread(target=end_with, args=(asked,), name="end with the driver", daemon=True).start()
    import_modules(prepare)
    if alone:
        run_orders(asked)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended workers
    warnings.filterwarnings("ignore", ".* multi-threaded", DeprecationWarning)  # NumPy has threads, which forks do not copy
    opened = [name for name in open_files() if name.startswith(GPU)]
    if opened:
        sys.exit(f"the imports of '{prepare}' opened {opened[0]}, and a GPU does not live through a fork: launch outside of rg.runs.warm()")
    while files := receive_order(asked):
        template = os.getpid()
        pid = os.fork()
        if not pid:
            asked.close()
            libc.prctl(PDEATHSIG, signal.SIGKILL)
            if os.getppid() == template:  # otherwise it has already ended
                run_forked(files)
            os._exit(1)
        tell(pid, files[3])
        for fd in files:
            os.close(fd)


def tell(pid: int, to: int) -> None:
    """Tell the driver a worker's process id."""
    with contextlib.suppress(OSError):  # the driver no longer listens
        os.write(to, pid.to_bytes(PID_BYTES, "little"))


def run_forked(files: Sequence[int]) -> None:
    """Run as a worker that was forked for an order."""
    from rlgraph.runtime.worker.warm_worker import be

    os.close(files[3])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    be(files, socket.socket(fileno=files[4]) if files[4:] else None)


def run_orders(asked: socket.socket) -> None:
    """Run as the worker of the first order, and of later ones."""
    from rlgraph.runtime.worker.warm_worker import be

    files = receive_order(asked)
    if files:
        tell(os.getpid(), files[3])
        os.close(files[3])
        be(files, asked)


def end_with(asked: socket.socket) -> None:
    """End this process when the driver closes its end of the socket, or dies, whatever the other threads do."""
    poll = select.poll()
    poll.register(asked, 0)  # a hang-up is always reported
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def import_modules(prepare: str) -> None:
    """Import the modules that workers need. A failed import is left to the worker that needs it, whose error names the module."""
    module, function = prepare.split(":")
    gc.disable()  # saves a sixth of the import time
    for load in (lambda: vars(import_module(module))[function](), *(lambda name=name: import_module(name) for name in NODES)):
        try:
            load()
        except Exception:  # noqa: BLE001 (a library may raise anything)
            traceback.print_exc()
    gc.enable()
    gc.freeze()


def open_files() -> Sequence[str]:
    """List the files that this process has open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the handle of this listing
            continue
    return found


if __name__ == "__main__":
    main()
