"""Loading of a trained model: seconds, and the peaks of host and device memory beside what a plan counts.

    python benchmarks/speed/loading.py SHAPE:RANKS … [--json PATH]
    python benchmarks/speed/loading.py 0.2B:2                  # two gloo ranks on a CPU
    python benchmarks/speed/loading.py 8B:1 8B:2 32B:2         # GPUs
    python benchmarks/speed/loading.py toy:2 --smoke

Each rank is a process. It loads a tiny model first, so that imports and libraries are in the base line, and then the shape, whose random
weights lie in bfloat16 in files of 5 GB at most. The host peak is the largest sum over the ranks of PSS (a page that several map counts
once) over the base line, sampled every 5 ms; pages of files that are still mapped are in it. The device peak is torch's. Beside the
seconds stands what reading the files twice takes, in the same run and after they have been read once.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write

FOLDER = Path(tempfile.gettempdir()) / "rlgraph-shapes"
SAMPLE_S = 0.005


def memory() -> int:
    """The proportional set size of this process, in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("this kernel has no smaps_rollup")


class PeakSampler:
    """Sample this process's PSS in a thread, every so many seconds; `samples` are (time, bytes over the base line)."""

    def __init__(self, every_s: float = SAMPLE_S) -> None:
        self.samples: list[tuple[float, int]] = []
        self._every_s = every_s
        self._base, self._ended = memory(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            self.samples.append((time.monotonic(), memory() - self._base))

    def stop(self) -> list[tuple[float, int]]:
        self._ended.set()
        self._thread.join()
        return self.samples


def rank_process(folder: str, tiny: str, rank: int, world: int, rendezvous: str, results: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist

    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.fsdp.sharding import backends
    from rlgraph.values.trainer import TrainerSettings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # as a worker's
    if world > 1:
        dist.init_process_group(backends(), init_method=rendezvous, rank=rank, world_size=world)

    def load(path: str) -> FsdpEngine:
        return FsdpEngine(PolicyHead(path), TrainerSettings(), rank=rank, world=world, device=device)

    before = load(tiny)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    if world > 1:
        dist.barrier()
    sampler, start = PeakSampler(), time.perf_counter()
    engine = load(folder)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    samples = sampler.stop()
    on_device = torch.cuda.max_memory_allocated() - allocated if device == "cuda" else 0
    results.put((rank, seconds, on_device, samples, sum(weight.numel() for weight in engine.weights().values())))
    if world > 1:
        dist.barrier()
    results.close()
    results.join_thread()  # what is put is on its way only when the queue's thread has sent it
    del before
    os._exit(0)


def read_twice(folder: str) -> float:
    """Seconds that reading all weights twice takes, in pieces."""
    piece, start = bytearray(1 << 24), time.perf_counter()
    for _ in range(2):
        for file in sorted(Path(folder).glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(piece):
                    pass
    return time.perf_counter() - start


def host_peak(ranks: list[list[tuple[float, int]]]) -> int:
    """The largest sum of the ranks' samples, each rank's newest at a time."""
    newest, peak = [0] * len(ranks), 0
    for _, rank, size in sorted((at, rank, size) for rank, samples in enumerate(ranks) for at, size in samples):
        newest[rank] = size
        peak = max(peak, sum(newest))
    return peak


def counted(folder: str, ranks: int, gpus: bool) -> dict[str, int]:
    """The bytes that a plan counts while models load: of the host, and of a GPU."""
    import rlgraph as rg
    from rlgraph.plan.memory import loading_peaks
    from rlgraph.plan.model_shapes import shapes_of

    policy = rg.Policy(folder, pool=rg.Pool("train", gpus=ranks) if gpus else rg.Pool("train"), data_parallel=ranks)
    rollout = rg.Generator(folder, pool=rg.Pool("rollout")).rollout(rg.prompts([{"prompt": "1"}], count=ranks))
    graph = rg.Graph("loading", policy.log_probs(rollout))
    cluster = rg.Cluster(gpus=ranks + 1, cpus=64) if gpus else rg.Cluster(cpus=64)
    workers = [worker for worker in rg.compile(graph, cluster).workers if worker.model == "policy"]
    found = {"device" if need.pool else "host": need.peak_bytes for need in loading_peaks(graph, cluster, workers, shapes_of(graph))}
    return {"device": 0, **found}


def measure(spec: str) -> dict[str, Any]:
    import rlgraph as rg
    from benchmarks.lib.shapes import random_model

    shape, _, count = spec.partition(":")
    world = int(count or 1)
    folder, tiny = random_model(shape, FOLDER), rg.model_folder("tiny", FOLDER)
    twice = read_twice(folder)  # the first pass may come from the disk, as the one of a first start
    warm = read_twice(folder)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as store:
        processes = [
            context.Process(target=rank_process, args=(folder, tiny, rank, world, f"file://{store}/group", results))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            found = sorted((results.get(timeout=550) for _ in processes), key=lambda row: row[0])
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    on_gpus = found[0][2] > 0
    estimate = counted(folder, world, on_gpus)
    return {
        "ranks": world,
        "parameters": sum(row[4] for row in found),
        "seconds": max(row[1] for row in found),
        "read_twice_s": warm,
        "first_read_twice_s": twice,
        "host_peak_bytes": host_peak([row[3] for row in found]),
        "host_counted_bytes": estimate["host"],
        "device_peak_bytes": max(row[2] for row in found),
        "device_counted_bytes": estimate["device"],
    }


def main() -> None:
    parser = command_line(__doc__, smoke="the same; for a small shape")
    parser.add_argument("specs", nargs="+", metavar="SHAPE:RANKS")
    given = parser.parse_args()
    found: dict[str, Any] = {"script": "benchmarks/speed/loading.py", "runs": {}}
    for spec in given.specs:
        row = found["runs"][spec] = measure(spec)
        device = f", device {row['device_peak_bytes'] / 1e9:.2f} GB of {row['device_counted_bytes'] / 1e9:.2f}"
        print(
            f"{spec}: {row['seconds']:.1f} s (files twice: {row['read_twice_s']:.1f} s), host {row['host_peak_bytes'] / 1e9:.3f} GB of "
            f"{row['host_counted_bytes'] / 1e9:.3f} counted{device if row['device_peak_bytes'] else ''}",
            flush=True,
        )
    from benchmarks.lib.machine import machine

    write(given.json, found | {"machine": machine()})


if __name__ == "__main__":
    main()
