"""Settings of optimizers, and schedules of their learning rates."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from rlgraph import settings
from rlgraph.errors import GraphError
from rlgraph.settings import AtLeastZero, Count, Fraction, Natural, Positive, Range

# Schedules of the learning rate, by optimizer step: the factors that transformers' `get_scheduler` gives.


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
    >>> [rg.optim.Constant(warmup_steps=2)(step) for step in range(4)]
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

    def decay_progress(self, step: int) -> float:
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
    >>> [rg.optim.Linear(steps=5, final=0.5, warmup_steps=1)(step) for step in range(7)]
    [0.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """

    def after(self, step: int) -> float:
        return self.between(1.0 - self.decay_progress(step))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Cosine(_Ending):
    """A rate that falls by half a cosine after the warm-up to its share `final` at optimizer step `steps`; transformers' `cosine`.

    >>> import rlgraph as rg
    >>> [round(rg.optim.Cosine(steps=4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def after(self, step: int) -> float:
        return self.between(0.5 * (1.0 + math.cos(math.pi * self.decay_progress(step))))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class WSD(_Ending):
    """Warm-up, stable, decay: the rate is constant until the last `decay_steps` of `steps`, in which it falls to its share `final` by
    half a cosine, linearly, or as one minus a square root; transformers' `warmup_stable_decay`. The warm-up begins at `final`.

    Raises GraphError for a warm-up and a decay that take more than `steps`.

    >>> import rlgraph as rg
    >>> [rg.optim.WSD(steps=6, warmup_steps=2, decay_steps=2, decay="linear")(step) for step in range(7)]
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


# Settings of the optimizers.

Decay: TypeAlias = Annotated[float, Range(least=0, below=1, rule="a decay of at least 0 and below 1")]


@settings.refuse_unknown
@dataclass(frozen=True)
class AdamW:
    """AdamW that clips the norm of the gradients to `grad_clip`.

    The learning rate follows `schedule`, as `rg.optim.Cosine(warmup_steps=10, steps=1000)`. Without one it is constant after `warmup_steps`
    optimizer steps, over which it rises linearly, to `lr / warmup_steps` in the first.

    `moments="16bit"` keeps both moments in bfloat16, 4 bytes a parameter instead of 8. A step computes in float32 and rounds up or down at
    random; the noise depends on the step and on a number's position in its parameter alone, so any number of ranks has the same bits.

    `moments="8bit"` keeps both moments in 8 bits with a float32 scale for each block of 256 numbers, 2.03 bytes a parameter instead of 8:
    the steps of bitsandbytes' AdamW8bit (arXiv:2110.02861), which the extra `lowbit` installs. Parameters of less than 4096 numbers, and
    those whose blocks would lie in two ranks, keep float32.

    Raises GraphError for a value out of its range, and for `warmup_steps` beside a schedule, which has its own.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.

    >>> import rlgraph as rg
    >>> optimizer = rg.AdamW(lr=1e-6, warmup_steps=2)
    >>> optimizer.lr_at(0), optimizer.lr_at(1), optimizer.lr_at(9)
    (5e-07, 1e-06, 1e-06)

    * `betas`: how much of the first and of the second moment stays in a step.
    * `eps`: added to the root of the second moment.
    * `weight_decay`: the share of each weight that a step takes away, times the learning rate; decoupled, as in the source.
    """

    lr: Annotated[float, Range(above=0, rule="a learning rate above 0")] = 1e-6
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: AtLeastZero = 0.0
    grad_clip: Annotated[float, Range(above=0, rule="a norm above 0; 1e9 does not clip")] = 1.0
    warmup_steps: Natural = 0
    schedule: RateSchedule | None = None
    moments: Literal["32bit", "16bit", "8bit"] = "32bit"

    def __post_init__(self) -> None:
        settings.check(self)
        if self.schedule is not None and self.warmup_steps:
            own, kind = type(self).__name__, type(self.schedule).__name__
            raise GraphError(
                f"{own}(warmup_steps={self.warmup_steps}, schedule={kind}(…)): a schedule has its own warm-up; write "
                f"schedule=rg.optim.{kind}(warmup_steps={self.warmup_steps}, …)"
            )

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        if self.schedule is not None:
            return self.lr * self.schedule(step)
        return self.lr * min(1.0, (step + 1) / max(self.warmup_steps, 1))


@settings.refuse_unknown
@dataclass(frozen=True)
class Muon(AdamW):
    """Muon for the matrices of the layers, and AdamW for embeddings, heads, norms, biases and fused experts.

    A matrix moves along its momentum with all singular values set to about 1 by `ns_steps` Newton-Schulz iterations. With
    `adjust_lr="match_rms_adamw"` its step is as large as AdamW's, so both take the same `lr`; "original" is the rule of the source, for
    rates about 0.02. `betas` and `eps` are those of AdamW. The step is that of torch's Muon; on a CPU the iterations are in float32.

    Ranks that hold rows of a matrix gather it for the iterations, one matrix at a time; equal gradients give the same bits as on one rank.
    A matrix has one moment, where AdamW has two.

    Raises GraphError as `rg.AdamW` does. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"), optimizer=rg.optim.Muon(lr=1e-6, schedule=rg.optim.Constant(warmup_steps=5)))
    >>> policy.optimizer.momentum
    0.95

    * `momentum`: how much of the momentum stays in a step; with `nesterov` the gradient is added to it once more.
    * `weight_decay`: as that of AdamW.
    * `moments`: "32bit"; the others are AdamW's alone.
    """

    momentum: Decay = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Range(least=1, most=99)] = 5
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moments != "32bit":
            raise GraphError(
                f"Muon(moments='{self.moments}'): only AdamW's moments have fewer than 32 bits; leave it out, or use rg.AdamW(…)"
            )
