"""Parts of `small_gpu.py` about publishing an adapter: rlgraph's channel and merge, and vLLM's own LoRA."""

import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import rlgraph as rg
from benchmarks.lib.shapes import random_model
from benchmarks.speed.small_gpu import say

RANK, VERSIONS, WARM_UP = 32, 8, 3
SEQUENCES, TOKENS = 64, 128
KEY, LONGEST_S = b"benchmark", 150.0
FOLDER = ".models"
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
Matrices = dict[str, tuple[int, int]]


def matrices(folder: str, rank: int) -> Matrices:
    """The shapes of an adapter's matrices, by name, in the order of a trainer."""
    from rlgraph.engines.hf.pretrained import parameter_shapes
    from rlgraph.engines.lora import A, B

    found: Matrices = {}
    for name, shape in parameter_shapes(folder).items():
        module = name.removesuffix(".weight")
        if any(module.endswith(f"{group}.{each}") for group, names in PROJECTIONS.items() for each in names):
            found |= {module + A: (rank, shape[1]), module + B: (shape[0], rank)}
    return found


def trainer(shapes: Matrices, address: str, orders: Any, results: Any) -> None:
    """Publish versions of an adapter when told to: seconds of each."""
    from rlgraph.channels.host.channel import HostWriter
    from rlgraph.channels.weights.endpoints import WeightsWriter
    from rlgraph.channels.weights.shards import unsharded_weights

    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {name: torch.randn(shape, device=device).mul_(0.01) for name, shape in shapes.items()}
    writer = WeightsWriter(HostWriter("weights", 1, 1, KEY, address), torch.float32)
    shards = list(unsharded_weights(weights))  # a trainer gives the same ones for every version
    while (version := orders.get()) is not None:
        torch._foreach_mul_(list(weights.values()), 1.001)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.monotonic()
        writer.publish(version, shards, 60)
        if device == "cuda":
            torch.cuda.synchronize()
        results.put((start, time.monotonic() - start))
    writer.writer.close()


def decoded(engine: Any, tokens: int) -> float:
    """Tokens a second of a full batch."""
    sampling = rg.Sampling(max_tokens=tokens, ignore_eos=True)
    prompts = [[(7 * i + 3 * j) % 200 + 5 for j in range(22)] for i in range(SEQUENCES)]
    engine.generate(prompts, rg.Sampling(max_tokens=4, ignore_eos=True), list(range(SEQUENCES)))
    start = time.monotonic()
    engine.generate(prompts, sampling, list(range(SEQUENCES)))
    return SEQUENCES * tokens / (time.monotonic() - start)


def lora_stage(smoke: bool) -> dict[str, Any]:
    """Versions that are received and let go."""
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader

    shape, rank = ("toy", 4) if smoke else ("8B", RANK)
    shapes = matrices(random_model(shape, FOLDER, headers_only=True), rank)
    context = multiprocessing.get_context("spawn")
    orders, results = context.Queue(), context.Queue()
    address = str(Path(tempfile.mkdtemp()) / "weights")
    context.Process(target=trainer, args=(shapes, address, orders, results), daemon=True).start()
    reader = WeightsReader([HostReader("weights", KEY, address, 120)], 1)
    staged = []
    for version in range(1, 24):
        orders.put(version)
        staged.append(results.get(timeout=LONGEST_S)[1])
        reader.receive(version, 60)
        reader.release()
    orders.put(None)
    timed = sorted(staged[WARM_UP:])
    size = sum(a * b for a, b in shapes.values()) * 4
    each = ", ".join(f"{seconds * 1e3:.2f}" for seconds in (timed[0], statistics.median(timed), timed[-1]))
    say(f"adapter of {size / 2**20:.0f} MiB: staged in {each} ms (least, median, most)")
    return {"shape": shape, "rank": rank, "adapter_bytes": size, "staged_s": statistics.median(timed), "staged_each_s": staged}


def lora_publish(smoke: bool) -> dict[str, Any]:
    from rlgraph.channels.host.channel import HostReader
    from rlgraph.channels.weights.endpoints import WeightsReader
    from rlgraph.engines.lora import BaseWeights
    from rlgraph.engines.vllm.engine import VllmEngine

    on_gpu = torch.cuda.is_available()
    shape, rank = ("toy", 4) if smoke else ("8B", RANK)
    folder = random_model(shape, FOLDER, headers_only=True)
    shapes = matrices(folder, rank)
    context = multiprocessing.get_context("spawn")
    orders, results = context.Queue(), context.Queue()
    address = str(Path(tempfile.mkdtemp()) / "weights")
    process = context.Process(target=trainer, args=(shapes, address, orders, results), daemon=True)
    process.start()
    start = time.monotonic()
    engine = VllmEngine(
        folder, max_model_len=512, max_sequences=SEQUENCES, random_weights=True, dtype="bfloat16" if on_gpu else "float32",
        memory=0.4 if on_gpu else None,
    )  # fmt: skip
    say(f"engine of {shape} up in {time.monotonic() - start:.1f} s")
    base_speed = decoded(engine, 8 if smoke else TOKENS)
    reader = WeightsReader([HostReader("weights", KEY, address, 120)], 1)
    base = BaseWeights(folder)
    staged, received, merged = [], [], []
    for version in range(1, (4 if smoke else VERSIONS) + 1):
        orders.put(version)
        began, seconds = results.get(timeout=LONGEST_S)
        weights = reader.receive(version, 60)
        there = time.monotonic()
        engine.load_weights(base.with_adapter(weights, 1.0, torch.bfloat16 if on_gpu else torch.float32), version=version)
        if on_gpu:
            torch.cuda.synchronize()
        merged.append(time.monotonic() - there)
        reader.release()
        staged.append(seconds)
        received.append(there - began - seconds)
        say(f"version {version}: staged {seconds * 1e3:.2f} ms, merged into live weights {merged[-1] * 1e3:.1f} ms")
    speed = decoded(engine, 8 if smoke else TOKENS)
    orders.put(None)
    size = sum(a * b for a, b in shapes.values()) * 4
    found = {
        "shape": shape,
        "rank": rank,
        "adapter_bytes": size,
        "staged_s": statistics.median(staged[WARM_UP:] or staged),
        "staged_each_s": staged,
        "merged_s": statistics.median(merged[WARM_UP:] or merged),
        "merged_each_s": merged,
        "first_merge_s": merged[0],
        "tokens_per_s_of_the_base": base_speed,
        "tokens_per_s_merged": speed,
        "sequences": SEQUENCES,
    }
    say(f"adapter of {size / 2**20:.0f} MiB: staged in {found['staged_s'] * 1e3:.2f} ms, merged in {found['merged_s'] * 1e3:.1f} ms; "
        f"{base_speed:.0f} tokens/s before, {speed:.0f} merged")  # fmt: skip
    return found


def vllm_lora(smoke: bool) -> dict[str, Any]:
    """vLLM's own LoRA: an adapter read from memory-backed files at each version, and applied beside the base."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    from rlgraph.engines.lora import PEFT, SavedAdapter, write_config
    from rlgraph.engines.vllm.engine import VllmEngine
    from rlgraph.values.lora import TENSORS

    on_gpu = torch.cuda.is_available()
    shape, rank = ("toy", 8) if smoke else ("8B", RANK)
    folder = random_model(shape, FOLDER, headers_only=True)
    shapes = matrices(folder, rank)
    start = time.monotonic()
    engine = VllmEngine(
        folder, max_model_len=512, max_sequences=SEQUENCES, random_weights=True, dtype="bfloat16" if on_gpu else "float32",
        memory=0.4 if on_gpu else None, engine_args={"enable_lora": True, "max_lora_rank": max(rank, 8), "max_loras": 1},
    )  # fmt: skip
    say(f"engine of {shape} with LoRA up in {time.monotonic() - start:.1f} s")
    base_speed = decoded(engine, 8 if smoke else TOKENS)
    added, written = [], []
    for version in range(1, (3 if smoke else VERSIONS) + 1):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as where:
            start = time.monotonic()
            dtype = torch.bfloat16 if on_gpu else torch.float32
            save_file({PEFT + n: torch.randn(s, dtype=dtype).mul_(0.01) for n, s in shapes.items()}, str(Path(where) / TENSORS))
            write_config(Path(where), SavedAdapter(rank, float(rank), "all-linear"), folder, shapes)
            written.append(time.monotonic() - start)
            start = time.monotonic()
            engine.llm.add_lora(LoRARequest("adapter", version, where))
            if on_gpu:
                torch.cuda.synchronize()
            added.append(time.monotonic() - start)
        say(f"version {version}: added in {added[-1] * 1e3:.1f} ms")
    request = LoRARequest("adapter", version, "/nowhere")  # is there already
    core = engine.llm.engine_core
    add = core.add_request

    def add_with_adapter(made: Any) -> None:
        made.lora_request = request
        add(made)

    core.add_request = add_with_adapter
    speed = decoded(engine, 8 if smoke else TOKENS)
    found = {
        "shape": shape,
        "rank": rank,
        "added_s": statistics.median(added[WARM_UP:] or added),
        "added_each_s": added,
        "tokens_per_s_of_the_base": base_speed,
        "tokens_per_s_with_the_adapter": speed,
    }
    say(json.dumps(found))
    return found
