"""Flat passes that compute the prompt of a group once, beside passes in which each response has its own copy: time, memory, log-probs.

    python benchmarks/speed/shared_prompts.py [--shapes 0.6B 1.7B 4B] [--groups 8] [--json PATH]
    python benchmarks/speed/shared_prompts.py --smoke          # a toy on a CPU

Prompts of 1,024 tokens with 16 responses of 256 each, random weights of Qwen3's shapes, bfloat16 on one GPU. Each figure is the median of
several updates, or scores of the whole batch, with the least and the most; the two ways alternate in one process, after some that
do not count. `--response-spread` draws lengths down to that share of the longest. Log-probs of the two ways are compared before any
update: they differ by rounding alone, and so do those of one way in passes of another size, which are given beside them.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import rlgraph as rg
from benchmarks.lib.command import command_line, write_measured

PROMPT, RESPONSES, RESPONSE, TOKENS = 1024, 16, 256, 16384
SMALL = 24, 4, 8, 256  # of --smoke: the same four numbers
WARM_UP, REPEATS = 2, 7
WAYS = {"shared": True, "own": False}


def batch_of(groups: int, sizes: tuple[int, int, int], spread: float) -> dict[str, Any]:
    """Make a batch of random tokens: groups of responses behind one prompt each."""
    from benchmarks.lib.shapes import VOCAB

    prompt, responses, most = sizes
    draw = torch.Generator().manual_seed(0)
    rows = groups * responses
    lengths = torch.randint(max(int(most * spread), 1), most + 1, (rows,), generator=draw)
    mask = torch.arange(most)[None] < lengths[:, None]
    prompts = torch.randint(1, VOCAB - 1, (groups, prompt), generator=draw).repeat_interleave(responses, 0)
    return {
        "prompts": prompts,
        "prompt_mask": torch.ones_like(prompts, dtype=torch.bool),
        "responses": torch.randint(1, VOCAB - 1, (rows, most), generator=draw) * mask,
        "response_mask": mask,
        "advantages": torch.randn(rows, 1, generator=draw).expand(-1, most).contiguous(),
        "old_log_probs": torch.full(mask.shape, -12.0),
    }


def tokens_of(batch: dict[str, Any], limit: int, *, shared: bool) -> tuple[int, int]:
    """Count the passes of a batch on one rank and the tokens that they compute."""
    from rlgraph.batching.packing import plan_micro_batches

    passes = plan_micro_batches(batch, 1, limit, flat=True, shared=shared)[0]
    return len(passes), sum(sequence.tokens for sequences in passes for sequence in sequences)


def timed(works: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Do the works alternately. Gives the median seconds of each, its spread, and its peak of memory on a GPU."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    peaks = dict.fromkeys(works, 0)
    for turn in range(WARM_UP + repeats):
        for name, work in works.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return {n: {"seconds": statistics.median(s), "spread_s": [min(s), max(s)], "peak_bytes": peaks[n]} for n, s in seconds.items()}


def apart(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """How far log-probs are from each other, in nats."""
    off = (one - other).abs()[mask]
    return {"mean_nats": off.mean().item(), "max_nats": off.max().item()}


def measured(shape: str, given: argparse.Namespace, device: str) -> dict[str, Any]:
    """Measure one shape: a trainer whose passes share prompts in turn and in turn do not."""
    from benchmarks.lib.timed_updates import made_engine

    *sizes, limit = SMALL if given.smoke else (PROMPT, RESPONSES, RESPONSE, TOKENS)
    batch = batch_of(given.groups, tuple(sizes), given.response_spread)  # type: ignore[arg-type]
    settings = {"compiled": given.compiled, "recompute": given.recompute}
    engine = made_engine(shape, 0, 1, "", device, fused=True, flat=True, micro_batch_tokens=limit, optimizer=rg.AdamW(lr=1e-6), **settings)

    def by(way: str, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            engine.shared = WAYS[way]
            return work()

        return run

    log_probs = {way: by(way, lambda: engine.scores(batch))() for way in WAYS}
    engine.micro_batch_tokens = limit // 2
    smaller = by("own", lambda: engine.scores(batch))()
    engine.micro_batch_tokens = limit
    others = by("own", lambda: engine.scores(batch | {"prompts": batch["prompts"].roll(sizes[1], 0)}))()
    mask, repeats = batch["response_mask"], 1 if given.smoke else REPEATS
    found: dict[str, Any] = {
        "passes and tokens": {way: tokens_of(batch, limit, shared=shared) for way, shared in WAYS.items()},
        "log_probs": apart(log_probs["shared"], log_probs["own"], mask),
        "log_probs of other passes": apart(smaller, log_probs["own"], mask),
        "log_probs behind other prompts": apart(others, log_probs["own"], mask),
        "scores": timed({way: by(way, lambda: engine.scores(batch)) for way in WAYS}, device, repeats),
        "update": timed({way: by(way, lambda: engine.update(batch, rg.ClippedLoss())) for way in WAYS}, device, repeats),
    }
    engine.close()
    for work in ("scores", "update"):
        found[work]["times as fast"] = found[work]["own"]["seconds"] / found[work]["shared"]["seconds"]
    return found


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model")
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "1.7B", "4B"])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--response-spread", type=float, default=1.0)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not given.smoke else "cpu"
    if given.smoke:
        given.shapes, given.groups = ["toy"], 2
    settings = {"groups": given.groups, "compiled": given.compiled, "recompute": given.recompute, "spread": given.response_spread}
    found: dict[str, Any] = {"settings": settings}
    for shape in given.shapes:
        try:
            found[shape] = measured(shape, given, device)
        except torch.OutOfMemoryError as error:  # a smaller GPU still measures the others
            found[shape] = {"error": str(error).splitlines()[0]}
        print(shape, json.dumps(found[shape], indent=1), flush=True)
        write_measured(given.json, found)


if __name__ == "__main__":
    main()
