"""Parts of `small_gpu.py` that run a job on one GPU: time-shared pools, and learning with fp8 rollouts."""

import ctypes
import multiprocessing
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import rlgraph as rg
from benchmarks.lib.shapes import random_model
from benchmarks.speed.small_gpu import keep, say

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from tasks.addition import right_number, sums

FOLDER = ".models"
GIB80 = 80 * 10**9
SUMS = [{"prompt": f"{a} + {b} ="} for a in range(1, 10) for b in range(1, 10)]


def length(responses: list[str]) -> list[float]:
    return [float(len(response)) for response in responses]


@dataclass
class UsedMemory:
    """The memory of the first GPU that all processes have, asked of the driver every 50 ms; 0 without one."""

    peak: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "UsedMemory":
        try:
            self._nvml: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return self
        self._nvml.nvmlInit_v2()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        device, sizes = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
        index = int((os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0] or 0)
        self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        while not self._ended.wait(0.05):
            if self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(sizes)) == 0:
                self.peak = max(self.peak, int(sizes[2]))

    def __exit__(self, *error: object) -> None:
        self._ended.set()


@dataclass(frozen=True)
class Size:
    """What a job in turns is made of."""

    shape: str
    prompts: int
    group: int
    tokens: int
    micro_batch_tokens: int
    memory: float | None
    adapter: rg.LoRA | None = None
    steps: int = 6
    offload: Literal["never"] | None = None


FULL = Size("1.7B", 32, 8, 512, 16384, 0.4, steps=5)
ADAPTER = Size("8B", 16, 8, 256, 8192, 0.34, rg.LoRA(rank=32), steps=5)  # engine and base of 48 GB, as a GPU of 80 GB has room for
TINY = Size("toy", 2, 2, 8, 8192, None, steps=3)
TINY_ADAPTER = Size("toy", 2, 2, 8, 8192, None, rg.LoRA(rank=4), steps=3)


def graph(size: Size, folder: str, *, gpu: bool) -> rg.Graph:
    pool = rg.Pool("gpu") if gpu else rg.Pool("gpu", cpus=1)
    few: dict[str, Any] = {"max_sequences": size.prompts * size.group}
    kind: dict[str, Any] = few if gpu else {"engine": "transformers", "dtype": "float32"}
    generator = rg.Generator(
        folder,
        pool=pool,
        sampling=rg.Sampling(max_tokens=size.tokens, ignore_eos=True),
        max_context=size.tokens + 64,
        memory=size.memory,
        **kind,
    )
    policy = rg.Policy(
        folder,
        pool=pool,
        optimizer=rg.AdamW(lr=1e-6),
        micro_batch_tokens=size.micro_batch_tokens,
        recompute=gpu,
        adapter=size.adapter,
        offload=size.offload if gpu else None,
        dtype="bfloat16" if gpu else "float32",
    )
    weights = rg.feedback("weights", depth=0)
    rollout = generator.rollout(rg.prompts(SUMS, count=size.prompts), weights, group_size=size.group)
    advantages = rg.advantages(rollout, rg.reward(length, rollout), estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("one_gpu", step.metrics)


def in_turns(size: Size) -> dict[str, Any]:
    """Run the job: seconds of its parts, and the most memory of the GPU that all processes had."""
    cluster = rg.local_cluster()
    folder = random_model(size.shape, FOLDER)
    say(f"weights are in {folder}")
    plan = rg.compile(graph(size, folder, gpu=cluster.gpus > 0), cluster)
    print(plan, flush=True)
    marks = [time.monotonic()]
    steps = []
    with UsedMemory() as used:
        with plan.launch(deadline_s=180) as job:
            marks.append(time.monotonic())
            say(f"launched in {marks[-1] - marks[0]:.1f} s")
            for step in job.steps(size.steps):
                steps.append(step)
                timings = {n.removeprefix("timing_s/"): round(v, 3) for n, v in step.metrics.items() if n.startswith("timing_s/")}
                say(f"step {step.index}: {step.seconds:.2f} s {timings}")
            spans = job.spans()
        peak = used.peak
    kinds = sorted({span.kind for span in spans})
    timed = [span for span in spans if span.step >= min(2, size.steps - 1)]
    seconds = {
        f"{kind} of {name}": statistics.median(s.end_s - s.start_s for s in timed if (s.kind, s.name) == (kind, name))
        for kind in kinds
        for name in sorted({s.name for s in timed if s.kind == kind})
    }
    whole = statistics.median(step.seconds for step in steps[2:] or steps)
    fires = sum(value for name, value in seconds.items() if name.startswith("fire"))
    found = {
        "shape": size.shape,
        "adapter": None if size.adapter is None else size.adapter.rank,
        "launch_s": marks[1] - marks[0],
        "first_step_s": steps[0].seconds,
        "step_s": whole,
        "steps_s": [step.seconds for step in steps],
        "spans_s": seconds,
        "nodes_s": fires,
        "step_to_nodes": whole / fires,
        "peak_bytes": peak,
        "planned_bytes": {need.place: need.peak_bytes for need in plan.memory},
        "fits_80_gb": 0 < peak <= GIB80,
    }
    for name, value in seconds.items():
        say(f"  {name}: {value:.3f} s")
    say(f"{size.shape}: step {whole:.2f} s, its nodes {fires:.2f} s ({whole / fires:.3f}); GPU peak {peak / 1e9:.1f} GB")
    return found


def rolled_out(size: Size) -> dict[str, Any]:
    """Seconds of the rollout with the GPU to itself: an engine of the same settings in this process."""
    from rlgraph.engines.vllm.engine import VllmEngine

    rows, gpu = size.prompts * size.group, rg.local_cluster().gpus > 0
    machine: dict[str, Any] = {"memory": size.memory} if gpu else {"dtype": "float32"}
    start = time.monotonic()
    engine = VllmEngine(random_model(size.shape, FOLDER), max_model_len=size.tokens + 64, max_sequences=rows, **machine)
    say(f"engine up in {time.monotonic() - start:.1f} s")
    prompts = [[ord(letter) + 5 for letter in SUMS[row % len(SUMS)]["prompt"]] for row in range(rows)]
    seconds = []
    for repeat in range(3):
        start = time.monotonic()
        engine.generate(prompts, rg.Sampling(max_tokens=size.tokens, ignore_eos=True), [repeat * rows + row for row in range(rows)])
        seconds.append(time.monotonic() - start)
        say(f"rollout alone: {seconds[-1]:.2f} s")
    return {"rollout_alone_s": statistics.median(seconds[1:]), "rollout_alone_each_s": seconds}


def trained_alone(size: Size) -> dict[str, Any]:
    """Seconds of the update with the GPU to itself, of as many tokens."""
    from benchmarks.speed.small_gpu_training import trained

    run = trained(
        size.shape, (size.prompts * size.group, size.tokens + 8), fused=True, recompute=True,
        micro_batch_tokens=size.micro_batch_tokens, adapter=size.adapter,
    )  # fmt: skip
    say(f"update alone: {run['update_s']:.2f} s")
    return {"update_alone_s": run["update_s"], "update_alone_spread_s": run["spread_s"]}


def halves(size: Size) -> dict[str, Any]:
    """Seconds of a rollout and of an update, each in a process of its own that has the GPU to itself."""
    found: dict[str, Any] = {"shape": size.shape}
    for half in (rolled_out, trained_alone):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found |= pool.apply_async(half, (size,)).get(150)
    found["halves_s"] = found["rollout_alone_s"] + found["update_alone_s"]
    say(f"{size.shape}: {found['halves_s']:.2f} s of the two alone")
    return found


def colocated(smoke: bool) -> dict[str, Any]:
    return in_turns(TINY if smoke else FULL)


def colocated_stay(smoke: bool) -> dict[str, Any]:
    return in_turns(replace(TINY if smoke else FULL, offload="never"))


def colocated_halves(smoke: bool) -> dict[str, Any]:
    return halves(TINY if smoke else FULL)


def colocated_8b(smoke: bool) -> dict[str, Any]:
    return in_turns(TINY_ADAPTER if smoke else ADAPTER)


def colocated_8b_halves(smoke: bool) -> dict[str, Any]:
    return halves(TINY_ADAPTER if smoke else ADAPTER)


def learns(folder: str, fp8: bool, corrected: bool, seed: int, *, gpu: bool) -> rg.Graph:
    """A model learns to add, on one GPU in turns."""
    pool = rg.Pool("gpu") if gpu else rg.Pool("gpu", cpus=1)
    kind: dict[str, Any] = {"memory": 0.3, "max_sequences": 256} if gpu else {"engine": "transformers", "dtype": "float32"}
    kind |= {"weights_dtype": "fp8"} if fp8 else {}
    sampling = rg.Sampling(max_tokens=5)
    generator = rg.Generator(folder, pool=pool, sampling=sampling, max_context=64, **kind)
    policy = rg.Policy(folder, pool=pool, optimizer=rg.AdamW(lr=5e-6), dtype="bfloat16" if gpu else "float32")
    weights = rg.feedback("weights", depth=0)
    prompts = rg.prompts(sums(seed), count=16 if gpu else 2, seed=seed)
    rollout = generator.rollout(prompts, weights, group_size=8 if gpu else 2)
    rewards = rg.reward(right_number, prompts, rollout)
    old = policy.log_probs(rollout)
    more = (rg.stages.rollout_correction(rollout, old, weights=rg.estimators.TruncatedIS(level="token")),) if corrected else ()
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, old, *more, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("learns", step.metrics)


def fp8_learning(smoke: bool) -> dict[str, Any]:
    with rg.runs.warm(engines=True):
        return fp8_learning_in_block(smoke)


def fp8_learning_in_block(smoke: bool) -> dict[str, Any]:
    gpu = rg.local_cluster().gpus > 0
    name = "tiny" if smoke else "smollm2"
    folder = str(rg.model_folder(name))
    found: dict[str, Any] = {"model": name, "reward": "the share of right sums", "runs": {}}
    ways = (("bfloat16", False, True), ("fp8", gpu, True), ("fp8, not corrected", gpu, False))
    for name, fp8, corrected, seed in ((*way, seed) for way in ways for seed in range(1 if smoke else 3)):
        rewards: list[float] = []
        rest: dict[str, list[float]] = {}
        start = time.monotonic()
        with rg.compile(learns(folder, fp8, corrected, seed, gpu=gpu), rg.local_cluster()).launch(deadline_s=120) as job:
            ready_s = time.monotonic() - start
            for step in job.steps(3 if smoke else 40):
                rewards.append(step.metrics["critic/rewards/mean"])
                for metric, value in step.metrics.items():
                    if metric.startswith(("rollout_corr/", "guards/mismatch")):
                        rest.setdefault(metric, []).append(value)
        run: dict[str, Any] = {
            "rewards": rewards,
            "ready_s": ready_s,
            "steps_s": time.monotonic() - start - ready_s,
            "metrics": {metric: statistics.fmean(each) for metric, each in rest.items()},
        }
        found["runs"].setdefault(name, []).append(run)
        first, last = (statistics.fmean(part) for part in (rewards[:4], rewards[-4:]))
        kl = run["metrics"].get("rollout_corr/kl")
        say(f"{name}, seed {seed}: ready after {ready_s:.1f} s, reward {first:.3f} -> {last:.3f}, kl {kl}")
        keep(found)
    for name, runs in found["runs"].items():
        ends = [statistics.fmean(run["rewards"][-4:]) for run in runs]
        found[f"last four steps, {name}"] = {"mean": statistics.fmean(ends), "least": min(ends), "most": max(ends)}
    return found
