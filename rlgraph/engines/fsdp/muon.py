"""Muon on sharded weights: a matrix is gathered for the Newton-Schulz iterations, which need all of it; AdamW takes the rest."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlgraph.engines.forward.head import Head
from rlgraph.engines.fsdp.adamw import AdamW, Muon
from rlgraph.engines.fsdp.eight_bit import EightBitAdamW
from rlgraph.engines.fsdp.host_moments import HostMomentsAdamW
from rlgraph.engines.fsdp.sharding import by_mesh, full, local, placed
from rlgraph.engines.fsdp.sixteen_bit import SixteenBitAdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration; those of torch and of the source
EPS = 1e-7
MOMENTUM = "momentum_buffer"


def made(settings: AdamW, head: Head, *, host_moments: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer of a model whose parameters are sharded; AdamW's moments may be in host memory."""
    if isinstance(settings, Muon):
        return MuonWithAdamW(head, settings)
    learnt = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if settings.moments == "8bit":
        return EightBitAdamW(learnt, settings)
    if settings.moments == "16bit":
        return SixteenBitAdamW(learnt, settings, on_host=host_moments)
    kind = HostMomentsAdamW if host_moments else torch.optim.AdamW
    groups = [{"params": group} for group in by_mesh(learnt)]
    return kind(groups, settings.lr, settings.betas, settings.eps, settings.weight_decay, fused=True)


def first_moments(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make the moments of a parameter as an optimizer would at its first step."""
    if isinstance(optimizer, MuonWithAdamW) and optimizer.takes(parameter):
        return {MOMENTUM: torch.zeros_like(parameter)}
    if isinstance(optimizer, (EightBitAdamW, SixteenBitAdamW)):
        return optimizer.first_moments(parameter)
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


class MuonWithAdamW(torch.optim.Optimizer):
    """Takes a step of Muon for the matrices of a model's layers, and one of AdamW for its other parameters."""

    def __init__(self, head: Head, settings: Muon) -> None:
        self._settings = settings
        within = {id(parameter) for parameter in head.layers.parameters() if parameter.dim() == 2}
        matrices = [parameter for parameter in head.parameters() if id(parameter) in within]
        others = [parameter for parameter in head.parameters() if id(parameter) not in within]
        self._matrices = within
        super().__init__([{"params": group} for group in (matrices, others) if group], {"lr": settings.lr})

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether Muon, and not AdamW, steps this parameter."""
        return id(parameter) in self._matrices

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing here takes a closure
        """Take one step with the gradients that are there."""
        for group in self.param_groups:
            learnt = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in learnt:
                if not self.state[parameter]:
                    self.state[parameter].update(first_moments(self, parameter))
            for matrix in filter(self.takes, learnt):
                self._step_matrix(matrix, group["lr"])
            for others in by_mesh(parameter for parameter in learnt if not self.takes(parameter)):
                self._step_others([*others], group["lr"])

    def _step_matrix(self, matrix: torch.Tensor, lr: float) -> None:
        settings, momentum = self._settings, self.state[matrix][MOMENTUM]
        assert matrix.grad is not None
        momentum.lerp_(matrix.grad, 1 - settings.momentum)
        update = matrix.grad.lerp(momentum, settings.momentum) if settings.nesterov else momentum
        whole = orthogonal(full(update, matrix), settings.ns_steps)  # the same on every rank
        rows = local(matrix)
        rows.mul_(1 - lr * settings.weight_decay)
        rows.add_(_own(whole, matrix), alpha=-lr * _factor(settings, whole.shape))

    def _step_others(self, parameters: list[torch.Tensor], lr: float) -> None:
        settings, states = self._settings, [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            lr=lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=False,
        )


def _own(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Take this rank's box of a whole tensor."""
    if not isinstance(like, DTensor) or not dist.is_initialized():
        return whole
    offsets, _ = placed(like)
    for dim, (offset, length) in enumerate(zip(offsets, local(like).shape, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim] - length), length)
    return whole


def _factor(settings: Muon, shape: torch.Size) -> float:
    """The factor of the rate for a matrix of this shape; Liu et al. 2025, arXiv:2502.16982, for "match_rms_adamw"."""
    rows, columns = shape
    matched: float = 0.2 * max(rows, columns) ** 0.5
    return matched if settings.adjust_lr == "match_rms_adamw" else max(1.0, rows / columns) ** 0.5


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """Set all singular values of a matrix to about 1, by Newton-Schulz iterations: what torch's Muon does, which takes whole matrices.

    They run in bfloat16 on a GPU, as torch's do, and in float32 on a CPU.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32, copy=True)
    found = found.T if tall else found
    found.div_(found.norm().clamp(min=EPS))
    for _ in range(iterations):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if tall else found
