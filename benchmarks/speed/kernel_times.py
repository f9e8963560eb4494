"""The chunked log-probs and the RMS norm of a training pass beside Liger's kernels, and the head with and without whole logits: time,
memory and error, on one GPU.

    python benchmarks/speed/kernel_times.py [--json PATH]
    python benchmarks/speed/kernel_times.py --smoke          # ours alone, small, on a CPU

Liger is no dependency: install it with `pip install liger-kernel==0.8.5`. Each figure is the median of a forward and a backward pass;
passes of the two sides alternate. The error is the largest against float64 over 64 rows. Liger's `cross_entropy` writes its loss in the
type of the logits, so it is also timed with logits cast to float32 first.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch.nn.functional import rms_norm

from benchmarks.lib.command import command_line, write
from rlgraph.engines.forward.head import Scored, head_scores, token_scores

VOCAB, ROWS, CHECKED, REPEATS = 151936, 8192, 64, 15
HEADS = {"head of 0.6B": (16384, 1024), "head of 8B": (16384, 4096), "head of 32B": (8192, 5120)}  # tokens, hidden
NORMS = {"hidden of 4B": (8192, 2560), "heads of 4B": (8192 * 32, 128), "hidden of SmolLM2": (32768, 576)}
Pass = Callable[[], torch.Tensor]


def timed(passes: Mapping[str, Pass], device: str) -> dict[str, dict[str, float]]:
    """Run the passes alternately; give median seconds and the additional memory of each, in bytes."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in passes}
    for turn in range(REPEATS if device == "cuda" else 2):
        for name, run in passes.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
                found[name]["bytes"] = torch.cuda.max_memory_allocated() - before
            if turn >= 2 or device == "cpu":
                found[name]["seconds"].append(time.perf_counter() - start)
    return {name: row | {"seconds": statistics.median(row["seconds"])} for name, row in found.items()}


def log_probs(device: str, liger: Any) -> dict[str, Any]:
    """Compare log-probs `[N]` of logits `[N, V]` in bfloat16, with their gradient."""
    rows, vocab = (ROWS, VOCAB) if device == "cuda" else (CHECKED, 1024)
    torch.manual_seed(0)
    logits = (torch.randn(rows, vocab, device=device) * 3).to(torch.bfloat16)
    tokens = torch.randint(vocab, (rows,), device=device)
    grads = torch.randn(rows, device=device)

    def ours() -> torch.Tensor:
        given = logits.detach().requires_grad_()
        found, _ = token_scores(given, tokens)
        torch.autograd.backward(found, grads)
        return found.detach()

    def torchs() -> torch.Tensor:
        given = logits.detach().requires_grad_()
        found = -torch.nn.functional.cross_entropy(given.float(), tokens, reduction="none")
        torch.autograd.backward(found, grads)
        return found.detach()

    def ligers(dtype: torch.dtype) -> torch.Tensor:
        given = logits.detach().requires_grad_()
        # The kernel writes the gradient over its input, hence a copy: a head's output may be needed again, as for entropies.
        copy = given.clone() if dtype == given.dtype else given.to(dtype)
        found: torch.Tensor = -liger.liger_cross_entropy(copy, tokens, reduction="none")
        torch.autograd.backward(found, grads.to(found.dtype))
        return found.detach()

    passes: dict[str, Pass] = {"rlgraph": ours, "torch, float32": torchs}
    if liger is not None:
        passes |= {"liger": lambda: ligers(torch.bfloat16), "liger, float32": lambda: ligers(torch.float32)}
    true = logits[:CHECKED].double().log_softmax(-1).gather(-1, tokens[:CHECKED, None])[:, 0]
    errors = {name: float((run()[:CHECKED].double() - true).abs().max()) for name, run in passes.items()}
    return {name: row | {"worst_error_nats": errors[name]} for name, row in timed(passes, device).items()}


def head(device: str, shape: tuple[int, int]) -> dict[str, Any]:
    """Compare log-probs and entropies `[N]` of states `[N, H]` by the head `[V, H]`, with both gradients: whole logits, or a few rows."""
    rows, hidden = shape if device == "cuda" else (CHECKED * 4, shape[1])
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    linear = torch.nn.Linear(hidden, VOCAB, bias=False, device=device, dtype=dtype)
    states = torch.randn(rows, hidden, device=device, dtype=dtype).requires_grad_()
    tokens, grads = torch.randint(VOCAB, (rows,), device=device), torch.randn(2, rows, device=device)

    def run(*, fused: bool, entropy: bool) -> torch.Tensor:
        states.grad = linear.weight.grad = None
        found = head_scores(linear, states, tokens, Scored(lambda logits: logits, entropy=entropy), fused=fused)
        torch.autograd.backward(found, list(grads[: len(found)]))
        return found[0].detach()

    passes: dict[str, Pass] = {
        f"{'fused' if fused else 'whole logits'}{', entropy' if entropy else ''}": partial(run, fused=fused, entropy=entropy)
        for entropy in (False, True)
        for fused in (False, True)
    }
    exact = linear.weight.detach()
    true = (states[:CHECKED].detach().float() @ exact.float().t()).double().log_softmax(-1).gather(-1, tokens[:CHECKED, None])[:, 0]
    errors = {name: float((one()[:CHECKED].double() - true).abs().max()) for name, one in passes.items()}
    return {name: row | {"worst_error_nats": errors[name]} for name, row in timed(passes, device).items()}


def norm(device: str, liger: Any, shape: tuple[int, int]) -> dict[str, Any]:
    """Compare the RMS norm `[N, D]` in bfloat16, with its gradients."""
    rows, width = shape if device == "cuda" else (CHECKED, shape[1])
    torch.manual_seed(0)
    given = torch.randn(rows, width, device=device).to(torch.bfloat16).requires_grad_()
    weight = torch.rand(width, device=device).to(torch.bfloat16).requires_grad_()
    grads = torch.randn(rows, width, device=device).to(torch.bfloat16)

    def run(of: Callable[[], torch.Tensor]) -> torch.Tensor:
        given.grad = weight.grad = None
        found = of()
        torch.autograd.backward(found, grads.clone())  # Liger's kernel writes over it
        return found.detach()

    passes: dict[str, Pass] = {"rlgraph (torch's kernel)": lambda: run(lambda: rms_norm(given, weight.shape, weight, 1e-6))}
    if liger is not None:
        passes["liger"] = lambda: run(lambda: liger.liger_rms_norm(given, weight, 1e-6))
    exact = given[:CHECKED].double()
    true = (exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()).detach()
    errors = {name: float((one()[:CHECKED].double() - true).abs().max()) for name, one in passes.items()}
    return {name: row | {"worst_error": errors[name]} for name, row in timed(passes, device).items()}


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not given.smoke else "cpu"
    liger = None
    if device == "cuda":
        import liger_kernel.transformers.functional as liger  # type: ignore[import-not-found, no-redef]
    found: dict[str, Any] = {"log_probs": log_probs(device, liger)}
    print(json.dumps(found, indent=1), flush=True)
    for name, shape in HEADS.items():
        try:
            found[name] = head(device, shape)
        except torch.OutOfMemoryError as error:  # a smaller GPU still measures the others
            found[name] = {"error": str(error).splitlines()[0]}
        print(name, json.dumps(found[name], indent=1), flush=True)
    for name, shape in NORMS.items():
        found[f"rms_norm, {name}"] = norm(device, liger, shape)
        print(name, json.dumps(found[f"rms_norm, {name}"], indent=1), flush=True)
    from benchmarks.lib.machine import machine

    write(given.json, found | machine() | {"liger": "0.8.5"})


if __name__ == "__main__":
    main()
