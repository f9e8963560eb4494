"""Megatron-Core beside FSDP2 on one GPU: the same update, the same log-probs, and the weights of both published to one engine.

    python benchmarks/speed/megatron_gpu.py [0.6B 4B] [--parts updates log_probs publishing] [--json PATH]
    python benchmarks/speed/megatron_gpu.py --smoke        # its first seconds, on a CPU

* `updates`: seconds of an update of 8 packed sequences of 4,096 tokens, the share of the peak (`timed_updates.row`), and the peak of the
  GPU's memory, by FSDP2 as it is and compiled, and by Megatron-Core. They come in turns: each trainer is loaded, warmed up and timed,
  and then all of them again.
* `log_probs`: how far those of each in bfloat16 are from FSDP2's in float32, and from each other.
* `publishing`: the weights of each trainer through a channel into a vLLM engine on the same GPU. `publish_s` is what the trainer waits,
  `staged_s` until the engine's second buffer has them, `load_s` their copy into the engine, beside a plain copy of as many bytes
  on that GPU. Every version is compared by a hash of each parameter in which every element counts by its place.

It prints as it goes, and writes the file after each part, beside the parts that the file holds already. A trainer that runs out of memory
is told, and the others go on.
"""

import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.lib.command import command_line, write
from benchmarks.lib.machine import machine
from benchmarks.lib.placed_hash import placed_hashes, shard_hashes
from benchmarks.lib.timed_updates import PEAK, SMOKE, WARM_UP, random_batch, row, timed_updates

PARTS = "updates", "log_probs", "publishing"
WAYS: dict[str, dict[str, Any]] = {"fsdp": {}, "fsdp compiled": {"compiled": True}, "megatron": {}}
PUBLISHERS = "fsdp", "megatron"
TURNS, UPDATES = 2, 3  # of each trainer, and the updates timed in each
SIZE, MICRO_BATCH_TOKENS = (8, 4096), 8192
SCORED = 2, 2048
VERSIONS, VERSIONS_UNCOUNTED = 6, 2
MEMORY, LONGEST_S, KEY = 0.3, 300.0, b"benchmark"  # the engine's share of the GPU, beside the trainer
BEGAN = time.monotonic()


def say(text: str) -> None:
    """Print a line with the seconds since this process began."""
    print(f"  [{time.monotonic() - BEGAN:5.1f} s] {text}", flush=True)


def made_trainer(way: str, folder: str, *, exact: bool = False) -> Any:
    """Load a trainer of the model in a folder, alone on its device; an `exact` one computes in float32."""
    import torch

    from rlgraph.engines.forward.policy_head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.megatron.engine import MegatronEngine
    from rlgraph.values.trainer import TrainerSettings

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if exact or device == "cpu" else torch.bfloat16
    kind: Callable[..., Any] = MegatronEngine if way == "megatron" else FsdpEngine
    return kind(PolicyHead(folder), TrainerSettings(micro_batch_tokens=MICRO_BATCH_TOKENS, **WAYS[way]), device=device, dtype=dtype)


def let_go() -> None:
    """Give back what closed trainers had."""
    import torch

    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def with_trainer(way: str, folder: str, work: Callable[[Any], Any], *, exact: bool = False) -> Any:
    """Load a trainer, let it do its work, and close it. Returns None if that failed, which is printed."""
    import torch

    try:
        engine = made_trainer(way, folder, exact=exact)
        try:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            return work(engine)
        finally:
            engine.close()
            del engine
    except Exception:  # noqa: BLE001 (one that does not fit must not lose the others)
        traceback.print_exc()
        return None
    finally:
        let_go()


def peak_bytes() -> int:
    """The most memory that tensors have had on the GPU since the trainer was loaded."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def updates(shape: str, folder: str, smoke: bool) -> dict[str, Any]:
    """Time updates of each trainer, in turns."""
    size = SMOKE if smoke else SIZE
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    ways = [way for way in WAYS if not (smoke and "compiled" in way)]
    for turn in range(TURNS):
        for way in ways:
            found = with_trainer(way, folder, lambda engine: (timed_updates(engine, size, WARM_UP + UPDATES), peak_bytes()))
            if found is not None:
                seconds.setdefault(way, []).extend(found[0][WARM_UP:])
                peaks[way] = max(peaks.get(way, 0), found[1])
                say(f"{shape}, {way}, turn {turn + 1}: {', '.join(f'{one:.3f}' for one in found[0])} s, {found[1] / 2**30:.1f} GiB")
    rows = {way: row(shape, size, 1, PEAK, ([0.0] * WARM_UP + seconds[way], peaks[way])) for way in seconds}
    for way, one in rows.items():
        low, high = one["spread_s"]
        say(
            f"{shape}, {way}: {one['step_s']:.3f} s ({low:.3f} to {high:.3f} in {one['steps']}), {one['tokens_per_s']:.0f} tokens/s, "
            f"MFU {one['mfu']:.1%}, {one['peak_bytes'] / 2**30:.1f} GiB"
        )
    return rows


def log_probs(shape: str, folder: str, smoke: bool) -> dict[str, Any]:
    """Score the same tokens by each trainer: means and maxima of the distances, in nats."""
    batch = random_batch(SMOKE if smoke else SCORED)
    scores = {way: with_trainer(way, folder, lambda engine: engine.scores(batch)) for way in ("fsdp", "megatron")}
    scores["float32"] = with_trainer("fsdp", folder, lambda engine: engine.scores(batch), exact=True)
    found: dict[str, Any] = {"tokens": int(batch["response_mask"].sum())}
    for one, other in (("fsdp", "float32"), ("megatron", "float32"), ("megatron", "fsdp")):
        if scores[one] is not None and scores[other] is not None:
            distance = (scores[one] - scores[other])[batch["response_mask"]].abs()
            mean, most = found[f"{one} from {other}"] = [float(distance.mean()), float(distance.max())]
            say(f"{shape}, log-probs, {one} from {other}: mean {mean:.6f}, max {most:.6f}")
    return found


def receiver(folder: str, job: str, out: Any) -> None:
    """Load versions of each trainer into an engine, and tell when each had arrived, how long its loading took, and its hashes."""
    import torch

    from benchmarks.speed.weights import loaded_sums
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader

    if torch.cuda.is_available():
        from rlgraph.engines.vllm.engine import VllmEngine

        engine: Any = VllmEngine(folder, random_weights=True, max_model_len=1024, memory=MEMORY, max_sequences=16)
    else:
        from rlgraph.engines.transformers.engine import TransformersEngine

        engine = TransformersEngine(folder)
    out.put("ready")
    for way in PUBLISHERS:
        reader = HostReader("weights", KEY, f"{job}/{way}", LONGEST_S)
        weights = WeightsReader([reader], buffers=2)
        for version in range(1, VERSIONS + VERSIONS_UNCOUNTED + 1):
            arrived = weights.receive(version, LONGEST_S)
            start = time.monotonic()
            engine.load_weights(arrived, running="keep")
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            load = time.monotonic() - start
            weights.release()
            out.put((start, load, loaded_sums(engine)[0] if torch.cuda.is_available() else placed_hashes(arrived)))
        reader.close()
        out.put("closed")


def publish(engine: Any, address: str, out: Any) -> dict[str, Any]:
    """Publish versions of a trainer's weights, one after the other has been loaded."""
    import torch

    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.weights.endpoints import WeightsWriter

    finished: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    writer = WeightsWriter(HostWriter("weights", 1, 1, KEY, address), torch.bfloat16)
    rows = []
    for version in range(1, VERSIONS + VERSIONS_UNCOUNTED + 1):
        for shard in engine.weight_shards():
            shard.tensor.mul_(1.001)
        finished()
        start = time.monotonic()
        writer.publish(version, engine.weight_shards(), LONGEST_S)
        finished()
        stall = time.monotonic() - start
        arrived, load, hashes = out.get(timeout=LONGEST_S)
        same = hashes == shard_hashes(engine.weight_shards())
        rows.append({"publish_s": stall, "staged_s": arrived - start, "load_s": load, "bit_exact": same})
    assert out.get(timeout=LONGEST_S) == "closed"
    writer.writer.close()
    counted = rows[VERSIONS_UNCOUNTED:]
    times = {name: [one[name] for one in counted] for name in ("publish_s", "staged_s", "load_s")}
    return {
        "boxes": sum(1 for _ in engine.weight_shards()),
        "versions": len(counted),
        "bit_exact": all(one["bit_exact"] for one in rows),
        "median": {name: statistics.median(each) for name, each in times.items()},
        "spread": {name: [min(each), max(each)] for name, each in times.items()},
    }


def plain_copy(size: int) -> list[float]:
    """Time copies of so many bytes on the device."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, seconds = torch.empty_like(source), []
    finished: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(VERSIONS + VERSIONS_UNCOUNTED):
        finished()
        start = time.monotonic()
        target.copy_(source)
        finished()
        seconds.append(time.monotonic() - start)
    return seconds[VERSIONS_UNCOUNTED:]


def publishing(shape: str, folder: str, smoke: bool) -> dict[str, Any]:
    """Publish the weights of each trainer to one engine."""
    from benchmarks.lib.shapes import parameters

    size = 2 * parameters(shape)
    found: dict[str, Any] = {"bytes": size, "plain_copy_s": statistics.median(plain_copy(size))}
    let_go()
    say(f"{shape}: a plain copy of {size / 1e9:.2f} GB takes {found['plain_copy_s'] * 1e3:.2f} ms")
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory(prefix="rlgraph-") as job:
        process = context.Process(target=receiver, args=(folder, job, out), daemon=True)
        process.start()
        try:
            assert out.get(timeout=LONGEST_S) == "ready"
            say(f"{shape}: the engine is there")
            for way in PUBLISHERS:
                one = found[way] = with_trainer(way, folder, partial(publish, address=f"{job}/{way}", out=out))
                if one is None:
                    break  # the engine waits for what does not come
                at = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in one["median"].items()}
                say(f"{shape}, {way}: {one['boxes']} boxes, {at}, bit-exact {one['bit_exact']}")
        finally:
            process.kill()
            process.join(10)
    return found


def main() -> None:
    parser = command_line(__doc__, smoke="a tiny model and short sequences, on a CPU")
    parser.add_argument("shapes", nargs="*", default=["0.6B", "4B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", default=".models")
    given = parser.parse_args()
    from benchmarks.lib.shapes import random_model

    work: dict[str, Callable[[str, str, bool], dict[str, Any]]]
    work = {"updates": updates, "log_probs": log_probs, "publishing": publishing}
    settings = {"sequences": SIZE[0], "length": SIZE[1], "micro_batch_tokens": MICRO_BATCH_TOKENS, "turns": TURNS}
    found: dict[str, Any] = {"peak_flop_per_s": PEAK, **settings, "shapes": {}} | machine()
    if given.json and given.json.exists():
        found["shapes"] = json.loads(given.json.read_text())["shapes"]
    for shape in ["pair"] if given.smoke else given.shapes:
        folder = random_model(shape, given.models)
        say(f"{shape}: the model is there")
        for part in given.parts:
            try:
                found["shapes"].setdefault(shape, {})[part] = work[part](shape, folder, given.smoke)
            except Exception:  # noqa: BLE001 (the other parts go on)
                traceback.print_exc()
            write(given.json, found)


if __name__ == "__main__":
    main()
