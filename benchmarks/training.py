"""Training speed on GPUs: the share of the dense bfloat16 peak that an update of packed 4k sequences reaches (MFU).

    python benchmarks/training.py SHAPE:RANKS[:recompute][:compiled] … [--peak 989e12] [--json PATH]
    python benchmarks/training.py toy:1 --smoke          # its first seconds, on a CPU

The peak is the hardware's own (H100 and H200: 989 TFLOP/s dense). Beside it stands the share of what a large matrix product reaches on
the same GPU in the same run, `matmul_flop_per_s`: what no kernel exceeds under that machine's limits of power.

FLOP a token: 6 for each parameter but the embedding, which is a look-up (a tied one counts once, as the head), and
12 · layers · heads · head size · half the length for causal attention (PaLM, appendix B); recomputed activations don't count.
Six updates are timed after two of warm-up. Every rank is a process with a GPU of its own.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LENGTH, SEQUENCES, MICRO_BATCH_TOKENS = 4096, 8, 8192
STEPS, WARM_UP = 8, 2
SMOKE = 2, 32  # sequences and their length on a CPU
PEAK = 989e12  # dense bfloat16 of an H100 or H200 in its SXM form


def matmul_rate(results: Any) -> None:
    """Measure what a square product of 16384 reaches on the first GPU, random numbers, after it is warm."""
    import torch

    size = 16384
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        a @ b
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    results.put(2 * size**3 / statistics.median(times[10:]))


def rank_process(spec: str, rank: int, world: int, rendezvous: str, results: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist
    from shapes import VOCAB, config
    from transformers import Qwen3ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    import rlgraph as rg
    from rlgraph.engines.forward.heads import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.fsdp.sharding import backends

    finished: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    shape, *options = spec.split(":")
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config(shape)).eval()
    sequences, length = (SEQUENCES, LENGTH) if device == "cuda" else SMOKE
    if world > 1:
        dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=world)
    engine = FsdpEngine(
        PolicyHead(model),
        optimizer=rg.AdamW(),
        rank=rank,
        world=world,
        device=device,
        dtype=dtype,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        recompute="recompute" in options,
        compiled="compiled" in options,
    )
    generator = torch.Generator().manual_seed(0)
    prompt, response = length // 4, length + 1 - length // 4
    mask = torch.ones(sequences, response, dtype=torch.bool)
    batch = {
        "prompts": torch.randint(VOCAB, (sequences, prompt), generator=generator),
        "prompt_mask": torch.ones(sequences, prompt, dtype=torch.bool),
        "responses": torch.randint(VOCAB, (sequences, response), generator=generator),
        "response_mask": mask,
        "advantages": torch.randn(sequences, 1, generator=generator).expand(-1, response).contiguous(),
        "old_log_probs": torch.full(mask.shape, -12.0),
    }
    seconds = []
    for _ in range(STEPS):
        finished()
        start = time.perf_counter()
        engine.update(batch, rg.ClippedLoss())
        finished()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        results.put((seconds, torch.cuda.max_memory_allocated() if device == "cuda" else 0))
    if world > 1:
        dist.barrier()
    results.close()
    results.join_thread()  # what is put is on its way only when the queue's thread has sent it
    os._exit(0)


def measure(spec: str, peak: float, matmul: float | None, size: tuple[int, int]) -> dict[str, Any]:
    from shapes import SHAPES, VOCAB, parameters

    shape, ranks, *options = spec.split(":")
    world = int(ranks)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = (":".join([shape, *options]), world, f"file://{folder}/group", results)
        processes = [context.Process(target=rank_process, args=(given[0], rank, *given[1:])) for rank in range(world)]
        for process in processes:
            process.start()
        try:
            seconds, memory = results.get(timeout=240)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    hidden, layers, heads, _, _, tied = SHAPES[shape]
    sequences, length = size
    tokens = sequences * length
    multiplied = parameters(shape) - (0 if tied else VOCAB * hidden)
    flop = tokens * (6 * multiplied + 12 * layers * heads * 128 * length / 2)
    timed = seconds[WARM_UP:]
    median = statistics.median(timed)
    return {
        "ranks": world,
        "options": options,
        "steps": len(timed),
        "step_s": median,
        "spread_s": [min(timed), max(timed)],
        "tokens_per_s": tokens / median,
        "mfu": flop / median / peak / world,
        "of_matmul": flop / median / matmul / world if matmul else None,
        "peak_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--peak", type=float, default=PEAK)
    parser.add_argument("--smoke", action="store_true", help="two short sequences, on a CPU")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    matmul: float | None = None
    if not given.smoke:
        results = context.Queue()
        process = context.Process(target=matmul_rate, args=(results,))
        process.start()
        matmul = results.get(timeout=120)
        process.join()
        print(f"a large matrix product: {matmul / 1e12:.0f} TFLOP/s", flush=True)
    found: dict[str, Any] = {"peak_flop_per_s": given.peak, "matmul_flop_per_s": matmul, "runs": {}}
    for spec in given.specs:
        try:
            row = found["runs"][spec] = measure(spec, given.peak, matmul, SMOKE if given.smoke else (SEQUENCES, LENGTH))
        except Exception as error:  # noqa: BLE001 (one shape that does not fit must not lose the others)
            print(f"{spec}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        of_matmul = f" ({row['of_matmul']:.1%} of the product)" if matmul else ""
        print(
            f"{spec}: {row['step_s']:.2f} s, {row['tokens_per_s']:.0f} tokens/s, MFU {row['mfu']:.1%}{of_matmul}, "
            f"{row['peak_bytes'] / 2**30:.0f} GiB",
            flush=True,
        )
        if given.json:
            from weights import machine

            given.json.write_text(json.dumps(found | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
