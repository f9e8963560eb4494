"""Parts of `small_gpu.py` that train in one process: the memory of an adapter's trainer, and moments in host memory."""

import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import rlgraph as rg
from benchmarks.lib.shapes import random_model
from benchmarks.lib.timed_updates import made_engine, timed_updates
from benchmarks.speed.small_gpu import say

RANK = 32
UPDATES = 3 if not torch.cuda.is_available() else 5
FOLDER = ".models"


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def planned(shape: str, **policy: Any) -> dict[str, int]:
    """The bytes that a plan counts of a policy alone on an H200, by what they are for, without the weights in staging."""
    folder = random_model(shape, FOLDER, headers_only=True)
    trained = rg.Policy(folder, pool=rg.Pool("train", gpus=1), **policy)
    generator = rg.Generator(folder, pool=rg.Pool("rollout", gpus=1), sampling=rg.Sampling(max_tokens=1536), max_context=2048)
    weights = rg.feedback("weights", depth=1)
    rollout = generator.rollout(rg.prompts([{"prompt": "1"}], count=4), weights, group_size=4)
    rewards = rg.reward(length, rollout)
    step = trained.update(rollout, rg.advantages(rollout, rewards, estimator=rg.GRPO()), loss=rg.ClippedLoss())
    weights.close(step.weights)
    plan = rg.compile(rg.Graph("planned", step.metrics), rg.Cluster(gpus=2, cpus=16, gpu="H200"))
    parts = next(dict(need.parts) for need in plan.memory if need.pool == "train" and not need.loading)
    return {name: size for name, size in parts.items() if name != "weights in staging"}


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


def trained(shape: str, size: tuple[int, int], **settings: Any) -> dict[str, Any]:
    """Train a shape for some updates: their seconds, and the peak of the device's memory from after loading on."""
    engine = made_engine(shape, 0, 1, "", device(), **settings)
    gc.collect()
    if device() == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = timed_updates(engine, size, UPDATES)
    on_gpu = device() == "cuda"
    found = {
        "update_s": statistics.median(seconds[2:]),
        "spread_s": [min(seconds[2:]), max(seconds[2:])],
        "tokens_per_s": size[0] * size[1] / statistics.median(seconds[2:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
    }
    engine.close()
    del engine
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return found


def lora_memory(smoke: bool) -> dict[str, Any]:
    shape, size = ("toy", (4, 32)) if smoke else ("8B", (8, 2048))
    found: dict[str, Any] = {"shape": shape, "rank": RANK, "runs": {}}
    ways = {
        "recompute": {"recompute": True, "micro_batch_tokens": 8192},
        "activations kept": {"recompute": False, "micro_batch_tokens": 4096},
        "recompute, base in 4 bits": {"recompute": True, "micro_batch_tokens": 8192},
    }
    for name, way in list(ways.items())[:: 2 if smoke else 1]:
        lora = rg.LoRA(rank=4 if smoke else RANK, base="nf4" if "4 bits" in name else None)
        counted = planned(shape, adapter=lora, fused_head=True, **way)
        run = trained(shape, size, fused=True, adapter=lora, **way)
        total = sum(counted.values())
        run |= {"planned_bytes": total, "planned": counted, "peak_to_plan": run["peak_bytes"] / total, **way}
        found["runs"][name] = run
        say(
            f"{shape} LoRA, {name}: peak {run['peak_bytes'] / 2**30:.2f} GiB of {total / 2**30:.2f} planned "
            f"({run['peak_to_plan']:.3f}), update {run['update_s']:.2f} s"
        )
    return found


def moments(smoke: bool) -> dict[str, Any]:
    return {"runs": {**_moments("toy" if smoke else "4B", False, smoke), **_moments("toy" if smoke else "4B", True, smoke)}}


def moments_of_8b(smoke: bool) -> dict[str, Any]:
    return {"runs": _moments("toy" if smoke else "8B", True, smoke)}


def _moments(shape: str, on_host: bool, smoke: bool) -> dict[str, Any]:
    """Updates with AdamW's moments on the host or on the GPU: seconds, and the peak of the GPU beside the plan's bytes."""
    size, way = (4, 32) if smoke else (8, 2048), {"recompute": True, "micro_batch_tokens": 8192}
    place = {"offload": "moments"} if on_host else {}
    counted = planned(shape, fused_head=True, **way, **place)
    run = trained(shape, size, fused=True, **place, **way)
    total, where = sum(counted.values()), f"{shape}, moments on the {'host' if on_host else 'GPU'}"
    peak = f"{run['peak_bytes'] / 2**30:.2f} GiB of {total / 2**30:.2f} planned"
    say(f"{where}: update {run['update_s']:.2f} s ({run['spread_s'][0]:.2f} to {run['spread_s'][1]:.2f}), peak {peak}")
    return {where: run | {"planned_bytes": total, "planned": counted, "peak_to_plan": run["peak_bytes"] / total}}


def moments_8bit(smoke: bool) -> dict[str, Any]:
    """Updates with AdamW's moments in 8 bits, beside those in 32: seconds, and the peak of the GPU beside the plan's bytes."""
    size = (4, 32) if smoke else (8, 2048)
    runs = (("toy", "32bit"), ("toy", "8bit")) if smoke else (("1.7B", "32bit"), ("1.7B", "8bit"), ("4B", "8bit"))
    found: dict[str, Any] = {"runs": {}}
    for shape, bits in runs:
        optimizer = rg.AdamW() if bits == "32bit" else rg.AdamW(moments="8bit")
        way = {"recompute": True, "micro_batch_tokens": 8192}
        counted = planned(shape, fused_head=True, optimizer=optimizer, **way)
        run = trained(shape, size, fused=True, optimizer=optimizer, **way)
        total = sum(counted.values())
        run |= {"planned_bytes": total, "planned": counted, "peak_to_plan": run["peak_bytes"] / total}
        found["runs"][f"{shape}, {bits}"] = run
        say(
            f"{shape}, moments of {bits}: update {run['update_s']:.3f} s, peak {run['peak_bytes'] / 2**30:.2f} GiB of {total / 2**30:.2f} "
            f"planned ({run['peak_to_plan']:.3f})"
        )
    return found


def moments_learning(smoke: bool) -> dict[str, Any]:
    """Losses of a model of bytes that learns this repository's pages from nothing, with moments of 32 and of 8 bits: the same batches."""
    on_gpu = device() == "cuda"
    hidden, layers, rows, length, steps = (1024, 12, 32, 512, 150) if on_gpu else (128, 3, 8, 96, 100)
    seeds, steps = (range(1), 2) if smoke else (range(3), steps)
    found: dict[str, Any] = {"hidden": hidden, "layers": layers, "tokens": rows * length, "runs": {}}
    for seed in seeds:
        for bits in ("32bit", "8bit"):
            start = time.monotonic()
            losses = learnt(seed, bits, hidden, layers, (rows, length), steps)
            last = statistics.mean(losses[-20:])
            found["runs"][f"{bits}, seed {seed}"] = {"last_20": last, "losses": [round(loss, 4) for loss in losses]}
            seconds = time.monotonic() - start
            say(f"moments of {bits}, seed {seed}: {losses[0]:.3f} to {last:.4f} nats a byte in {steps} updates, {seconds:.0f} s")
    return found


def learnt(seed: int, bits: str, hidden: int, layers: int, size: tuple[int, int], steps: int) -> list[float]:
    """The losses of a run."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlgraph.engines.forward.head import PolicyHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.values.trainer import TrainerSettings

    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "head_dim": 64}
    torch.manual_seed(seed)
    config = Qwen3Config(vocab_size=256, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=3 * hidden, **heads)
    head = PolicyHead(Qwen3ForCausalLM(config).eval())
    schedule = rg.optim.Cosine(warmup_steps=10, steps=max(steps, 11))
    adam = rg.AdamW(lr=2e-3, betas=(0.9, 0.95), schedule=schedule, moments="8bit" if bits == "8bit" else "32bit")
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    engine = FsdpEngine(head, TrainerSettings(optimizer=adam), device=device(), dtype=dtype)
    text = torch.frombuffer(
        bytearray(b"\n".join(page.read_bytes() for page in sorted(Path("docs").glob("*.md")))), dtype=torch.uint8
    ).long()
    draw, (rows, length), losses = torch.Generator().manual_seed(seed), size, []
    for _ in range(steps):
        batch = torch.stack([text[at : at + length] for at in torch.randint(len(text) - length, (rows,), generator=draw).tolist()])
        masks = {"prompt_mask": torch.ones(rows, 1, dtype=torch.bool), "response_mask": torch.ones(rows, length - 1, dtype=torch.bool)}
        losses.append(engine.update({"prompts": batch[:, :1], "responses": batch[:, 1:], **masks}, rg.SFTLoss())["actor/pg_loss"])
    engine.close()
    return losses
