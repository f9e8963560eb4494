"""What a decode step of vLLM holds: seconds of its kernels by kind, and of the host, beside the memory that it must read.

    python benchmarks/speed/decode_steps.py SHAPE [--sequences 256] [--tokens 1024] [--ways recorded compiled pages] [--json PATH]
    python benchmarks/speed/decode_steps.py tiny --smoke          # its first seconds, on a CPU

All sequences decode together. Before half of their tokens are written, 32 steps are timed and 16 profiled, and 32 more are scheduled in
vLLM's own way. `recorded` is rlgraph's engine as it is: CUDA graphs of the kernels that the model calls. `compiled` adds vLLM's own
compilation, which fuses norms and activations, and `pages` keeps keys and values in pages of 128 tokens instead of 16. What a step must
read are all weights once, and the keys and values of each sequence. `--host` also says in which functions of the host 32 further steps
spend their time.
"""

import cProfile
import json
import pstats
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.profiled_update import covered, kernels_of, profiler
from benchmarks.lib.timed_updates import of_ranks
from benchmarks.speed.generation import model, prompts

WAYS = "recorded", "compiled", "pages"
TIMED, PROFILED = 32, 16
KINDS = (  # of kernels, by their names; the first that matches
    ("attention", r"flash|fmha|attention"),
    ("products", r"gemm|nvjet|cutlass|splitk|cublas|matmul"),
    ("sampling", r"gumbel|sample|softmax|topk|argmax|logprob|logits|penalt|temperature|multinomial"),
    ("norms, rotations, activations", r"norm|rotary|rope|silu|act_and_mul|triton_(poi|red|per)"),
)


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "others")


def measured(folder: str, way: str, size: tuple[int, int], host: bool, rank: int, world: int, rendezvous: str, results: Any) -> None:
    """Decode with one engine, in a process of `of_ranks`; put what was seen."""
    import torch

    from rlgraph.engines.api import Request
    from rlgraph.engines.vllm import arguments
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.sampling import Sampling

    sequences, tokens = size
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": arguments.recorded_sizes(sequences)}
    by_way: dict[str, dict[str, Any]] = {
        "recorded": {},
        "compiled": {"compilation_config": {"mode": 3, **graphs}},
        "pages": {"block_size": 128},
    }
    more = by_way[way] if torch.cuda.is_available() else {}
    start = time.perf_counter()
    engine = VllmEngine(folder, max_model_len=max(64, tokens + 32), max_sequences=sequences, random_weights=True, engine_args=more)
    started = time.perf_counter() - start
    for i, prompt in enumerate(prompts(sequences)):
        engine.submit(Request(str(i), prompt, Sampling(max_tokens=tokens, ignore_eos=True), seed=i))
    timed, profiled = min(TIMED, tokens // 4), min(PROFILED, tokens // 8)
    for _ in range(tokens // 2 - timed * (2 + host) - profiled):
        engine.step()
    step_s = median_seconds(engine.step, timed)
    engine.scheduler.watched.add("each request")
    own_s = median_seconds(engine.step, timed)
    engine.scheduler.watched.clear()
    if host:
        print_host_profile(engine.step)
    with profiler() as found:
        start = time.perf_counter()
        for _ in range(profiled):
            engine.step()
        took = time.perf_counter() - start
    kernels = kernels_of(found.events())
    by_kind, by_name = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, (begin, end) in kernels:
        seconds = (end - begin) / 1e6 / profiled
        by_kind[kind(name)] += seconds
        by_name[name] += seconds
    for name in sorted(by_name, key=by_name.__getitem__, reverse=True)[:24]:
        print(f"  {1e3 * by_name[name]:7.3f} ms  {kind(name):30s} {name[:140]}", flush=True)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=18, max_name_column_width=60))
    results.put(
        {
            "start_s": started,
            "step_s": step_s,
            "own_scheduler_step_s": own_s,
            "profiled_step_s": took / profiled,
            "gpu_busy_s": covered(span for _, span in kernels) / 1e6 / profiled,
            "kernels": len(kernels) / profiled,
            "kernel_s": dict(by_kind),
        }
    )
    engine.close()


def median_seconds(step: Callable[[], object], steps: int) -> float:
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def print_host_profile(step: Callable[[], object]) -> None:
    """Print where the host spends its time in decode steps. The profiler adds to each call, so shares say more than seconds."""
    profile = cProfile.Profile()
    with profile:
        for _ in range(TIMED):
            step()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(40)


def bandwidth() -> float:
    """The bytes a second of the GPU's memory; an H200's where there is none."""
    import torch

    from rlgraph.plan.roofline import DEVICES, device_of

    found = device_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return (found or DEVICES["H200"]).bandwidth


def must_be_read(folder: str, sequences: int, tokens: int) -> int:
    """The bytes of the weights, and of the keys and values at half of the tokens, that a step reads; both in bfloat16."""
    from rlgraph.plan.model_shapes import ModelShape

    of = ModelShape.from_config(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    assert of is not None, folder
    return 2 * of.active_parameters + sequences * of.kv_bytes_per_token() * tokens // 2


def main() -> None:
    parser = command_line(__doc__, smoke="few and short responses of a tiny model")
    parser.add_argument("folder", help="a model folder, smollm2, or the name of a shape of shapes.py")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--models", default=".models")
    parser.add_argument("--host", action="store_true", help="print the functions of the host that a step spends its time in")
    given = parser.parse_args()
    size = (8, 32) if given.smoke else (given.sequences, given.tokens)
    folder = model(given.folder, given.models)
    read = must_be_read(folder, *size)
    least = read / bandwidth()
    found: dict[str, Any] = {"model": given.folder, "sequences": size[0], "tokens": size[1], "bytes": read, "memory_s": least, "ways": {}}
    for way in given.ways:
        row = found["ways"][way] = of_ranks(1, measured, (folder, way, size, given.host), 400)
        kinds = ", ".join(f"{name} {1e3 * value:.2f}" for name, value in sorted(row["kernel_s"].items(), key=lambda each: -each[1]))
        print(
            f"{way}: a step {1e3 * row['step_s']:.2f} ms (memory alone {1e3 * least:.2f}, by vLLM's own scheduler "
            f"{1e3 * row['own_scheduler_step_s']:.2f}), GPU busy {1e3 * row['gpu_busy_s']:.2f} ms, "
            f"{row['kernels']:.0f} kernels: {kinds}; started in {row['start_s']:.1f} s",
            flush=True,
        )
        write_measured(given.json, found)


if __name__ == "__main__":
    main()
