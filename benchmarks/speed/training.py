"""Training speed on GPUs: the share of the dense bfloat16 peak that an update of packed 4k sequences reaches (MFU).

    python benchmarks/speed/training.py SHAPE:RANKS[:recompute|:selective][:compiled][:fused] … [--peak 989e12] [--json PATH]
    python benchmarks/speed/training.py toy:1 --smoke          # its first seconds, on a CPU

The peak is the hardware's own (H100 and H200: 989 TFLOP/s dense). Beside it stands the share of what a large matrix product reaches on
the same GPU in the same run, `matmul_flop_per_s`: what no kernel exceeds under that machine's limits of power.

FLOP a token are those of `timed_updates.row`. Seconds and peak stand beside what `rg.compile` estimates of the model's shape and the GPU,
with nothing measured. `recompute` computes whole layers again, `selective` their cheap part; compare:

    python benchmarks/speed/training.py 4B:1:fused 4B:1:selective:fused 4B:1:recompute:fused --json PATH

Six updates are timed after two of warm-up. Every rank is a process with a GPU of its own.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.predicted_update import predicted
from benchmarks.lib.timed_updates import PEAK, SMOKE, WARM_UP, begin_rank, end_rank, made_engine, of_ranks, row, timed_updates

LENGTH, SEQUENCES, MICRO_BATCH_TOKENS = 4096, 8, 8192
STEPS = 6 + WARM_UP
OPTIONS = "recompute", "selective", "compiled", "fused"


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


def recompute_of(options: Sequence[str]) -> bool | str:
    """The setting of `rg.Policy` that options name."""
    return "selective" if "selective" in options else "recompute" in options


def rank_process(spec: str, size: tuple[int, int], rank: int, world: int, rendezvous: str, results: Any) -> None:
    device = begin_rank(rank)
    shape, *options = spec.split(":")
    chosen: dict[str, Any] = {"recompute": recompute_of(options), "compiled": "compiled" in options}
    fused = "fused" in options
    engine = made_engine(shape, rank, world, rendezvous, device, fused=fused, micro_batch_tokens=MICRO_BATCH_TOKENS, **chosen)
    end_rank(timed_updates(engine, size, STEPS), rank, world, results)


def measure(spec: str, peak: float, matmul: float | None, size: tuple[int, int], gpu: str) -> dict[str, Any]:
    shape, ranks, *options = spec.split(":")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise SystemExit(f"'{spec}': there is no option {unknown[0]}; write some of {', '.join(OPTIONS)}")
    found = row(shape, size, int(ranks), peak, of_ranks(int(ranks), rank_process, (":".join([shape, *options]), size), 240))
    settings = {"recompute": recompute_of(options), "compiled": "compiled" in options, "fused_head": "fused" in options}
    found["predicted"] = predicted(shape, size, gpu, {"dp": int(ranks)}, min(MICRO_BATCH_TOKENS, size[0] * size[1]), settings)
    return found | {"options": options, "of_matmul": found["mfu"] * peak / matmul if matmul else None}


def main() -> None:
    parser = command_line(__doc__, smoke="two short sequences, on a CPU")
    parser.add_argument("specs", nargs="+")
    parser.add_argument("--peak", type=float, default=PEAK)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    matmul: float | None = None
    gpu = "H200"
    if not given.smoke:
        import torch

        gpu = torch.cuda.get_device_name()
        results = context.Queue()
        process = context.Process(target=matmul_rate, args=(results,))
        process.start()
        matmul = results.get(timeout=120)
        process.join()
        print(f"a large matrix product: {matmul / 1e12:.0f} TFLOP/s", flush=True)
    found: dict[str, Any] = {"peak_flop_per_s": given.peak, "matmul_flop_per_s": matmul, "runs": {}}
    for spec in given.specs:
        try:
            run = found["runs"][spec] = measure(spec, given.peak, matmul, SMOKE if given.smoke else (SEQUENCES, LENGTH), gpu)
        except Exception as error:  # noqa: BLE001 (one shape that does not fit must not lose the others)
            print(f"{spec}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        of_matmul = f" ({run['of_matmul']:.1%} of the product)" if matmul else ""
        print(
            f"{spec}: {run['step_s']:.2f} s, {run['tokens_per_s']:.0f} tokens/s, MFU {run['mfu']:.1%}{of_matmul}, "
            f"{run['peak_bytes'] / 2**30:.1f} GiB (predicted {run['predicted']['peak_bytes'] / 2**30:.1f}), "
            f"predicted {run['predicted']['step_s']:.2f} s",
            flush=True,
        )
        write_measured(given.json, found)


if __name__ == "__main__":
    main()
