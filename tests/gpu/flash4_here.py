"""FlashAttention 4 against 2 on a Hopper: output, sums and gradients of every kind of call, alone and in a compiled layer.

`flash4_here.py [--smoke]`: on a CPU both are plain PyTorch, by which the script itself is tried. It prints "equal", or "not installed".
"""

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.flat_kernel import flash4_on_cpu, flash_on_cpu

from rlgraph.engines.forward import flash, flash4

smoke = "--smoke" in sys.argv
device = "cpu" if smoke else "cuda"
NEAR = 0.01  # of a result, as a share of its length: both round to bfloat16, each its own way
LENGTHS = [700, 1, 333, 128, 64, 1, 1000, 90]
OTHERS = [300, 2, 64, 700, 1, 90, 128, 1000]  # of keys, where queries see all of them
#       heads, of keys, size, window
CALLS = (16, 8, 64, None), (16, 4, 128, None), (16, 16, 128, 50), (8, 4, 256, None), (32, 8, 128, 3), (32, 8, 64, 200)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def results(heads: int, keys: int, size: int, window: int | None, *, causal: bool) -> list[torch.Tensor]:
    """Output, sums and gradients of one call."""
    draw, dtype = torch.Generator().manual_seed(0), torch.float64 if smoke else torch.bfloat16
    of_keys = LENGTHS if causal else OTHERS
    shapes = [(sum(LENGTHS), heads, size), (sum(of_keys), keys, size), (sum(of_keys), keys, size), (sum(LENGTHS), heads, size)]
    q, k, v, up = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
    place: Any = (starts(LENGTHS), starts(of_keys), max(LENGTHS), max(of_keys), causal and window is None, None, window)
    forward = flash.forward(q, k, v, *place)
    return [*forward[:2], *flash.backward(up, (q, k, v, *forward), *place)]


def share(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def differences(call: tuple[Any, ...], *, causal: bool) -> list[float]:
    with flash_on_cpu() if smoke else nullcontext():
        two = results(*call, causal=causal)
    return [share(found, expected) for found, expected in zip(loaded(call, causal=causal), two, strict=True)]


def loaded(call: tuple[Any, ...], *, causal: bool) -> list[torch.Tensor]:
    """The results of FlashAttention 4, which is put away again."""
    if smoke:
        with flash4_on_cpu():
            return results(*call, causal=causal)
    flash4._kernels[:] = kernels
    assert flash4.takes(call[0], call[2])
    try:
        return results(*call, causal=causal)
    finally:
        flash4._kernels.clear()


def compiled_gradients(call: tuple[Any, ...]) -> list[float]:
    """How far a compiled layer's output and gradients are from an eager one's."""
    heads, keys, size, window = call
    draw, found = torch.Generator().manual_seed(0), []
    shapes = [(1, heads, sum(LENGTHS), size), (1, keys, sum(LENGTHS), size), (1, keys, sum(LENGTHS), size)]
    leaves = [
        torch.randn(shape, generator=draw).to(device, torch.float32 if smoke else torch.bfloat16).requires_grad_() for shape in shapes
    ]
    flash4._kernels[:] = kernels
    with flash4_on_cpu() if smoke else nullcontext():
        for attend in (flash.flash, torch.compile(flash.flash, dynamic=True, fullgraph=True, backend="aot_eager" if smoke else "inductor")):
            out = attend(*leaves, starts(LENGTHS), max(LENGTHS), None, window, None)
            found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
    flash4._kernels.clear()
    return [share(other, eager) for eager, other in zip(*found, strict=True)]


began = time.perf_counter()
if not smoke and not flash4.load():
    print("not installed")
    sys.exit()
kernels = list(flash4._kernels)
flash4._kernels.clear()
print(f"imported in {time.perf_counter() - began:.1f} s")
for call in CALLS:
    for causal in (True, False) if call[3] is None else (True,):
        began = time.perf_counter()
        off = differences(call, causal=causal)
        print(f"{call}, causal {causal}: off by {[f'{x:.4f}' for x in off]}, in {time.perf_counter() - began:.1f} s", flush=True)
        assert max(off) < NEAR, off
for call in (CALLS[1], CALLS[2]):
    off = compiled_gradients(call)
    print(f"{call}, compiled: off by {[f'{x:.4f}' for x in off]}", flush=True)
    assert max(off) < NEAR, off
if not smoke:
    torch.use_deterministic_algorithms(True)
    one, other = (loaded(CALLS[1], causal=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), "deterministic algorithms gave other bits"
print("equal")
