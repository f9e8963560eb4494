"""Schedules of the learning rate, by optimizer step: the factors that transformers' `get_scheduler` gives."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from rlgraph import settings
from rlgraph.errors import GraphError
from rlgraph.settings import Count, Fraction, Natural


@dataclass(frozen=True, kw_only=True)
class RateSchedule(ABC):
    """The base of the schedules: called with an optimizer step, counted from 0, it gives the factor of the learning rate.

    An update with 4 mini-batches takes 4 optimizer steps. The factor rises linearly from 0 over `warmup_steps`, so the first of them has a
    rate of 0, as in transformers.
    """

    warmup_steps: Natural = 0

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, step: int) -> float:
        return step / self.warmup_steps if step < self.warmup_steps else self.after(step - self.warmup_steps)

    @abstractmethod
    def after(self, step: int) -> float:
        """The factor `step` steps after the warm-up."""


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Constant(RateSchedule):
    """A constant rate after the warm-up; transformers' `constant_with_warmup`.

    >>> import rlgraph as rg
    >>> [rg.Constant(warmup_steps=2)(step) for step in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """

    def after(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class _Ending(RateSchedule):
    """A schedule of `steps` optimizer steps, warm-up included, that ends at the share `final` of the rate and stays there."""

    steps: Count
    final: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps <= self.warmup_steps:
            raise GraphError(
                f"{type(self).__name__}(warmup_steps={self.warmup_steps}, steps={self.steps}): steps counts all optimizer steps, those of "
                "the warm-up included; give more of them"
            )

    def done(self, step: int) -> float:
        """The share of the steps after the warm-up that is done."""
        return min(step / (self.steps - self.warmup_steps), 1.0)

    def between(self, factor: float) -> float:
        """Scale a factor that falls from 1 to 0 to one that falls to `final`."""
        return factor * (1.0 - self.final) + self.final


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Linear(_Ending):
    """A rate that falls linearly after the warm-up to its share `final` at optimizer step `steps`; transformers' `linear`.

    >>> import rlgraph as rg
    >>> [rg.Linear(steps=5, final=0.5, warmup_steps=1)(step) for step in range(7)]
    [0.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """

    def after(self, step: int) -> float:
        return self.between(1.0 - self.done(step))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Cosine(_Ending):
    """A rate that falls by half a cosine after the warm-up to its share `final` at optimizer step `steps`; transformers' `cosine`.

    >>> import rlgraph as rg
    >>> [round(rg.Cosine(steps=4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def after(self, step: int) -> float:
        return self.between(0.5 * (1.0 + math.cos(math.pi * self.done(step))))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class WSD(_Ending):
    """Warm-up, stable, decay: the rate is constant until the last `decay_steps` of `steps`, in which it falls to its share `final` by
    half a cosine, linearly, or as one minus a square root; transformers' `warmup_stable_decay`. The warm-up begins at `final`.

    Raises GraphError for a warm-up and a decay that take more than `steps`.

    >>> import rlgraph as rg
    >>> [rg.WSD(steps=6, warmup_steps=2, decay_steps=2, decay="linear")(step) for step in range(7)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """

    decay_steps: Count
    decay: Literal["cosine", "linear", "1-sqrt"] = "cosine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps + self.decay_steps > self.steps:
            raise GraphError(
                f"WSD(steps={self.steps}, warmup_steps={self.warmup_steps}, decay_steps={self.decay_steps}): warm-up and decay lie within "
                "steps; shorten them, or give more steps"
            )

    def __call__(self, step: int) -> float:
        return self.between(step / self.warmup_steps) if step < self.warmup_steps else self.after(step - self.warmup_steps)

    def after(self, step: int) -> float:
        decayed = step - (self.steps - self.warmup_steps - self.decay_steps)
        if decayed < 0:
            return 1.0
        done = min(decayed / self.decay_steps, 1.0)
        falls = {"linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done)), "1-sqrt": 1.0 - math.sqrt(done)}
        return self.between(falls[self.decay])
