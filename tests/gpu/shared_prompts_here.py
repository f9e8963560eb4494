"""bfloat16 passes that share prompts, by the kernels of a GPU, against float32 in PyTorch and against own prompts.

`shared_prompts_here.py FAMILY [--compiled]`, of support/families.py: llama, qwen3, mistral (a window), gpt_oss (sinks), deepseek_v3 (values
narrower than keys). First the calls of the kernel alone, output and gradients; then log-probs, gradients' norm and a step of a model.
`--smoke` takes the CPU for both, by which the script itself is tried.
"""

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from support.families import folder_of
from support.flat_kernel import flash_on_cpu
from support.tiny import WeightedLikelihood, batch_of
from support.trainer_engines import fsdp_engine

from rlgraph.batching.packing import pack_flat, plan_micro_batches
from rlgraph.engines.forward import flash, packed_attention
from rlgraph.engines.forward.head import PolicyHead
from rlgraph.values.optimizers import AdamW

FAMILY = sys.argv[1]
ROUGH = 4 if FAMILY == "gpt_oss" else 1  # rounding sends some tokens to other experts
MEAN, NORM, STEP = 0.08 * ROUGH, 0.10 * ROUGH, 0.12 * ROUGH  # nats, and shares: of bfloat16 in a small random model
NEAR = 0.02  # of the kernel's output and gradients, as a share of their length: bfloat16 rounds to 0.004
LENGTHS = [130, 1, 77, 0, 0, 52, 52, 125, 1, 1, 1, 1, 200, 300, 90, 10]  # groups of four, over several blocks of the kernel
smoke = "--smoke" in sys.argv
device = "cpu" if smoke else "cuda"


def groups() -> dict[str, torch.Tensor]:
    """Groups of four behind prompts of 100 to 260 tokens and of one, with tools' tokens in the responses."""
    found, draw = batch_of(LENGTHS, group=4, holes=True), torch.Generator().manual_seed(1)
    width, sizes = 260, torch.tensor([260, 1, 100, 129]).repeat_interleave(4)
    mask = torch.arange(width)[None] >= width - sizes[:, None]
    prompts = torch.randint(1, 96, (4, width), generator=draw).repeat_interleave(4, 0) * mask
    return found | {"prompts": prompts, "prompt_mask": mask, "responses": found["responses"] % 96}


def share(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float().cpu() - expected.float().cpu()).norm() / expected.float().norm())


def kernel_alone(batch: dict[str, torch.Tensor]) -> None:
    """Compare output and gradients of the calls in bfloat16 with PyTorch's in float32, of the same rounded numbers."""
    [[sequences]] = plan_micro_batches(batch, 1, 1 << 20, flat=True)
    part = pack_flat(batch, sequences, multiple=8)
    assert part.shared is not None
    length, draw = part.tokens.shape[1], torch.Generator().manual_seed(0)
    for size, window, sinks in ((64, None, False), (128, None, True), (128, 50, False), (64, 50, True), (192, None, False)):
        shapes = [(1, 16, length, size), (1, 4, length, size), (1, 4, length, 128 if size == 192 else size), (16,)]
        rounded = [torch.randn(shape, generator=draw).to(torch.bfloat16) for shape in shapes]
        up = torch.randn(1, length, 16, shapes[2][3], generator=draw).to(torch.bfloat16)
        results = []
        for place, dtype in (("cpu", torch.float32), (device, torch.float32 if smoke else torch.bfloat16)):
            leaves = [x.to(place, dtype).requires_grad_() for x in rounded]
            own, sink = part.to(torch.device(place)), leaves[3] if sinks else None
            if place == "cpu" and not results:
                settings: dict[str, Any] = {"cu_seq_lens_q": own.starts, "max_length_q": own.longest, "shared_prompts": own.shared}
                out = packed_attention.attend(None, *leaves[:3], None, sliding_window=window, s_aux=sink, **settings)[0]
            else:
                assert own.starts is not None
                out = flash.flash(*leaves[:3], own.starts, own.longest, None, window, sink, own.shared)[None]  # type: ignore[call-arg]
            results.append([out.detach(), *torch.autograd.grad(out, leaves[: 3 + sinks], up.to(place, dtype))])
        off = [share(found, expected) for expected, found in zip(*results, strict=True)]
        print(f"heads of {size}, window {window}, sinks {sinks}: off by", [f"{x:.4f}" for x in off], flush=True)
        assert max(off[:4]) < NEAR, off
        assert max(off) < 2 * NEAR, off


def trained(place: str, dtype: torch.dtype, **settings: Any) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Give log-probs, the gradient's norm, and the step of an optimizer that only scales the gradient."""
    adam = AdamW(lr=1.0, eps=100.0, grad_clip=1e9)
    engine = fsdp_engine(PolicyHead(folder), optimizer=adam, device=place, dtype=dtype, flat=True, **settings)
    before = {name: weight.cpu().clone() for name, weight in engine.weights().items()}
    scores = engine.scores(batch)
    norm = engine.update(batch, WeightedLikelihood())["actor/grad_norm"]
    steps = {name: before[name] - weight.cpu() for name, weight in engine.weights().items()}
    engine.close()
    return scores, norm, steps


def compared(what: str, found: Any, expected: Any, rough: float = 1.0) -> None:
    off = ((found[0] - expected[0]).abs() * mask).sum().item() / int(mask.sum())
    difference = sum(float((found[2][name] - expected[2][name]).square().sum()) for name in expected[2])
    step = (difference / sum(float(step.square().sum()) for step in expected[2].values())) ** 0.5
    print(f"{what}: log-probs {off:.5f} nats on average, norm {found[1]:.4f} and {expected[1]:.4f}, step {step:.4f}", flush=True)
    assert off < MEAN * rough, off
    assert abs(found[1] / expected[1] - 1) < NORM * rough, (found[1], expected[1])
    assert step < STEP * rough, step


logging.disable()
folder, batch = folder_of(FAMILY, Path()), groups()
mask = batch["response_mask"]
single = batch_of([2, 1, 1, 2])  # one token behind each prompt, which the kernel could take for a decode step
with flash_on_cpu() if smoke else nullcontext():
    kernel_alone(batch)
    kernel_alone(single)
half = torch.float32 if smoke else torch.bfloat16
exact, own, shared = trained("cpu", torch.float32, shared=False), trained(device, half, shared=False), trained(device, half)
compared("own prompts against float32", own, exact)
compared("shared prompts against float32", shared, exact)
compared("shared prompts against own prompts", shared, own)
compared("recomputed", trained(device, half, recompute=True), shared)
compared("in several passes", trained(device, half, micro_batch_tokens=700), shared)
again = trained(device, half)
assert torch.equal(again[0], shared[0]), "the same pass, other bits"
if "--compiled" in sys.argv:
    compared("compiled", trained(device, half, compiled=True), shared)
print("equal")
