"""The largest models on two GPUs: seconds to write, to load and to update, and memory beside what a plan counts.

    python benchmarks/speed/large.py SHAPE [--moments 16bit] [--sequences 8] [--length 4096] [--folder PATH] [--json PATH]
    python benchmarks/speed/large.py 32B --json benchmarks/results/large_32b_h200.json            # two GPUs of 141 GB
    python benchmarks/speed/large.py 30B-A3B --json benchmarks/results/large_30b_a3b_h200.json
    python benchmarks/speed/large.py pair --smoke
    python benchmarks/speed/large.py pair-moe --smoke                                             # their first seconds, on a CPU

It writes random bfloat16 weights to files of 5 GB, in a process that ends before the ranks start, and deletes them at the end. Two ranks
then read their boxes of a dense model by FSDP2, or share the experts of a mixture, and take three updates: the moments on the host,
activations recomputed, the head fused. The first two updates are a warm-up. "plan" is what `rg.compile` counts before anything starts.
Host memory while loading is as in `loading.py`. Each part is printed, and written to the JSON, when it is done.
"""

import json
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.timed_updates import PEAK, SMOKE, begin_rank, row, timed_updates
from benchmarks.speed.loading import PeakSampler, counted, host_peak, memory
from benchmarks.speed.parallel import Run, predicted_of

WORLD, STEPS = 2, 3
FILE_BYTES, PIECE, WRITERS = 5 << 30, 1 << 25, 12  # bytes of a file, numbers that are drawn at once, and threads
SPARE_BYTES = 2 << 30  # of the disk
SAMPLE_S = 0.02
PART_S = 300.0  # that no part takes
Tensors = list[tuple[str, tuple[int, ...]]]


def files_of(tensors: Tensors, most: int = FILE_BYTES) -> Iterator[Tensors]:
    """Group tensors, in order: a file ends before the tensor with which it would have more bytes than `most`.

    >>> [[name for name, _ in file] for file in files_of([("a", (4,)), ("b", (4,)), ("c", (9,)), ("d", (1,))], 16)]
    [['a', 'b'], ['c'], ['d']]
    """
    held: Tensors = []
    size = 0
    for name, shape in tensors:
        own = 2 * _numel(shape)
        if held and size + own > most:
            yield held
            held, size = [], 0
        held.append((name, shape))
        size += own
    yield held


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def write_process(shape: str, folder: str) -> None:
    """Write a folder with a model of this shape; random numbers come from a GPU where there is one."""
    import torch

    from benchmarks.lib.shapes import config, tensors_of
    from rlgraph.engines.hf.pretrained import byte_tokenizer

    tensors = list(tensors_of(shape))
    size = sum(2 * _numel(shape) for _, shape in tensors)
    free = shutil.disk_usage(folder).free
    if free < size + SPARE_BYTES:
        raise SystemExit(f"'{folder}' has {free / 1e9:.0f} GB left, and {shape} takes {size / 1e9:.0f} GB: name another disk with --folder")
    files = list(files_of(tensors))
    names = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ThreadPoolExecutor(WRITERS if device == "cuda" else os.cpu_count()) as pool:
        places = (Path(folder, name) for name in names)
        list(pool.map(_write_file, places, files, range(len(files)), [device] * len(files)))
    index = {name: file for file, held in zip(names, files, strict=True) for name, _ in held}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    byte_tokenizer().save_pretrained(folder)
    config(shape).save_pretrained(folder)


def _write_file(file: Path, tensors: Tensors, seed: int, device: str) -> None:
    import torch

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + 2 * _numel(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = torch.Generator(device).manual_seed(seed)
    largest = min(PIECE, max(_numel(shape) for _, shape in tensors))
    drawn = torch.empty(largest, dtype=torch.bfloat16, device=device)
    held = torch.empty(largest, dtype=torch.bfloat16, pin_memory=device == "cuda")
    with file.open("wb", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, shape in tensors:
            for start in range(0, _numel(shape), largest):
                part = min(largest, _numel(shape) - start)
                numbers = drawn[:part].normal_(0, 0.02, generator=draw) if len(shape) > 1 else drawn[:part].fill_(1)
                held[:part].copy_(numbers)
                left = memoryview(held[:part].view(torch.uint8).numpy())  # type: ignore[arg-type]
                while left:
                    left = left[out.write(left) :]


def rank_process(given: dict[str, Any], rank: int, rendezvous: str, results: Any) -> None:
    """Load this rank's boxes and take the updates; put `(rank, part, what was found)` for each part."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = begin_rank(rank)
    import torch
    import torch.distributed as dist

    import rlgraph as rg
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.fsdp.sharding import backends
    from rlgraph.values.trainer import TrainerSettings

    dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=WORLD)
    optimizer = rg.AdamW(moments=given["moments"])
    common: dict[str, Any] = {"rank": rank, "world": WORLD, "device": device}
    before = FsdpEngine(PolicyHead(given["tiny"]), TrainerSettings(), **common)  # imports and libraries are in the base line
    before.close()
    on_gpu = device == "cuda"

    def device_peak() -> int:
        return torch.cuda.max_memory_allocated() if on_gpu else 0

    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    at_first = torch.cuda.memory_allocated() if on_gpu else 0
    dist.barrier()
    base = memory()
    sampler, start = PeakSampler(SAMPLE_S), time.perf_counter()
    engine = FsdpEngine(
        PolicyHead(given["folder"], fused=True),
        TrainerSettings(
            optimizer=optimizer, micro_batch_tokens=given["passes"], recompute=True, offload="moments", expert_parallel=given["expert"]
        ),
        **common,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    own = sum(weight.numel() for weight in engine.weights().values())
    results.put((rank, "loaded", {"s": seconds, "samples": sampler.stop(), "device": device_peak() - at_first, "parameters": own}))
    dist.barrier()
    for step in range(STEPS):
        took = timed_updates(engine, given["size"], 1)[0]
        reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
        results.put((rank, f"update {step}", {"s": took, "device": device_peak(), "reserved": reserved}))
    results.put((rank, "ended", {"host": memory() - base}))
    dist.barrier()
    results.close()
    results.join_thread()  # what is put is on its way only when the queue's thread has sent it
    os._exit(0)


def parts_of(given: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Run the ranks, and yield each part's name and what all ranks found, when the last has it. Ends them if one dies."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as store:
        processes = [context.Process(target=rank_process, args=(given, rank, f"file://{store}/group", results)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        try:
            came: dict[tuple[str, int], dict[str, Any]] = {}
            for part in ("loaded", *(f"update {step}" for step in range(STEPS)), "ended"):
                yield part, _gathered(part, came, results, processes)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _gathered(part: str, came: dict[tuple[str, int], dict[str, Any]], results: Any, processes: list[Any]) -> list[dict[str, Any]]:
    """Wait until all ranks have found a part, and keep in `came` also what a rank that is ahead has found since."""
    until = time.monotonic() + PART_S
    while not all((part, rank) in came for rank in range(WORLD)):
        try:
            rank, own, what = results.get(timeout=1)
        except queue.Empty:
            died = [rank for rank, process in enumerate(processes) if process.exitcode]
            if died or time.monotonic() > until:
                raise SystemExit(f"{part}: " + (f"rank {died[0]} died" if died else f"not there after {PART_S:.0f} s")) from None
            continue
        came[own, rank] = what
    return [came[part, rank] for rank in range(WORLD)]


def of_plan(given: dict[str, Any], shape: str, gpu: str) -> dict[str, float]:
    """What a plan counts of the update, on a GPU and on the host."""
    import rlgraph as rg

    way = "dp2" if given["expert"] == 1 else "ep2"
    return predicted_of(
        Run.of(f"{shape}:{way}:offload", passes=given["passes"]), given["size"], gpu, optimizer=rg.AdamW(moments=given["moments"])
    )


def measured(shape: str, given: dict[str, Any], gpu: str, on_gpus: bool, found: dict[str, Any]) -> Iterator[str]:
    """Do all of it, and yield a line for each part; `found` has what was found so far."""
    context = multiprocessing.get_context("spawn")
    plan = found["plan"] = of_plan(given, shape, gpu)
    on_gpu, on_host = plan["peak_bytes"] / 1e9, plan["host_bytes"] / 1e9
    yield f"plan: {on_gpu:.1f} GB on a GPU, {on_host:.1f} GB of moments on the host, {plan['step_s']:.1f} s an update"
    start = time.perf_counter()
    writer = context.Process(target=write_process, args=(shape, given["folder"]))
    writer.start()
    writer.join()
    if writer.exitcode:
        raise SystemExit("the weights were not written")
    seconds, size = time.perf_counter() - start, sum(file.stat().st_size for file in Path(given["folder"]).glob("*.safetensors"))
    found["write"] = {"s": seconds, "bytes": size}
    yield f"wrote {size / 1e9:.1f} GB in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s"
    counts = counted(given["folder"], WORLD, on_gpus)
    took: list[float] = []
    for part, ranks in parts_of(given):
        device = max((rank.get("device", 0) for rank in ranks), default=0)
        seconds = max(rank.get("s", 0.0) for rank in ranks)
        if part == "loaded":
            host = host_peak([rank["samples"] for rank in ranks])
            found["load"] = {
                "s": seconds,
                "parameters": sum(rank["parameters"] for rank in ranks),
                "host_peak_bytes": host,
                "host_counted_bytes": counts["host"],
                "device_peak_bytes": device,
                "device_counted_bytes": counts["device"],
            }
            yield (
                f"loaded in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s of files: host {host / 1e9:.3f} GB of "
                f"{counts['host'] / 1e9:.3f} counted, device {device / 1e9:.2f} GB of {counts['device'] / 1e9:.2f}"
            )
        elif part == "ended":
            found["host_bytes"] = sum(rank["host"] for rank in ranks)
            yield f"host {found['host_bytes'] / 1e9:.1f} GB over the base line (plan {plan['host_bytes'] / 1e9:.1f})"
        else:
            took.append(seconds)
            found["update_s"] = took
            reserved = max(rank["reserved"] for rank in ranks)
            yield f"{part}: {seconds:.2f} s, device {device / 1e9:.1f} GB, {reserved / 1e9:.1f} GB with what torch keeps"
            if len(took) == STEPS:
                row_found = found["update"] = row(shape, given["size"], WORLD, given["peak"], (took, device))
                found["reserved_bytes"] = reserved
                share = device / plan["peak_bytes"] - 1
                yield (
                    f"an update {row_found['step_s']:.2f} s (plan {plan['step_s']:.2f}), {row_found['tokens_per_s']:.0f} tokens/s, MFU "
                    f"{row_found['mfu']:.1%}, device {device / 1e9:.1f} GB (plan {plan['peak_bytes'] / 1e9:.1f}, {share:+.1%})"
                )


def main() -> None:
    parser = command_line(__doc__, smoke="two short sequences, on a CPU")
    parser.add_argument("shape")
    parser.add_argument("--moments", default="16bit", choices=("32bit", "16bit"))
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--pass-tokens", type=int, default=0, help="of a pass; without it, a sequence")
    parser.add_argument("--peak", type=float, default=PEAK)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the weights lie while it runs")
    parser.add_argument("--plan", action="store_true", help="print what a plan counts, and end")
    asked = parser.parse_args()
    if asked.smoke and asked.json:
        parser.error("--smoke measures nothing: leave out --json")
    import torch

    import rlgraph as rg
    from benchmarks.lib.shapes import MIXTURES

    count = torch.cuda.device_count()  # makes no CUDA context, which would take memory of a rank's GPU
    if count not in (0, 1) and count < WORLD:
        parser.error(f"it takes {WORLD} GPUs")
    given: dict[str, Any] = {
        "size": SMOKE if asked.smoke else (asked.sequences, asked.length),
        "passes": SMOKE[1] if asked.smoke else asked.pass_tokens or asked.length,
        "moments": asked.moments,
        "expert": 2 if asked.shape in MIXTURES else 1,
        "peak": asked.peak,
    }
    gpu = torch.cuda.get_device_name() if count else "H200"
    if asked.plan:
        print(of_plan(given, asked.shape, gpu))
        return
    found: dict[str, Any] = {"script": "benchmarks/speed/large.py", "shape": asked.shape, "peak_flop_per_s": asked.peak, **given}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="rlgraph-large-") as folder:
        given |= {"folder": str(Path(folder, "model")), "tiny": rg.model_folder("tiny", folder)}
        Path(folder, "model").mkdir()
        for line in measured(asked.shape, given, gpu, count > 0, found):
            print(f"{time.perf_counter() - begun:6.1f} s  {asked.shape}: {line}", flush=True)
            from benchmarks.lib.machine import machine

            write(asked.json, found | {"machine": machine()})


if __name__ == "__main__":
    main()
