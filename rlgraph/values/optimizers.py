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
    """The base of the schedules: called with an optimizer step, counted from 0, it returns the factor of the learning rate.

    An update with 4 mini-batches has 4 optimizer steps.

    * `warmup_steps`: the steps over which the factor rises linearly from 0; the first step has a rate of 0, as in transformers.
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
    """A schedule of `steps` optimizer steps, warm-up included, that ends at the share `final` of the rate and stays there.

    * `steps`: all optimizer steps, warm-up included.
    * `final`: the share of the rate at the end.
    """

    steps: Count
    final: Fraction = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps <= self.warmup_steps:
            raise GraphError(
                f"{type(self).__name__}(warmup_steps={self.warmup_steps}, steps={self.steps}): steps counts all optimizer steps, including "
                "the warm-up; pass more of them"
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
    """A rate that falls linearly after the warm-up; transformers' `linear`.

    >>> import rlgraph as rg
    >>> [rg.optim.Linear(steps=5, final=0.5, warmup_steps=1)(step) for step in range(7)]
    [0.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    """

    def after(self, step: int) -> float:
        return self.between(1.0 - self.decay_progress(step))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Cosine(_Ending):
    """A rate that falls by half a cosine after the warm-up; transformers' `cosine`.

    >>> import rlgraph as rg
    >>> [round(rg.optim.Cosine(steps=4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """

    def after(self, step: int) -> float:
        return self.between(0.5 * (1.0 + math.cos(math.pi * self.decay_progress(step))))


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class WSD(_Ending):
    """Warm-up, stable, decay: a rate that rises, stays constant, and falls at the end; transformers' `warmup_stable_decay`.

    * `steps`: all optimizer steps, warm-up and decay included.
    * `decay_steps`: the last steps, over which the rate falls to `final`.
    * `decay`: the curve of the decay: "cosine", "linear", or "1-sqrt".
    * `final`: the share of the rate at the end, and at the start of the warm-up.

    Raises GraphError if warm-up and decay are longer than `steps`.

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
                f"WSD(steps={self.steps}, warmup_steps={self.warmup_steps}, decay_steps={self.decay_steps}): warm-up and decay are part of "
                "steps; shorten them, or pass more steps"
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

    `moments="16bit"` stores both moments in bfloat16, 4 bytes per parameter instead of 8. A step computes in float32 and rounds
    stochastically. The noise depends only on the step and the element's position in its parameter, so the result is the same with any
    number of ranks.

    `moments="8bit"` stores both moments with 8 bits and a float32 scale per block of 256 elements, 2.03 bytes per parameter instead of 8:
    the steps of bitsandbytes' AdamW8bit (arXiv:2110.02861), which the extra `lowbit` installs. Parameters with fewer than 4096 elements,
    and parameters whose blocks would be split between ranks, keep float32.

    Raises GraphError for a value out of its range, and for `warmup_steps` together with a schedule, which has its own.
    Source: Loshchilov and Hutter 2019, arXiv:1711.05101.

    >>> import rlgraph as rg
    >>> optimizer = rg.AdamW(lr=1e-6, warmup_steps=2)
    >>> optimizer.lr_at(0), optimizer.lr_at(1), optimizer.lr_at(9)
    (5e-07, 1e-06, 1e-06)

    * `lr`: the learning rate after the warm-up.
    * `betas`: the decay of the first and of the second moment per step.
    * `eps`: added to the root of the second moment.
    * `weight_decay`: decoupled: a step subtracts `lr * weight_decay` of each weight.
    * `grad_clip`: the largest norm of all gradients together; larger gradients are scaled down to it.
    * `warmup_steps`: optimizer steps over which the rate rises linearly, from `lr / warmup_steps`; then it is constant.
    * `schedule`: the course of the learning rate, e.g. `rg.optim.Cosine(warmup_steps=10, steps=1000)`. None: constant after the warm-up.
    * `moments`: the precision of both moments: "32bit", "16bit" or "8bit".
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

    A matrix moves along its momentum, with all singular values set to about 1 by Newton-Schulz iterations. The steps equal torch's Muon; on
    a CPU the iterations are in float32. A matrix has one moment, while AdamW has two.

    Ranks that hold rows of a matrix gather it for the iterations, one matrix at a time; the result is bit-identical to one rank with equal
    gradients.

    Raises GraphError as `rg.AdamW` does. Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"), optimizer=rg.optim.Muon(lr=1e-6, schedule=rg.optim.Constant(warmup_steps=5)))
    >>> policy.optimizer.momentum
    0.95

    * `momentum`: the decay of the momentum per step.
    * `nesterov`: adds the gradient to the momentum once more.
    * `ns_steps`: the number of Newton-Schulz iterations.
    * `adjust_lr`: "match_rms_adamw" makes a step as large as AdamW's, so that both use the same `lr`. "original" is the rule of the source,
      for rates of about 0.02.
    * `lr`: the learning rate after the warm-up.
    * `betas`, `eps`: AdamW's, for the parameters that AdamW trains.
    * `moments`: "32bit"; only AdamW supports the other precisions.
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
