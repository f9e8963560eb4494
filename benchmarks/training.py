"""Training speed on GPUs: the share of the dense bfloat16 peak that an update of packed 4k sequences reaches (MFU).

    python benchmarks/training.py SHAPE:RANKS[:recompute][:compiled] … [--peak 989e12] [--json PATH]
    python benchmarks/training.py tiny:1 --smoke          # its first seconds, on a CPU

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
from pathlib import Path
from typing import Any

LENGTH, SEQUENCES, MICRO_BATCH_TOKENS, STEPS = 4096, 8, 8192, 8


def rank_process(spec: str, rank: int, world: int, rendezvous: str, results: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist
    from shapes import VOCAB, config
    from transformers import Qwen3ForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    import rlgraph as rg
    from rlgraph.engines import heads
    from rlgraph.engines.fsdp import FsdpEngine
    from rlgraph.engines.sharding import backends

    shape, *options = spec.split(":")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config(shape)).eval()
    heads.load_causal = lambda path: model  # type: ignore[attr-defined]
    if world > 1:
        dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=world)
    engine = FsdpEngine(
        heads.PolicyHead("random"),
        optimizer=rg.AdamW(),
        rank=rank,
        world=world,
        device="cuda",
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        recompute="recompute" in options,
        compiled="compiled" in options,
    )
    generator = torch.Generator().manual_seed(0)
    prompt, response = 96, LENGTH + 1 - 96
    mask = torch.ones(SEQUENCES, response, dtype=torch.bool)
    batch = {
        "prompts": torch.randint(VOCAB, (SEQUENCES, prompt), generator=generator),
        "prompt_mask": torch.ones(SEQUENCES, prompt, dtype=torch.bool),
        "responses": torch.randint(VOCAB, (SEQUENCES, response), generator=generator),
        "response_mask": mask,
        "advantages": torch.randn(SEQUENCES, 1, generator=generator).expand(-1, response).contiguous(),
        "old_log_probs": torch.full(mask.shape, -12.0),
    }
    seconds = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.update(batch, rg.ClippedLoss())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        results.put((seconds, torch.cuda.max_memory_allocated()))
    if world > 1:
        dist.barrier()
    results.close()
    results.join_thread()  # what is put is on its way only when the queue's thread has sent it
    os._exit(0)


def measure(spec: str, peak: float) -> dict[str, Any]:
    from shapes import SHAPES, parameters

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
    _, layers, heads, *_ = SHAPES[shape]
    tokens = SEQUENCES * LENGTH
    flop = tokens * (6 * parameters(shape) + 12 * layers * heads * 128 * LENGTH / 2)
    median = statistics.median(seconds[2:])
    return {
        "ranks": world,
        "options": options,
        "step_s": median,
        "spread_s": [min(seconds[2:]), max(seconds[2:])],
        "tokens_per_s": tokens / median,
        "mfu": flop / median / peak / world,
        "peak_bytes": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--peak", type=float, default=790e12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, Any] = {"peak_flop_per_s": given.peak, "runs": {}}
    for spec in given.specs:
        try:
            row = found["runs"][spec] = measure(spec, given.peak)
        except Exception as error:  # noqa: BLE001 (one shape that does not fit must not lose the others)
            print(f"{spec}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        print(
            f"{spec}: {row['step_s']:.2f} s, {row['tokens_per_s']:.0f} tokens/s, MFU {row['mfu']:.1%}, {row['peak_bytes'] / 2**30:.0f} GiB",
            flush=True,
        )
    if given.json:
        from weights import machine

        given.json.write_text(json.dumps(found | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
