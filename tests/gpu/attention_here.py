"""bfloat16 passes packed flat, by the kernels of a GPU, against float32 on a CPU: log-probs, gradients' norm and a step; then compiled.

`attention_here.py FAMILY`, of support/families.py: llama, mistral (a window), gemma2 (soft caps), gpt_oss (sinks), deepseek_v3 (values
narrower than keys). `--smoke` takes the CPU for both, by which the script itself is tried.
"""

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.families import folder_of
from support.tiny import WeightedLikelihood
from support.trainer_engines import fsdp_engine

from rlgraph.engines.forward import packed_attention, self_test
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.values.optimizers import AdamW

ROUGH = 4 if sys.argv[1] == "gpt_oss" else 1  # rounding sends some tokens to other experts
MEAN, NORM, STEP = 0.08 * ROUGH, 0.10 * ROUGH, 0.12 * ROUGH  # nats, and shares: of bfloat16 in a small random model
smoke = "--smoke" in sys.argv
device = "cpu" if smoke else "cuda"
folder = folder_of(sys.argv[1], Path())
batch = self_test._batch()
batch["advantages"] = torch.randn(batch["responses"].shape, generator=torch.Generator().manual_seed(1))
mask = batch["response_mask"]


def trained(place: str, dtype: torch.dtype, **settings: Any) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Give log-probs, the gradient's norm, and the step of an optimizer that only scales the gradient."""
    engine = fsdp_engine(
        PolicyHead(folder), optimizer=AdamW(lr=1.0, eps=100.0, grad_clip=1e9), device=place, dtype=dtype, flat=True, **settings
    )
    before = {name: weight.cpu().clone() for name, weight in engine.weights().items()}
    scores = engine.scores(batch)
    norm = engine.update(batch, WeightedLikelihood())["actor/grad_norm"]
    steps = {name: before[name] - weight.cpu() for name, weight in engine.weights().items()}
    engine.close()
    return scores, norm, steps


def apart(steps: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """How far two steps are from each other, by the length of the second."""
    difference = sum(float((steps[name] - others[name]).square().sum()) for name in others)
    return (difference / sum(float(step.square().sum()) for step in others.values())) ** 0.5


logging.disable()
if not smoke:  # the kernel alone in bfloat16, the model in float32: what the start of a job tries
    packed_attention.register()
    for dtype in (torch.float32, torch.bfloat16):
        found = self_test.trainer_results(folder, device="cuda", dtype=dtype)
        print(dtype, {way: str(result) for way, result in found.items()})
        assert all(result.right for result in found.values()), found
exact = trained("cpu", torch.float32)
half = trained(device, torch.bfloat16)
off = ((half[0] - exact[0]).abs() * mask).sum().item() / int(mask.sum())
print(f"bfloat16 against float32: log-probs {off:.4f} nats on average")
print(f"norm {half[1]:.4f} and {exact[1]:.4f}, step {apart(half[2], exact[2]):.4f}")
assert off < MEAN, off
assert abs(half[1] / exact[1] - 1) < NORM, (half[1], exact[1])
assert apart(half[2], exact[2]) < STEP
if not smoke:
    again = trained(device, torch.bfloat16)
    assert torch.equal(half[0], again[0]), "the same pass, other bits"
    recomputed = trained(device, torch.bfloat16, recompute=True)
    assert apart(recomputed[2], half[2]) < 1e-3, apart(recomputed[2], half[2])
    single = trained(device, torch.float32)
    assert torch.allclose(single[0], exact[0], atol=1e-3), (single[0] - exact[0]).abs().max()
    assert apart(single[2], exact[2]) < 1e-3
compiled = trained(device, torch.float32 if smoke else torch.bfloat16, compiled=True) if "--compiled" in sys.argv else None
if compiled is not None:
    base = exact if smoke else half
    off = ((compiled[0] - base[0]).abs() * mask).sum().item() / int(mask.sum())
    print(f"compiled against eager: log-probs {off:.5f} nats on average, step {apart(compiled[2], base[2]):.4f}")
    assert off < MEAN / 2, off
    assert apart(compiled[2], base[2]) < STEP / 2
print("equal")
