"""Attention in both directions within images, with the kernel of a GPU in bfloat16, against PyTorch in float32.

First the call of the kernel, output and gradients; then log-probs and gradients' norm of a small random Gemma 3 in every layout, and
compiled. `--smoke` takes the CPU and float32 for both.
"""

import itertools
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support import seeing
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward.head import PolicyHead
from rlgraph.engines.forward.image_blocks import ImageBlocks
from rlgraph.values.optimizers import AdamW

SMOKE = "--smoke" in sys.argv
DEVICE, HALF = ("cpu", torch.float32) if SMOKE else ("cuda", torch.bfloat16)
NEAR, MEAN, NORM = 0.02, 0.08, 0.10  # shares and nats: of rounding to bfloat16, in a small random model


def kernel_alone() -> None:
    """Compare two images of 256 tokens in a sequence, and one in the next, with heads as wide as Gemma's."""
    row = torch.arange(1500)[None] // 1000
    place = torch.arange(1500)
    places = (((place >= 30) & (place < 286)) | ((place >= 600) & (place < 856)) | ((place >= 1010) & (place < 1266)))[None]
    draw = torch.Generator().manual_seed(0)
    rounded = [torch.randn(1, heads, 1500, 256, generator=draw).to(torch.bfloat16) for heads in (8, 4, 4)]
    up = torch.randn(768, 8, 256, generator=draw).to(torch.bfloat16)
    for window in (None, 512, 100):
        results = []
        for at, dtype in (("cpu", torch.float32), (DEVICE, HALF)):
            leaves = [x.to(at, dtype).requires_grad_() for x in rounded]
            out = ImageBlocks.of(places.to(at), row.to(at)).attend(*leaves, None, window)  # type: ignore[misc, arg-type]
            results.append([out.detach(), *torch.autograd.grad(out, leaves, up.to(at, dtype))])
        off = [float((y.float().cpu() - x).norm() / x.norm()) for x, y in zip(*results, strict=True)]
        print(f"window {window}: off by", [f"{x:.4f}" for x in off], flush=True)
        assert max(off) < NEAR, off


def trained(at: str, dtype: torch.dtype, **layout: Any) -> tuple[torch.Tensor, float]:
    """Give log-probs and the gradient's norm."""
    optimizer = AdamW(lr=1e-3, grad_clip=1e9)
    with closing(fsdp_engine(PolicyHead(folder), optimizer=optimizer, device=at, dtype=dtype, micro_batch_tokens=100, **layout)) as engine:
        return engine.scores(batch), engine.update(batch, WeightedLikelihood())["actor/grad_norm"]


kernel_alone()
with tempfile.TemporaryDirectory() as scratch:
    folder = seeing.folder_of("gemma3", Path(scratch))
    batch = seeing.batch_of(folder, "gemma3")
    mask = batch["response_mask"]
    exact = trained("cpu", torch.float32, flat=False, shared=False)
    layouts = [dict(zip(("flat", "shared"), each, strict=True)) for each in itertools.product((False, True), repeat=2)]
    for layout in [*layouts, {"flat": True, "recompute": True}, {"flat": True, "compiled": True}]:
        found = trained(DEVICE, HALF, **layout)
        off = float((found[0] - exact[0]).abs()[mask].mean())
        print(f"{layout}: log-probs {off:.5f} nats on average, norm {found[1]:.4f} and {exact[1]:.4f}", flush=True)
        assert off < MEAN, off
        assert abs(found[1] / exact[1] - 1) < NORM, (found[1], exact[1])
print("equal")
