"""The optimizers of sharded weights: AdamW with moments of 32, 16 or 8 bits, on the device or on the host, and Muon."""

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw

from rlgraph.channels.weights.endpoints import flat_buffer
from rlgraph.engines.forward.head import Head
from rlgraph.engines.fsdp.sharding import by_mesh, full, is_part, local, locate_box, replica
from rlgraph.engines.precision import bitsandbytes
from rlgraph.values.optimizers import AdamW, Muon

# AdamW whose moments have 8 bits a number, with a scale for each block of 256: the steps are those of bitsandbytes.

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


# Moments of an optimizer in host memory while another model has the GPU.

TOUCHING = 16  # threads that touch new memory, whatever the worker computes with


class OffloadedMoments:
    """Moves the moments of an optimizer to host memory and back. Their device addresses may change, their values do not.

    They come back while passes are computed, as only the optimizer's step needs them: it waits for the last of them. Moments of 1.7B take
    0.29 s on an H200, an update of 512 × 256 tokens 4.4 s.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._host: list[torch.Tensor] = []  # of each moment, pinned
        self._away: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._coming: torch.cuda.Event | None = None  # after the last copy of those that are on their way back
        optimizer.register_step_pre_hook(lambda *_: self.put_back())

    def take_off(self) -> int:
        """Free the device memory of the moments and torch's unused memory; return the bytes moved to the host.

        It does nothing if they are on the host already.
        """
        if self._coming is not None:  # no step was taken since they began to come back
            self.put_back()
        if self._away:
            return 0
        self._away = self._moments()
        if len(self._host) != len(self._away):
            self._host = pinned_like(self._away)
        for host, tensor in zip(self._host, self._away, strict=True):
            host.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        for tensor in self._away:
            tensor.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
        return sum(tensor.numel() * tensor.itemsize for tensor in self._away)

    def begin_back(self) -> None:
        """Begin to copy the moments back to the device, on a stream of their own; nothing may read them before `put_back`."""
        if not self._away or self._coming is not None:
            return
        self._stream = self._stream or torch.cuda.Stream()
        for tensor in self._away:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        self._stream.wait_stream(torch.cuda.current_stream())  # whose earlier work may still use this memory
        with torch.cuda.stream(self._stream):
            for host, tensor in zip(self._host, self._away, strict=True):
                tensor.copy_(host, non_blocking=True)
            self._coming = self._stream.record_event()

    def put_back(self) -> None:
        """Have the moments on the device: copied back, and all copies done."""
        self.begin_back()
        if self._coming is not None:
            self._coming.synchronize()
            self._coming, self._away = None, []

    def _moments(self) -> list[torch.Tensor]:
        states = self._optimizer.state.values()
        return [local(value) for state in states for key, value in state.items() if key != "step"]


def pinned_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocate pinned host memory of these shapes and dtypes; it stays pinned until the process ends.

    Many threads touch one memory for all tensors, which is then registered. torch's own pinned memory takes the next power of two for each
    tensor, and over twice the time, since one thread touches it page by page.
    """
    if not tensors:
        return []
    memory = flat_buffer({str(i): (tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)}, torch.device("cpu"))
    whole = torch.empty(0, dtype=torch.uint8).set_(memory["0"].untyped_storage())
    with ThreadPoolExecutor(TOUCHING) as pool:
        list(pool.map(torch.Tensor.zero_, whole.chunk(TOUCHING)))
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0))
    return list(memory.values())


# AdamW whose moments are in host memory while it trains: each optimizer step brings those of one parameter to the device at a time.


class HostMomentsAdamW(torch.optim.AdamW):
    """The steps of torch's fused AdamW, bit for bit. Its moments `exp_avg` and `exp_avg_sq` are pinned on a machine with a GPU.

    A step moves 8 bytes a parameter to the device and back. On the device it takes the moments of one parameter.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing here takes a closure
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


# AdamW whose moments are bfloat16, rounded stochastically; on the device, or in host memory while it trains.

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
                kept[rows].copy_(round_stochastically(moment, bits), non_blocking=True)


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
        self._offsets, self._box = locate_box(parameter)[0], local(parameter).shape
        self._device, self._key = local(parameter).device, _as_int32(_mix_step(step))

    def noise(self, rows: slice) -> torch.Tensor:
        """Compute 32 random bits, int32, for each number of these rows of the box."""
        own: Any = torch.zeros((), dtype=torch.int32, device=self._device)
        for dim, (stride, offset, size) in enumerate(zip(self._strides, self._offsets, self._box, strict=True)):
            start, end = (rows.start, rows.stop) if dim == 0 else (0, size)
            along = torch.arange(offset + start, offset + end, dtype=torch.int64, device=self._device) * stride
            shape = [-1 if dim == other else 1 for other in range(len(self._box))]
            own = own + _low(along).view(shape)  # modulo 2 ** 32, as the positions of larger parameters are
        return _scramble_bits(own ^ self._key)


def round_stochastically(numbers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round float32 to bfloat16, up where the 16 bits that are cut off and those of `noise`, int32, make more than 16 bits.

    >>> one = torch.tensor([1.0 + 2**-9])  # a quarter of the way from 1 to the next bfloat16
    >>> [round_stochastically(one, torch.tensor([noise], dtype=torch.int32)).item() for noise in (0, 0xBFFF, 0xC000)]
    [1.0, 1.0, 1.0078125]
    """
    summed = numbers.contiguous().view(torch.int32) + noise
    halves = summed.view(torch.bfloat16).view(*numbers.shape, 2)
    return torch.where(numbers.isnan(), numbers.bfloat16(), halves[..., 1])  # the sum may overflow for NaN


def _scramble_bits(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits in place, by the hash "lowbias32" of C. Wellons: each bit of what comes in changes about half of what comes out."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x ^= (x >> shift) & ((1 << (32 - shift)) - 1)  # int32 shifts its sign in
        if factor != 1:
            x *= _as_int32(factor)
    return x


def _mix_step(step: int) -> int:
    """The same of one number, the step, after a constant that keeps steps and positions apart."""
    x = (step * 0x9E3779B9 + 0x7F4A7C15) & WORD
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & WORD
    return x


def _as_int32(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _low(numbers: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64, as int32."""
    return numbers.view(torch.int32).view(*numbers.shape, 2)[..., 0].contiguous()


# Muon on sharded weights: a matrix is gathered for the Newton-Schulz iterations, which need all of it; AdamW takes the rest.

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the iteration; those of torch and of the source
EPS = 1e-7
MOMENTUM = "momentum_buffer"


def build_optimizer(settings: AdamW, head: Head, *, host_moments: bool = False) -> torch.optim.Optimizer:
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
        rows.add_(_local_box(whole, matrix), alpha=-lr * _factor(settings, whole.shape))

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


def _local_box(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Take this rank's box of a whole tensor."""
    if not isinstance(like, DTensor) or not dist.is_initialized():
        return whole
    offsets, _ = locate_box(like)
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


# The norm of all gradients, and clipping by it.

TINY = 1e-6  # added to the norm, as torch does


def clip_gradients(parameters: Iterable[torch.nn.Parameter], most: float) -> float:
    """Scale the gradients down to a norm of `most` over all ranks, and return the norm before; every rank calls it."""
    learnt = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in learnt if isinstance(parameter.grad, DTensor)]
    if not any(map(is_part, learnt)) and all(grad.device_mesh.ndim == 1 for grad in grads):
        return float(full(torch.nn.utils.clip_grad_norm_(learnt, most)))
    # torch knows nothing of the ranks that `cut` a parameter, and sums each dim of a mesh by itself, one gradient after the other: here one
    # sum over all ranks. It also adds up experts, which some ranks share, and the rest of a model, which all share.
    norms = torch.stack(torch._foreach_norm([local(grad) for grad in grads]))
    alone = torch.tensor([replica(parameter) == 0 for parameter in learnt], device=norms.device)  # what several ranks hold counts once
    total = (norms.square() * alone).sum()
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_([local(grad) for grad in grads], (most / (norm + TINY)).clamp(max=1.0))
    return float(norm)
