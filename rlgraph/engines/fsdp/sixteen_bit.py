"""AdamW whose moments are bfloat16, rounded stochastically; on the device, or in host memory while it trains."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.adamw import adamw

from rlgraph.engines.fsdp.adamw import AdamW
from rlgraph.engines.fsdp.host_moments import like
from rlgraph.engines.fsdp.offload import pinned_like
from rlgraph.engines.fsdp.sharding import local, placed

NAMES = ("exp_avg_16bit", "exp_avg_sq_16bit")  # not those of float32, so that a checkpoint of the other kind is refused
PIECE = 1 << 23  # numbers of a parameter that are float32 at once: 0.2 GB with what rounding takes
WORD = (1 << 32) - 1


class SixteenBitAdamW(torch.optim.Optimizer):
    """The steps of torch's fused AdamW on moments of bfloat16.

    A step computes in float32 and rounds up or down at random, so that the mean is what float32 would hold: at a decay of 0.999 rounding
    to the nearest would lose most of what a step adds. The noise of a number depends on the step and on its position in the whole
    parameter, and so neither on the ranks nor on where a run was stopped.

    With `on_host` the moments are in host memory, pinned on a machine with a GPU, and a step moves 4 bytes a parameter to the device and
    back. On the device it takes those of a piece of a parameter.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], settings: AdamW, *, on_host: bool = False) -> None:
        super().__init__(parameters, {"lr": settings.lr})
        self._settings, self._on_host = settings, on_host

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing here takes a closure
        """Take a step on each parameter that has a gradient."""
        self.make_state()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, self.state[parameter], group["lr"])
        if self._on_host and torch.cuda.is_available():
            torch.cuda.synchronize()  # the host may read the moments now

    def make_state(self) -> None:
        """Make the moments of all parameters, unless they are there."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.state or not parameters:
            return
        empty = [
            torch.empty_like(local(parameter.detach()), dtype=torch.bfloat16, device="meta") for parameter in parameters for _ in NAMES
        ]
        on_gpu = local(parameters[0]).device.type == "cuda"
        pinned = iter(pinned_like(empty) if self._on_host and on_gpu else ())
        for parameter in parameters:
            held = self.first_moments(parameter) if not (self._on_host and on_gpu) else {"step": torch.zeros((), dtype=torch.int64)}
            for name in NAMES:
                if name not in held:
                    held[name] = like(parameter, next(pinned).zero_())
            self.state[parameter] = held

    def first_moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make the moments of a parameter, 0, sharded and on the device as it is."""
        step = torch.zeros((), dtype=torch.int64)  # on the host, which computes the noise of a step from it
        return {"step": step, **{name: torch.zeros_like(parameter, dtype=torch.bfloat16) for name in NAMES}}

    def _step(self, parameter: torch.nn.Parameter, state: Any, lr: float) -> None:
        assert parameter.grad is not None
        weights, gradient = local(parameter.detach()), local(parameter.grad)
        before = int(state["step"])
        state["step"] += 1
        moments = [local(state[name]) for name in NAMES]
        positions = Positions(parameter, before + 1)
        for rows in pieces(weights):
            first, second = (moment[rows].to(weights.device, non_blocking=True).float() for moment in moments)
            step = torch.full((), float(before), device=weights.device)  # the kernel counts it up
            adamw(
                [weights[rows]],
                [gradient[rows]],
                [first],
                [second],
                [],
                [step],
                fused=True,
                amsgrad=False,
                beta1=self._settings.betas[0],
                beta2=self._settings.betas[1],
                lr=lr,
                weight_decay=self._settings.weight_decay,
                eps=self._settings.eps,
                maximize=False,
            )
            noise = positions.noise(rows)
            for kept, moment, bits in zip(moments, (first, second), (noise & 0xFFFF, (noise >> 16) & 0xFFFF), strict=True):
                kept[rows].copy_(rounded(moment, bits), non_blocking=True)


def pieces(box: torch.Tensor) -> Iterator[slice]:
    """Cut a box into rows of `PIECE` numbers at most, but one row at least."""
    if not box.numel():
        return
    rows = max(1, PIECE // (box.numel() // len(box)))
    for start in range(0, len(box), rows):
        yield slice(start, min(start + rows, len(box)))


class Positions:
    """The random bits of a step for the numbers of this rank's box of a parameter."""

    def __init__(self, parameter: torch.Tensor, step: int) -> None:
        whole = parameter.shape
        self._strides = [whole[dim + 1 :].numel() for dim in range(len(whole))]
        self._offsets, self._box = placed(parameter)[0], local(parameter).shape
        self._device, self._key = local(parameter).device, _signed(_mixed(step))

    def noise(self, rows: slice) -> torch.Tensor:
        """Compute 32 random bits, int32, for each number of these rows of the box."""
        own: Any = torch.zeros((), dtype=torch.int32, device=self._device)
        for dim, (stride, offset, size) in enumerate(zip(self._strides, self._offsets, self._box, strict=True)):
            start, end = (rows.start, rows.stop) if dim == 0 else (0, size)
            along = torch.arange(offset + start, offset + end, dtype=torch.int64, device=self._device) * stride
            shape = [-1 if dim == other else 1 for other in range(len(self._box))]
            own = own + _low(along).view(shape)  # modulo 2 ** 32, as the positions of larger parameters are
        return _scrambled(own ^ self._key)


def rounded(numbers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, up where the 16 bits that are cut off and those of `noise`, int32, make more than 16 bits.

    >>> one = torch.tensor([1.0 + 2**-9])  # a quarter of the way from 1 to the next bfloat16
    >>> [rounded(one, torch.tensor([noise], dtype=torch.int32)).item() for noise in (0, 0xBFFF, 0xC000)]
    [1.0, 1.0, 1.0078125]
    """
    summed = numbers.contiguous().view(torch.int32) + noise
    halves = summed.view(torch.bfloat16).view(*numbers.shape, 2)
    return torch.where(numbers.isnan(), numbers.bfloat16(), halves[..., 1])  # a sum may overflow for what is no number


def _scrambled(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits in place, by the hash "lowbias32" of C. Wellons: each bit of what comes in changes about half of what comes out."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # int32 shifts its sign in
        if factor != 1:
            x *= _signed(factor)
    return x


def _mixed(step: int) -> int:
    """The same of one number, the step, after a constant that keeps steps and positions apart."""
    x = (step * 0x9E3779B9 + 0x7F4A7C15) & WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & WORD
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _low(numbers: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32."""
    return numbers.view(torch.int32).view(*numbers.shape, 2)[..., 0].contiguous()
