"""AdamW whose moments have 8 bits a number, with a scale for each block of 256: the steps are those of bitsandbytes."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from rlgraph.engines.fsdp.adamw import AdamW
from rlgraph.engines.fsdp.sharding import local
from rlgraph.engines.fsdp.whole import is_part
from rlgraph.engines.low_bits import bitsandbytes

BLOCK, LEAST = 256, 4096  # numbers that share a scale, and of a parameter whose moments have 8 bits: both are of the library
CODES, SCALES = ("exp_avg_8bit", "exp_avg_sq_8bit"), ("exp_avg_scale", "exp_avg_sq_scale")


class EightBitAdamW(torch.optim.Optimizer):
    """The steps of bitsandbytes' AdamW8bit, bit for bit, on this rank's rows of each parameter.

    A block never lies in two ranks, so any number of ranks has the blocks of one and a checkpoint goes on with any. Parameters whose
    blocks would lie in two ranks, and those of less than 4096 numbers, keep moments of float32.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], settings: AdamW) -> None:
        super().__init__(parameters, {"lr": settings.lr})
        self._settings, self._library = settings, bitsandbytes()
        self._maps: tuple[torch.Tensor, torch.Tensor] | None = None  # the numbers that codes stand for, of either moment

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing here takes a closure
        """Take a step on each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.first_moments(parameter))
                state["step"] += 1
                if local(parameter).numel():
                    self._step(local(parameter), local(parameter.grad).contiguous(), state, group["lr"])

    def first_moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make the moments of a parameter, 0, sharded as it is."""
        step = torch.zeros((), dtype=torch.int64)  # on the host, which gives it to the kernels
        shape = scales_shape(parameter)
        if shape is None:
            return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        codes = {name: torch.zeros_like(parameter, dtype=torch.uint8) for name in CODES}
        return {"step": step, **codes, **{name: _scales(parameter, shape) for name in SCALES}}

    def _step(self, weights: torch.Tensor, gradient: torch.Tensor, state: Any, lr: float) -> None:
        own, library = self._settings, self._library.functional
        (first, second), steps = own.betas, int(state["step"])
        if "exp_avg" in state:
            moments = [local(state[name]) for name in ("exp_avg", "exp_avg_sq")]
            library.optimizer_update_32bit(
                "adam", gradient, weights, moments[0], first, own.eps, steps, lr, moments[1], second, weight_decay=own.weight_decay
            )
            return
        codes = [local(state[name]) for name in CODES]
        scales = [local(state[name]).view(-1) for name in SCALES]
        maps = self._made_maps(weights.device)
        library.optimizer_update_8bit_blockwise(
            "adam", gradient, weights, *codes, first, second, 0.0, 0.0, own.eps, steps, lr, *maps, *scales, weight_decay=own.weight_decay
        )

    def _made_maps(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if self._maps is None:
            of = self._library.functional.create_dynamic_map
            self._maps = of(signed=True).to(device), of(signed=False).to(device)
        return self._maps


def scales_shape(parameter: torch.Tensor) -> tuple[int, int] | None:
    """The shape of the scales of a parameter's moments, which are sharded by rows as it is; None if they have none and stay float32.

    >>> scales_shape(torch.empty(512, 32)), scales_shape(torch.empty(576, 1536)), scales_shape(torch.empty(100))
    ((64, 1), (576, 6), None)
    """
    whole = parameter.numel()
    if whole < LEAST:
        return None
    rows = parameter.shape[0]
    together = BLOCK // math.gcd(whole // rows, BLOCK)  # rows that fill whole blocks
    ranks = 1
    if isinstance(parameter, DTensor):
        assert not is_part(parameter), "ranks that share matrices cut them within blocks"
        assert parameter.placements == (Shard(0),), "shards are rows"
        ranks = parameter.device_mesh.size()
    of_rank = -(-rows // ranks)
    if rows % together or (ranks > 1 and of_rank % together):
        return None
    return rows // together, whole // rows * together // BLOCK


def _scales(parameter: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    own = local(parameter)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, device=own.device)
    rows = own.numel() // BLOCK // shape[1]
    held = torch.zeros(rows, shape[1], device=own.device)
    given: dict[str, Any] = {"run_check": False, "shape": torch.Size(shape), "stride": (shape[1], 1)}
    return DTensor.from_local(held, parameter.device_mesh, parameter.placements, **given)
