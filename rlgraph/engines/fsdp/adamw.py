"""Settings of the optimizer."""

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from rlgraph import settings
from rlgraph.setting_types import Range
from rlgraph.settings import AtLeastZero, Natural, Positive

Decay: TypeAlias = Annotated[float, Range(least=0, below=1, rule="a decay of at least 0 and below 1")]


@dataclass(frozen=True)
class AdamW:
    """AdamW that clips the norm of the gradients to `grad_clip`. The learning rate rises linearly over `warmup_steps` optimizer steps.

    Raises GraphError for a value out of its range. Source: Loshchilov and Hutter 2019, arXiv:1711.05101.

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

    def __post_init__(self) -> None:
        settings.check(self)

    def lr_at(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup_steps, 1))
