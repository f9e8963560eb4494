"""Weights from a trainer on one GPU to an engine that decodes on another: bytes a second, stalls of both, against vLLM's own transfer.

    python benchmarks/speed/weights.py [0.6B 4B 8B] [--bucket-mib 512] [--checksum] [--tensor-parallel 2] [--json PATH]

Two GPUs of one host. The trainer publishes float32 weights as bfloat16 through an rlgraph channel; the engine receives them into
its second buffer while it decodes, and swaps between two decode steps. Every version is compared by a hash of each parameter in
which every element counts by its place. In the same run: a plain copy between the GPUs, and vLLM's NCCL weight transfer (packed)
into the same engine. Both transfers are timed from the moment at which the trainer's new weights are there.

With `--tensor-parallel 2` the engine spans both GPUs, one of which it shares with the trainer; each rank's parameters are compared with
what its own loader leaves, and vLLM's transfer is left out.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write_measured
from benchmarks.lib.placed_hash import added, placed_hash, placed_hashes

VERSIONS, WARM_UP = 6, 2
STEPS_AFTER = 6  # a swap, until as many decode steps are under way as before it
LONGEST_S = 300.0  # of one shape; a process that dies ends it at once
SEQUENCES, KEY = 64, b"benchmark"


def plain_copy() -> float:
    """Measure a plain copy between two GPUs, in GB a second, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=raw_copy, args=(results,))
    process.start()
    found: float = results.get(timeout=120)
    process.join()
    print(f"a plain copy between the GPUs: {found:.0f} GB/s", flush=True)
    return found


def raw_copy(results: Any) -> None:
    """Measure a copy of 8 GiB from GPU to GPU by one process that sees both."""
    import torch

    source = torch.empty(8 << 30, dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    times = []
    for _ in range(6):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        times.append(time.perf_counter() - start)
    results.put((8 << 30) / statistics.median(times[1:]) / 1e9)


def trainer(folder: str, address: str, port: int, how: tuple[int, bool], orders: Any, results: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import torch

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.channels.weights.shards import unsharded_weights
    from rlgraph.engines.hf.pretrained import parameter_shapes

    torch.manual_seed(1)
    weights = {name: torch.randn(shape, device="cuda").mul_(0.02) for name, shape in parameter_shapes(folder).items()}
    writer = WeightsWriter(HostWriter("weights", 1, 1, KEY, address), torch.bfloat16, *how)
    group = None
    while (order := orders.get()) is not None:
        if order == "vllm":
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            group = NCCLWeightTransferEngine.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
            continue
        with torch.no_grad():
            torch._foreach_mul_(list(weights.values()), 1.001)
        torch.cuda.synchronize()
        start = time.monotonic()
        if group is not None:
            results.put("ready")  # from now on the transfer is timed, as for our own publish
            from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

            casts = ((name, tensor.to(torch.bfloat16)) for name, tensor in weights.items())
            NCCLWeightTransferEngine.trainer_send_weights(casts, {"group": group, "packed": True})
            torch.cuda.synchronize()
        else:
            writer.publish(order, unsharded_weights(weights), 60)
        results.put((start, time.monotonic() - start, placed_hashes({n: t.to(torch.bfloat16) for n, t in weights.items()})))
    writer.writer.close()


def rank_sums(worker: Any) -> dict[str, int] | None:
    """Hash the weights that a rank maps; None where its parameters are not those that its loader leaves."""
    import torch

    model, weights = worker.get_model(), worker.rank_weights.weights
    before = [parameter.clone() for parameter in model.parameters()]
    model.load_weights(iter(weights.items()))
    same = all(torch.equal(old, parameter) for old, parameter in zip(before, model.parameters(), strict=True))
    return placed_hashes(weights) if same and worker.rank_weights.plan is not None else None


def loaded_sums(generator: Any) -> list[dict[str, int] | None]:
    """Hash what each rank has of every weight."""
    if generator.parallel:
        return list(generator.llm.collective_rpc(rank_sums))
    assert generator.copies is not None
    loaded: dict[str, int] = {}
    for copy in generator.copies.copies:
        loaded[copy.name] = added(loaded.get(copy.name, 0), placed_hash(copy.to, copy.offset, copy.strides))
    return [loaded]


def fills() -> list[tuple[float, float]]:
    """Make a list to which each version adds when its copies into a second buffer of this process began and ended."""
    from rlgraph.channels.weights.endpoints import Staging

    found: list[tuple[float, float]] = []
    fill = Staging.fill

    def timed(self: Staging, ranks: Any, arrived: Any = None, after: Any = None) -> None:
        start = time.monotonic()
        fill(self, ranks, arrived, after)
        found.append((start, time.monotonic()))

    Staging.fill = timed  # type: ignore[method-assign]
    return found


class Decoding:
    """An engine that keeps `SEQUENCES` sequences busy, one timed step after the other."""

    def __init__(self, engine: Any) -> None:
        from rlgraph.engines.api import Request
        from rlgraph.values.sampling import Sampling

        self.engine, self.request, self.sampling = engine, Request, Sampling(max_tokens=480, ignore_eos=True)
        self.number = self.finished = 0
        self.steps: list[tuple[float, float]] = []

    def step(self) -> None:
        while self.engine.count_requests() < SEQUENCES:
            self.number += 1
            self.engine.submit(self.request(str(self.number), list(range(1, 33)), self.sampling, self.number))
        start = time.monotonic()
        self.finished += sum(len(response.tokens) for response in self.engine.step().values())
        self.steps.append((start, time.monotonic()))

    def tokens(self) -> int:
        """Count the tokens decoded so far."""
        return self.finished + int(sum(self.engine.count_tokens().values()))

    def receive(self, weights: Any, version: int) -> Any:
        """Receive a version of the weights, decoding until it has arrived."""
        from rlgraph.errors import ChannelTimeout

        while True:
            try:
                return weights.receive(version, 0.0)
            except ChannelTimeout:
                self.step()

    def lost(self, since: float, tokens: int, normal: float) -> float:
        """Measure, some steps later, the seconds since then in which nothing was decoded; steps under way count as decoded."""
        for _ in range(STEPS_AFTER):
            self.step()
        return self.steps[-1][1] - since - normal * (self.tokens() - tokens) / SEQUENCES

    def settle(self, steps: int = 60) -> float:
        """Take the median seconds of a step."""
        for _ in range(steps):
            self.step()
        return statistics.median(end - start for start, end in self.steps[-steps // 2 :])


def engine(folder: str, address: str, port: int, width: int, orders: Any, results: Any, out: Any) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1" if width == 1 else "0,1"
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if width > 1 else {}  # between the ranks
    import vllm
    from vllm.config import WeightTransferConfig

    if width == 1:
        arguments = vllm.EngineArgs
        vllm.EngineArgs = lambda **given: arguments(weight_transfer_config=WeightTransferConfig(backend="nccl"), **given)
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader
    from rlgraph.engines.vllm.engine import VllmEngine

    copies = fills()
    memory = 0.6 if width == 1 else 0.3  # beside the trainer
    generator = VllmEngine(folder, random_weights=True, max_model_len=1024, memory=memory, max_sequences=SEQUENCES, tensor_parallel=width)
    weights = WeightsReader([HostReader("weights", KEY, address, 120)], buffers=2)
    decoding = Decoding(generator)
    rows = []
    for version in range(1, VERSIONS + WARM_UP + 1):
        normal = decoding.settle()
        orders.put(version)
        first = len(decoding.steps)
        arrived = decoding.receive(weights, version)
        slowed = sum(end - start - normal for start, end in decoding.steps[first:])
        before, tokens = decoding.steps[-1][1], decoding.tokens()
        start = time.monotonic()
        generator.load_weights(arrived, running="keep")
        load = time.monotonic() - start
        weights.release()
        gap = decoding.lost(before, tokens, normal)
        published, stall, sums = results.get(timeout=120)
        row = {
            "staged_s": copies[-1][1] - published,
            "copy_s": copies[-1][1] - copies[-1][0],
            "trainer_stall_s": stall,
            "load_s": load,
            "decode_gap_s": gap,
            "decode_slowed_s": slowed,
            "decode_step_s": normal,
            "bit_exact": loaded_sums(generator) == [sums] * width,
        }
        rows.append(row)
    size = sum(tensor.nbytes for tensor in arrived.values())
    other = vllm_transfer(generator, decoding, arrived, port, orders, results) if width == 1 else []
    orders.put(None)
    out.put((size, rows[WARM_UP:], other))
    generator.close()


def vllm_transfer(generator: Any, decoding: Decoding, like: Any, port: int, orders: Any, results: Any) -> list[dict[str, float]]:
    """Measure how long vLLM's own NCCL transfer stops generation, for some versions."""
    llm = generator.llm
    orders.put("vllm")
    init = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init})
    update = {
        "names": list(like),
        "dtype_names": ["bfloat16"] * len(like),
        "shapes": [list(tensor.shape) for tensor in like.values()],
        "packed": True,
    }
    rows = []
    for version in range(VERSIONS // 2 + 1):
        normal = decoding.settle()
        orders.put(version)
        while results.empty():
            decoding.step()
        assert results.get() == "ready"
        before, tokens = decoding.steps[-1][1], decoding.tokens()
        generator.catch_up()
        llm.collective_rpc("start_weight_update")
        llm.collective_rpc("update_weights", kwargs={"update_info": update})
        llm.collective_rpc("finish_weight_update")
        gap = decoding.lost(before, tokens, normal)
        _, stall, sums = results.get(timeout=120)
        rows.append({"decode_gap_s": gap, "trainer_stall_s": stall, "bit_exact": loaded_sums(generator) == [sums]})
    return rows[1:]


def measure(shape: str, models: str, how: tuple[int, bool], width: int) -> dict[str, Any]:
    from benchmarks.lib.shapes import random_model

    folder = random_model(shape, models, headers_only=True)
    context = multiprocessing.get_context("spawn")
    orders, results, out = context.Queue(), context.Queue(), context.Queue()
    port = 29600 + os.getpid() % 300 + list("064B8").index(shape[0])
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as job:
        address = f"{job}/w"
        processes = [
            context.Process(target=trainer, args=(folder, address, port, how, orders, results), daemon=True),
            # A daemon may have no children, which the ranks of a wide engine are.
            context.Process(target=engine, args=(folder, address, port, width, orders, results, out), daemon=width == 1),
        ]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + LONGEST_S
            while out.empty() and all(process.is_alive() for process in processes) and time.monotonic() < deadline:
                time.sleep(0.1)
            size, rows, other = out.get(timeout=10)
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0] if key != "bit_exact"}
    spread = {key: [min(row[key] for row in rows), max(row[key] for row in rows)] for key in medians}
    return {
        "bytes": size,
        "bit_exact": all(row["bit_exact"] for row in rows),
        "median": medians,
        "spread": spread,
        "gb_per_s": size / medians["copy_s"] / 1e9,
    } | (
        {f"vllm_{key}": statistics.median(row[key] for row in other) for key in ("decode_gap_s", "trainer_stall_s")}
        | {"vllm_bit_exact": all(row["bit_exact"] for row in other)}
        if other
        else {}
    )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("shapes", nargs="*", default=["0.6B", "4B", "8B"])
    parser.add_argument("--bucket-mib", type=int, default=512, help="the engine begins to receive when so much is staged")
    parser.add_argument("--checksum", action="store_true", help="compare every version with what was sent")
    parser.add_argument("--tensor-parallel", type=int, default=1, choices=(1, 2), help="GPUs of the engine")
    parser.add_argument("--models", default=".models")
    given = parser.parse_args()
    peer = plain_copy()
    how = (given.bucket_mib << 20, given.checksum)
    settings = {"bucket_mib": given.bucket_mib, "checksum": given.checksum, "tensor_parallel": given.tensor_parallel}
    found: dict[str, Any] = {"raw_copy_gb_per_s": peer, **settings, "shapes": {}}
    for shape in given.shapes:
        row = found["shapes"][shape] = measure(shape, given.models, how, given.tensor_parallel)
        m = row["median"]
        print(
            f"{shape}: {row['bytes'] / 1e9:.2f} GB, bit-exact {row['bit_exact']}; staged after {m['staged_s'] * 1e3:.1f} ms "
            f"(copy {m['copy_s'] * 1e3:.1f} ms, {row['gb_per_s']:.0f} GB/s, {row['gb_per_s'] / peer:.0%} of a plain copy); "
            f"trainer stalls {m['trainer_stall_s'] * 1e3:.1f} ms; swap {m['load_s'] * 1e3:.1f} ms, "
            f"decode gap {m['decode_gap_s'] * 1e3:.1f} ms over a step of {m['decode_step_s'] * 1e3:.1f} ms, "
            f"steps slowed by {m['decode_slowed_s'] * 1e3:.1f} ms meanwhile",
            flush=True,
        )
        if "vllm_decode_gap_s" in row:
            stalls = row["vllm_decode_gap_s"] * 1e3, row["vllm_trainer_stall_s"] * 1e3
            print(f"  vLLM's transfer: gap {stalls[0]:.1f} ms, trainer {stalls[1]:.1f} ms", flush=True)
        write_measured(given.json, found)


if __name__ == "__main__":
    main()
