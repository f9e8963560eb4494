"""Weights from the ranks of a sharded trainer to several engines that decode, against one trainer and one engine in the same run.

    python benchmarks/sharded_weights.py [8B …] [--ranks 2] [--engines 2] [--json PATH]

As many GPUs of one host as there are ranks and engines. Each rank has its rows of every float32 parameter, as FSDP2 shards them, and
publishes them as bfloat16; each engine receives the rows of all ranks into its second buffer while it decodes, and swaps between two
decode steps. Bytes a second are those of all engines, from the first rank's publish until the last engine has all.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from placed_hash import added, placed_hash
from shapes import random_model
from weights import KEY, LONGEST_S, SEQUENCES, VERSIONS, WARM_UP, Decoding, fills, loaded_sums, machine, plain_copy


def trainer(folder: str, addresses: list[str], rank: int, engines: int, orders: Any, results: Any) -> None:
    """Publish this rank's rows at each order, and say when it began, how long it stalled, and what was sent."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    import torch

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.channels.weights.shards import WeightShard
    from rlgraph.engines.hf_models.pretrained import parameter_shapes

    torch.manual_seed(rank)
    rows, places, shards = {}, {}, []  # a place: that of the first element in the whole parameter
    for name, (length, *others) in parameter_shapes(folder).items():
        chunk = -(-length // len(addresses))  # as torch.chunk cuts
        first = min(rank * chunk, length)
        places[name] = first * torch.Size(others).numel()
        rows[name] = torch.randn(min(chunk, length - first), *others, device="cuda").mul_(0.02)
        shards.append(WeightShard(name, (length, *others), (first, *(0 for _ in others)), rows[name]))
    writer = WeightsWriter(HostWriter("weights", slots=1, readers=engines, authkey=KEY, address=addresses[rank]), torch.bfloat16, 512 << 20)
    while (version := orders.get()) is not None:
        with torch.no_grad():
            torch._foreach_mul_(list(rows.values()), 1.001)
        torch.cuda.synchronize()
        start = time.monotonic()
        writer.publish(version, shards, 60)
        stall = time.monotonic() - start
        hashes = {name: placed_hash(row.to(torch.bfloat16), places[name]) for name, row in rows.items()}
        results.put(("rank", start, stall, hashes))
    writer.writer.close()


def engine(folder: str, addresses: list[str], gpu: int, ready: Any, results: Any) -> None:
    """Decode, receive and swap version after version, and say when each had come, what the swap cost, and what was loaded."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader
    from rlgraph.engines.vllm.engine import VllmEngine

    copies = fills()
    generator = VllmEngine(folder, random_weights=True, max_model_len=1024, memory=0.6, max_sequences=SEQUENCES)
    weights = WeightsReader([HostReader("weights", KEY, address, 120) for address in addresses], buffers=2)
    decoding = Decoding(generator)
    for version in range(1, VERSIONS + WARM_UP + 1):
        normal = decoding.settle()
        ready.put(gpu)
        arrived = decoding.receive(weights, version)
        before, tokens = decoding.steps[-1][1], decoding.tokens()
        generator.load_weights(arrived, running="keep")
        weights.done()
        gap = decoding.lost(before, tokens, normal)
        size = sum(tensor.nbytes for tensor in arrived.values())
        results.put(("engine", copies[-1][1], gap, loaded_sums(generator)[0], size))
    generator.close()


def measure(folder: str, ranks: int, engines: int) -> dict[str, Any]:
    """Measure the medians of some versions from so many ranks to so many engines."""
    context = multiprocessing.get_context("spawn")
    orders = [context.Queue() for _ in range(ranks)]
    ready, results = context.Queue(), context.Queue()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as job:
        addresses = [f"{job}/{rank}" for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            args: tuple[Any, ...] = folder, addresses, rank, engines, orders[rank], results
            processes.append(context.Process(target=trainer, args=args, name=f"rank {rank}", daemon=True))
        for number in range(engines):
            args = folder, addresses, ranks + number, ready, results
            processes.append(context.Process(target=engine, args=args, name=f"engine {number}", daemon=True))
        for process in processes:
            process.start()
        try:
            for version in range(1, VERSIONS + WARM_UP + 1):
                for _ in range(engines):
                    get(ready, processes)
                for each in orders:
                    each.put(version)
                rows.append(row([get(results, processes) for _ in range(ranks + engines)]))
            for each in orders:
                each.put(None)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    rows = rows[WARM_UP:]
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "bit_exact"}
    spread = {key: [min(row[key] for row in rows), max(row[key] for row in rows)] for key in medians}
    return {"bit_exact": all(row["bit_exact"] for row in rows), "median": medians, "spread": spread}


def get(queue: Any, processes: list[Any]) -> Any:
    """Get the next message. Raises SystemExit if a process dies first."""
    deadline = time.monotonic() + LONGEST_S
    while queue.empty() and time.monotonic() < deadline:
        if dead := [process.name for process in processes if not process.is_alive()]:
            raise SystemExit(f"{', '.join(dead)} died: what it wrote above says why")
        time.sleep(0.02)
    return queue.get(timeout=1)


def row(answers: list[Any]) -> dict[str, Any]:
    """Compute the figures of one version from the answers of all processes."""
    sent = [answer[1:] for answer in answers if answer[0] == "rank"]
    arrived = [answer[1:] for answer in answers if answer[0] == "engine"]
    sums = {name: added(*(part[name] for _, _, part in sent)) for name in sent[0][2]}
    staged_s = max(end for end, *_ in arrived) - min(start for start, *_ in sent)
    return {
        "staged_s": staged_s,
        "gb_per_s": sum(size for *_, size in arrived) / staged_s / 1e9,
        "trainer_stall_s": max(stall for _, stall, _ in sent),
        "decode_gap_s": max(gap for _, gap, *_ in arrived),
        "bit_exact": all(loaded == sums for _, _, loaded, _ in arrived),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["8B"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=".models")
    given = parser.parse_args()
    found: dict[str, Any] = {"raw_copy_gb_per_s": plain_copy(), "shapes": {}}
    for shape in given.shapes:
        folder = random_model(shape, given.models, headers_only=True)
        ways = {f"{ranks} to {engines}": measure(folder, ranks, engines) for ranks, engines in ((1, 1), (given.ranks, given.engines))}
        for way, one in ways.items():
            m = one["median"]
            print(
                f"{shape}, {way}: staged after {m['staged_s'] * 1e3:.1f} ms, {m['gb_per_s']:.0f} GB/s in all, "
                f"trainer stalls {m['trainer_stall_s'] * 1e3:.1f} ms, decode gap {m['decode_gap_s'] * 1e3:.1f} ms, "
                f"bit-exact {one['bit_exact']}",
                flush=True,
            )
        found["shapes"][shape] = ways
        if given.json:
            given.json.write_text(json.dumps(found | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
