"""Run a worker in a warm process: it serves its first order, and later ones with its cached engine."""

import gc
import importlib
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from rlgraph.runtime.messages import ForkOrder, receive_order, take_over
from rlgraph.runtime.worker.executor import EngineSlot
from rlgraph.runtime.worker.process import serve

OF_LIBRARIES = tuple({str(Path(prefix)) + os.sep for prefix in (sys.prefix, sys.base_prefix)})


def be(files: Sequence[int], later: socket.socket | None) -> None:
    """Run as a worker until the driver stops it, then, while an engine is cached, for each order of `later`; end this process."""
    try:
        libraries = {name.partition(".")[0] for name in sys.modules}
        order = take_over(files)
        np.random.seed()  # as in a new process; Python's generator does so by itself
        slot = EngineSlot(order.keeps and later is not None)
        work(order, slot)
        while slot.held is not None and later is not None and (files := receive_order(later)):
            order = take_over(files)
            forget_modules(libraries)
            work(order, slot)
    except BaseException:  # noqa: BLE001 (the outer edge of a process)
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def work(order: ForkOrder, slot: EngineSlot) -> None:
    """Serve one job."""
    os.chdir(order.folder)
    sys.path[:] = order.path
    serve(pickle.loads(order.spec), order.driver, slot)  # from its own program, as Ray would have sent it
    if slot.held is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.unfreeze()  # otherwise objects that the job has left would stay
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def forget_modules(libraries: Collection[str]) -> None:
    """Remove the user's modules, so that the next job imports their current files; installed packages stay."""
    for name in [name for name, module in sys.modules.items() if name.partition(".")[0] not in libraries and is_users(module)]:
        del sys.modules[name]
    importlib.invalidate_caches()


def is_users(module: ModuleType) -> bool:
    """Whether a module is outside of the folders of Python and its packages."""
    # Programs may put any object into `sys.modules`.
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    places = [file] if isinstance(file, str) else list((spec and spec.submodule_search_locations) or ())  # a package may have no file
    return bool(places) and not any(os.path.abspath(place).startswith(OF_LIBRARIES) for place in places)
