"""Where a worker's engine comes from, and where it goes: it is loaded and closed, or kept for the next job of this process.

A kept engine begins a job as one that has just been loaded: with the weights of its folder, no request, and the state of the process and
the notices that its loading left.
"""

import os
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlgraph import notices
from rlgraph.graph.nodes import Model
from rlgraph.nodes.base import Context


@dataclass(frozen=True)
class ProcessState:
    """What an engine sets for its whole process as it loads, and users' code may change: random generators, threads, and variables."""

    python: Any
    numpy: Any
    torch: torch.Tensor
    threads: int
    variables: dict[str, str]

    @classmethod
    def now(cls) -> "ProcessState":
        """Take the state as it is."""
        generators = random.getstate(), np.random.get_state(), torch.get_rng_state()
        return cls(*generators, threads=torch.get_num_threads(), variables=dict(os.environ))

    def restore(self) -> None:
        """Set the process to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        torch.set_num_threads(self.threads)
        for name in os.environ.keys() - self.variables.keys():
            del os.environ[name]
        os.environ.update(self.variables)


@dataclass
class EngineSlot:
    """The place of an engine in a process. One that `keeps` holds it from the end of a job to the start of the next."""

    keeps: bool = False
    held: Any = None
    begun: ProcessState | None = field(default=None, repr=False)
    said: tuple[str, ...] = ()  # notices of the loading

    def load(self, model: Model, context: Context) -> Any:
        """Load the model's engine, or begin again with the one that is held: of the same model, in the same place."""
        engine, self.held = self.held, None
        if engine is None:
            engine = model.load(context)
            self.begun, self.said = ProcessState.now(), notices.here.list_all()
            return engine
        engine.renew()
        assert self.begun is not None
        self.begun.restore()
        for text in self.said:
            notices.here.say(text)
        return engine

    def end(self, engine: Any, *, keep: bool) -> None:
        """Hold an engine for the next job if this slot keeps it and the driver wants it to; else close it."""
        if self.keeps and keep:
            engine.forget()
            self.held = engine
            notices.here.forget()
        else:
            engine.close()
