"""The settings of the optimizer."""

from dataclasses import dataclass

from rlgraph.engines.base import check_count, check_real
from rlgraph.errors import GraphError


@dataclass(frozen=True)
class AdamW:
    """AdamW with clipping of the gradient's norm to `grad_clip`, and a learning rate that rises over `warmup_steps`.

    Raises GraphError for a value out of its range. Source: Loshchilov and Hutter 2019, arXiv:1711.05101.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        check_real("AdamW", "lr", self.lr, self.lr > 0, "a learning rate above 0")
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise GraphError(f"AdamW(betas={self.betas!r}): betas is a pair, like (0.9, 0.999)")
        for beta in self.betas:
            check_real("AdamW", "betas", beta, 0 <= beta < 1, "a pair of decays of at least 0 and below 1")
        check_real("AdamW", "eps", self.eps, self.eps > 0, "a number above 0")
        check_real("AdamW", "weight_decay", self.weight_decay, self.weight_decay >= 0, "a number of at least 0")
        check_real("AdamW", "grad_clip", self.grad_clip, self.grad_clip > 0, "a norm above 0; 1e9 does not clip")
        check_count("AdamW", "warmup_steps", self.warmup_steps, 0)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the optimizer step `step`, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(self.warmup_steps, 1))
