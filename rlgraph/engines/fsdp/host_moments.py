"""AdamW whose moments are in host memory while it trains: each optimizer step brings those of one parameter to the device at a time."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from rlgraph.engines.fsdp.offload import pinned_like
from rlgraph.engines.fsdp.sharding import local


class HostMomentsAdamW(torch.optim.AdamW):
    """The steps of torch's fused AdamW, bit for bit. Its moments `exp_avg` and `exp_avg_sq` are pinned on a machine with a GPU.

    A step moves 8 bytes a parameter to the device and back. On the device it takes the moments of one parameter.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step on each parameter that has a gradient."""
        self.make_state()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step(local(parameter), local(parameter.grad), self.state[parameter], group)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the host may read the moments now

    def make_state(self) -> None:
        """Make the moments of all parameters, unless they are there."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.state or not parameters:
            return
        boxes = [local(parameter.detach()) for parameter in parameters for _ in range(2)]
        pinned = boxes[0].device.type == "cuda"
        moments = pinned_like(boxes) if pinned else [torch.zeros_like(box) for box in boxes]
        for index, parameter in enumerate(parameters):
            first, second = (like(parameter, moment.zero_()) for moment in moments[2 * index : 2 * index + 2])
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self.state[parameter] = {"step": step, "exp_avg": first, "exp_avg_sq": second}


def _step(weights: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
    host = [local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
    moments = [moment.to(weights.device, non_blocking=True) for moment in host]  # on a CPU these are the moments themselves
    first, second = group["betas"]
    adamw(
        [weights],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [state["step"]],
        fused=True,
        amsgrad=False,
        beta1=first,
        beta2=second,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for kept, moment in zip(host, moments, strict=True):
        if moment is not kept:
            kept.copy_(moment, non_blocking=True)


def like(parameter: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """A tensor sharded as the parameter, of memory on the host."""
    return DTensor(moment, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else moment
