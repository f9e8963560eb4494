"""Weights from the ranks of a trainer to engines that decode: bytes a second beside a plain copy between GPUs in the same run.

    python benchmarks/speed/sharded_weights.py [8B …] [--ranks 2] [--engines 2] [--json PATH]                         # four GPUs
    python benchmarks/speed/sharded_weights.py 0.6B 4B 8B --ranks 1 --engines 1 --trainers rows fsdp megatron        # two GPUs
    python benchmarks/speed/sharded_weights.py --ranks 2 --engines 1 --trainers rows fsdp megatron megatron-tp --smoke    # on a CPU

As many GPUs of one host as there are ranks and engines; one rank and one engine are measured first. Each engine receives the shards of all
ranks as bfloat16 into its second buffer while it decodes, and swaps between two decode steps. Every version is compared by a hash of each
parameter in which every element counts by its place. The trainers come in turns, to the same engines:

* `rows`: no trainer, but the rows of every float32 parameter that FSDP2 would have on a rank
* `fsdp`, `megatron`: the trainer with its float32 weights; Megatron-Core's ranks each own whole parameters
* `megatron-tp`: Megatron-Core's ranks share the matrices

No trainer takes a step: it has no gradients and no moments, and Megatron-Core its weights in bfloat16 too.

`staged_s` is from the first rank's publish until the last engine has all, and `gb_per_s` are bytes of all engines in that time. `copy_s` is
what the copies into the slowest engine's buffer took.
"""

import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.placed_hash import added, placed_hashes, shard_hashes
from benchmarks.lib.shapes import random_model
from benchmarks.speed.weights import KEY, LONGEST_S, SEQUENCES, VERSIONS, WARM_UP, Decoding, fills, loaded_sums, plain_copy

TRAINERS = "rows", "fsdp", "megatron", "megatron-tp"
SMOKE = "--smoke" in sys.argv


class Rows:
    """The rows of each parameter that FSDP2 would have on a rank, in float32: of a trainer the weights alone."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        import torch

        from rlgraph.channels.weights.shards import WeightShard
        from rlgraph.engines.hf.pretrained import parameter_shapes

        self.shards = []
        for name, (length, *others) in parameter_shapes(folder).items():
            chunk = -(-length // world)  # as torch.chunk cuts
            first = min(rank * chunk, length)
            rows = torch.empty(min(chunk, length - first), *others, device="cpu" if SMOKE else "cuda")
            self.shards.append(WeightShard(name, (length, *others), (first, *(0 for _ in others)), rows))

    def weight_shards(self) -> Iterator[Any]:
        return iter(self.shards)

    def close(self) -> None:
        """Free nothing but what this object holds."""


def made(trainer: str, folder: str, rank: int, world: int) -> Any:
    """Load one rank of a trainer; the folder has no numbers."""
    import torch

    import rlgraph as rg
    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.megatron.engine import MegatronEngine

    if trainer == "rows":
        return Rows(folder, rank, world)
    given: dict[str, Any] = {"optimizer": rg.AdamW(), "rank": rank, "world": world, "device": "cpu" if SMOKE else "cuda"}
    given |= {"tensor_parallel": world} if trainer == "megatron-tp" else {}
    kind: Any = FsdpEngine if trainer == "fsdp" else MegatronEngine
    return kind(PolicyHead(folder), dtype=torch.float32 if SMOKE else torch.bfloat16, **given)


def rank_process(folder: str, job: str, trainers: list[str], rank: int, ways: tuple[int, int], orders: Any, results: Any) -> None:
    """Publish this rank's shards of each trainer at each order, and say when it began, how long it stalled, and what was sent."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch
    import torch.distributed as dist

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.engines.fsdp.sharding import backends

    world, engines = ways
    if world > 1:
        dist.init_process_group(backends(), init_method=f"file://{job}/group", rank=rank, world_size=world)
    torch.manual_seed(rank)
    finished: Callable[[], None] = (lambda: None) if SMOKE else torch.cuda.synchronize
    for trainer in trainers:
        engine = made(trainer, folder, rank, world)
        tensors = [shard.tensor.detach() for shard in engine.weight_shards()]
        for tensor in tensors:
            tensor.normal_(0, 0.02)
        inner = HostWriter("weights", slots=1, readers=engines, authkey=KEY, address=f"{job}/{trainer}-{rank}")
        writer = WeightsWriter(inner, torch.bfloat16, 512 << 20)
        while (version := orders.get()) is not None:
            torch._foreach_mul_(tensors, 1.001)
            finished()
            start = time.monotonic()
            writer.publish(version, engine.weight_shards(), 60)
            stall = time.monotonic() - start
            sent = sum(1 for shard in engine.weight_shards() if shard.replica == 0)
            results.put(("rank", start, stall, shard_hashes(engine.weight_shards()), sent))
        inner.close()
        engine.close()
        del engine, tensors, inner, writer
        gc.collect()
        if not SMOKE:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # the staging, which the engines have let go of
            torch.cuda.empty_cache()
    if world > 1:
        dist.destroy_process_group()


def started(folder: str) -> Any:
    """Start an engine of random weights."""
    if SMOKE:
        from rlgraph.engines.transformers.engine import TransformersEngine

        return TransformersEngine(folder)
    from rlgraph.engines.vllm.engine import VllmEngine

    return VllmEngine(folder, random_weights=True, max_model_len=1024, memory=0.5, max_sequences=SEQUENCES)


def engine_process(folder: str, job: str, trainers: list[str], gpu: int, ranks: int, ready: Any, results: Any) -> None:
    """Decode, receive and swap version after version, and say when each had come, what the swap cost, and what was loaded."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    import torch

    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader

    copies = fills()
    generator = started(folder)
    decoding = Decoding(generator)
    for trainer in trainers:
        readers = [HostReader("weights", KEY, f"{job}/{trainer}-{rank}", LONGEST_S) for rank in range(ranks)]
        weights = WeightsReader(readers, buffers=2)
        for version in range(1, VERSIONS + WARM_UP + 1):
            normal = 0.0 if SMOKE else decoding.settle()
            ready.put(gpu)
            arrived = weights.receive(version, LONGEST_S) if SMOKE else decoding.receive(weights, version)
            before, tokens = (decoding.steps or [(0.0, 0.0)])[-1][1], decoding.tokens()
            generator.load_weights(arrived, running="keep")
            weights.release()
            gap = 0.0 if SMOKE else decoding.lost(before, tokens, normal)
            size, (begun, ended) = sum(tensor.nbytes for tensor in arrived.values()), copies[-1]
            loaded = placed_hashes(arrived) if SMOKE else loaded_sums(generator)[0]
            results.put(("engine", ended, ended - begun, gap, loaded, size))
        for reader in readers:
            reader.close()
        del weights, reader, readers, arrived
        gc.collect()
        if not SMOKE:
            torch.cuda.empty_cache()
        ready.put("closed")
    generator.close()


def measure(folder: str, trainers: list[str], ranks: int, engines: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the medians of some versions of each trainer, from so many ranks to so many engines."""
    context = multiprocessing.get_context("spawn")
    orders = [context.Queue() for _ in range(ranks)]
    ready, results = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as job:
        processes = []
        for rank in range(ranks):
            args: tuple[Any, ...] = folder, job, trainers, rank, (ranks, engines), orders[rank], results
            processes.append(context.Process(target=rank_process, args=args, name=f"rank {rank}", daemon=True))
        for number in range(engines):
            args = folder, job, trainers, ranks + number, ranks, ready, results
            processes.append(context.Process(target=engine_process, args=args, name=f"engine {number}", daemon=True))
        for process in processes:
            process.start()
        try:
            for trainer in trainers:
                rows = []
                for version in range(1, VERSIONS + WARM_UP + 1):
                    for _ in range(engines):
                        get(ready, processes)
                    for each in orders:
                        each.put(version)
                    rows.append(row([get(results, processes) for _ in range(ranks + engines)]))
                for _ in range(engines):
                    get(ready, processes)  # it has let go of the trainer's memory
                for each in orders:
                    each.put(None)
                yield trainer, told(rows[WARM_UP:])
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def told(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compute the medians of some versions, and their spread."""
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key not in ("bit_exact", "shards")}
    spread = {key: [min(row[key] for row in rows), max(row[key] for row in rows)] for key in medians}
    return {"bit_exact": all(row["bit_exact"] for row in rows), "shards": rows[0]["shards"], "median": medians, "spread": spread}


def get(queue: Any, processes: list[Any]) -> Any:
    """Get the next message. Raises SystemExit if a process dies first."""
    deadline = time.monotonic() + LONGEST_S
    while queue.empty() and time.monotonic() < deadline:
        if dead := [process.name for process in processes if process.exitcode]:
            raise SystemExit(f"{', '.join(dead)} died: what it wrote above says why")
        time.sleep(0.02)
    return queue.get(timeout=1)


def row(answers: list[Any]) -> dict[str, Any]:
    """Compute the figures of one version from the answers of all processes."""
    sent = [answer[1:] for answer in answers if answer[0] == "rank"]
    arrived = [answer[1:] for answer in answers if answer[0] == "engine"]
    names = dict.fromkeys(name for _, _, part, _ in sent for name in part)
    sums = {name: added(*(part[name] for _, _, part, _ in sent if name in part)) for name in names}
    staged_s = max(end for end, *_ in arrived) - min(start for start, *_ in sent)
    copy_s = max(seconds for _, seconds, *_ in arrived)
    size = sum(size for *_, size in arrived)
    return {
        "staged_s": staged_s,
        "gb_per_s": size / staged_s / 1e9,
        "copy_s": copy_s,
        "copy_gb_per_s": size / copy_s / 1e9,
        "trainer_stall_s": max(stall for _, stall, *_ in sent),
        "decode_gap_s": max(gap for _, _, gap, *_ in arrived),
        "shards": sum(count for *_, count in sent),
        "bit_exact": all(loaded == sums for *_, loaded, _ in arrived),
    }


def say(shape: str, way: str, one: dict[str, Any], peer: float, began: float) -> None:
    """Print the medians of a trainer, and the seconds since its shape began."""
    m = one["median"]
    share, alone = (f"{m[name]:.0f} GB/s, {m[name] / peer:.0%} of a plain copy" for name in ("gb_per_s", "copy_gb_per_s"))
    print(
        f"[{time.monotonic() - began:5.1f} s] {shape}, {way}: {one['shards']} shards, staged after {m['staged_s'] * 1e3:.1f} ms ({share}; "
        f"the copies alone {alone}), trainer stalls {m['trainer_stall_s'] * 1e3:.1f} ms, decode gap {m['decode_gap_s'] * 1e3:.1f} ms, "
        f"bit-exact {one['bit_exact']}",
        flush=True,
    )


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model, on a CPU")
    parser.add_argument("shapes", nargs="*", default=["pair"] if SMOKE else ["8B"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=["rows"])
    parser.add_argument("--models", default=".models")
    given = parser.parse_args()
    if given.smoke and given.json:
        parser.error("--smoke measures nothing: leave out --json")
    peer = 1.0 if SMOKE else plain_copy()
    found: dict[str, Any] = {"raw_copy_gb_per_s": peer, "shapes": {}}
    for shape in given.shapes:
        folder = random_model(shape, given.models, headers_only=True)
        began = time.monotonic()
        for ranks, engines in dict.fromkeys(((1, 1), (given.ranks, given.engines))):
            for trainer, one in measure(folder, given.trainers, ranks, engines):
                way = f"{ranks} to {engines}" + (f", {trainer}" if trainer != "rows" else "")
                say(shape, way, one, peer, began)
                found["shapes"].setdefault(shape, {})[way] = one
                write_measured(given.json, found)


if __name__ == "__main__":
    main()
