"""Faults that are put into a running job: what happens, in which stage, at which step."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support import fakes

from rlgraph.channels import HostReader
from rlgraph.channels.host.connection import Connection
from rlgraph.columns import Columns
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Operation
from rlgraph.graph.traits import NodeTraits
from rlgraph.nodes.base import Context, Fired, Stage

STAGES = {"prompts": "prompts", "rollout": "generator", "score": "score", "update": "policy", "load": "generator", "publish": "policy"}
SLOW_S = 2.6


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _hold_the_interpreter() -> None:
    ctypes.PyDLL(None).sleep(3600)  # C code that never lets go of the interpreter's lock


def _cut_channels() -> None:
    gc.unfreeze()  # a worker freezes what it has started with, which hides it from the next line
    for link in (found for found in gc.get_objects() if type(found) is Connection):
        if "driver" not in str(link._socket.getpeername()):
            link.end()


def _keep_slots() -> None:
    HostReader.release = lambda self: None  # type: ignore[method-assign]


def _raise() -> None:
    raise ValueError("injected")


def _out_of_memory() -> None:
    torch.empty(1 << 60)


def _no_disk() -> None:
    raise OSError(28, "No space left on device")


ENDS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exits": lambda: os._exit(3),
    "segmentation fault": lambda: ctypes.string_at(0),  # type: ignore[dict-item]
    "aborts": os.abort,
}
RAISES: dict[str, Callable[[], None]] = {"exception": _raise, "no memory": _out_of_memory, "full disk": _no_disk}
HANGS: dict[str, Callable[[], None]] = {
    "deadlock": _deadlock,
    "holds the interpreter": _hold_the_interpreter,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
OTHERS: dict[str, Callable[[], None]] = {"slow": lambda: time.sleep(SLOW_S), "broken socket": _cut_channels, "full channel": _keep_slots}
ACTS = ENDS | RAISES | HANGS | OTHERS
SHAPES = ("wrong rows", "no column", "no tensor")


@dataclass(frozen=True)
class Fault:
    """`kind` happens in `stage` at `step`; when it did is written to `clock`."""

    kind: str
    stage: str
    step: int
    clock: str

    @property
    def worker(self) -> str:
        return STAGES[self.stage]

    @property
    def node(self) -> str:
        return {"load": "rollout", "publish": "update"}.get(self.stage, self.stage)

    def strike(self, step: int, written: Fired) -> Fired:
        """Do it, if this is the step; return what the node returns then."""
        if step != self.step:
            return written
        Path(self.clock).write_text(str(time.monotonic()))
        if self.kind in ACTS:
            ACTS[self.kind]()
            return written
        columns, metrics = written if isinstance(written, tuple) else (written, {})
        return _misshapen(self.kind, columns), metrics


def _misshapen(kind: str, columns: Columns) -> dict[str, Any]:
    wrong: dict[str, Any] = dict(columns)
    name = "prompt_ids" if "prompt_ids" in wrong else sorted(wrong)[0]  # one that somebody reads
    if kind == "wrong rows":
        wrong[name] = wrong[name][:-1]
    elif kind == "no column":
        del wrong[name]
    else:
        wrong[name] = tuple(range(len(wrong[name])))
    return wrong


@dataclass(frozen=True)
class Faulty(Operation):
    """An operation with a fault."""

    inner: Any
    fault: Fault

    @property
    def traits(self) -> NodeTraits:
        return self.inner.traits  # type: ignore[no-any-return]

    def cursor(self, step: int) -> Mapping[str, Any] | None:
        return self.inner.cursor(step)  # type: ignore[no-any-return]

    def start(self, context: Context) -> Stage:
        fire: Stage = self.inner.start(context)
        if self.fault.stage in ("load", "publish"):
            self._weights(context)
            return fire
        return lambda step, columns: self.fault.strike(step, fire(step, columns))

    def _weights(self, context: Context) -> None:
        """Let it happen when the engine gives or takes its weights."""
        name = "load_weights" if self.fault.stage == "load" else "weight_shards"
        move, count = getattr(context.engine, name), iter(range(10**9))

        def moved(*arguments: Mapping[str, torch.Tensor]) -> Any:
            self.fault.strike(next(count), {})
            return move(*arguments)

        setattr(context.engine, name, moved)


def graph(fault: Fault) -> Graph:
    """Return the small training loop with the fault in it."""
    made = fakes.vector_loop(1)
    node = made.node(fault.node)
    object.__setattr__(node, "operation", Faulty(node.operation, fault))
    return made


def cases(folder: str) -> list[Fault]:
    """Return every kind in every stage where it can be, at the first step and in the middle of the run."""
    found = []
    for step in (0, 4):
        for stage in STAGES:
            kinds = [*ACTS, *(SHAPES if stage in ("prompts", "rollout", "score") else ())]
            found += [Fault(kind, stage, step, "") for kind in kinds if possible(kind, stage)]
    return [replace(fault, clock=f"{folder}/{i}") for i, fault in enumerate(found)]


def possible(kind: str, stage: str) -> bool:
    """Whether the stage can have the fault: the prompts' worker reads no channel, so it cannot keep a slot."""
    return not (kind == "full channel" and stage == "prompts")
