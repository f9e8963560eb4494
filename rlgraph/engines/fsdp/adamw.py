"""Settings of the optimizers."""

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from rlgraph import settings
from rlgraph.engines.schedules import RateSchedule
from rlgraph.errors import GraphError
from rlgraph.settings import AtLeastZero, Natural, Positive, Range

Decay: TypeAlias = Annotated[float, Range(least=0, below=1, rule="a decay of at least 0 and below 1")]


@settings.refuse_unknown
@dataclass(frozen=True)
class AdamW:
    """AdamW that clips the norm of the gradients to `grad_clip`.

    The learning rate follows `schedule`, as `rg.Cosine(warmup_steps=10, steps=1000)`. Without one it is constant after `warmup_steps`
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
                f"schedule=rg.{kind}(warmup_steps={self.warmup_steps}, …)"
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
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"), optimizer=rg.Muon(lr=1e-6, schedule=rg.Constant(warmup_steps=5)))
    >>> policy.optimizer.momentum
    0.95
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
