"""The job that verl's and TRL's trainers were timed with, on the same kind of machine: GRPO on SmolLM2-135M or on a shape of Qwen3.

    python benchmarks/peers/peer_job.py [mode=one_step_off|colocated] [response_tokens=1024] [json=PATH] [costs=PATH] [write_costs=PATH] …

Uses the GPUs of one host. A file of results holds each job by its name. `one_step_off` trains on one GPU and generates on the other;
`colocated` time-shares all GPUs, on policy. `peers/run_verl.py` runs the same job with verl, `peers/run_trl.py` with TRL on one GPU.

`write_costs` keeps the node costs of this run. `costs` are those of an earlier run and predict the step before it runs (`predicted_s`).
The step computed from the costs of the run itself is a fit (`fitted_s`): it shows whether node times explain the step.
"""

import io
import itertools
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg


@dataclass
class Config:
    mode: str = "one_step_off"
    model: str = "smollm2"  # or a folder, or a shape of shapes.py, as 4B
    prompts: int = 128  # a step
    group_size: int = 8
    response_tokens: int = 1024  # of every response: the end-of-text token does not end it
    engines_per_gpu: int = 4  # decode steps of a small model are shorter than the engine's own work between two of them
    micro_batch_tokens: int = 65536
    compiled: bool = False
    recompute: bool = False
    image: int = 0  # pixels of a side of the image of each prompt, for a shape that reads images; 0: prompts are text
    rank: int = 0  # of an adapter; 0 trains all weights
    memory: float | None = None  # share of a GPU that its engines take
    steps: int = 7
    warm_up: int = 2
    json: str = ""
    name: str = ""  # of the job in that file
    costs: str = ""  # of an earlier run, to predict this one from
    write_costs: str = ""


def length(responses: list[str]) -> list[float]:
    """A reward that differs between responses; what it says does not matter here."""
    return [float(len(response)) for response in responses]


SUMS = [{"prompt": f"2 + 3 = 5\n7 + 6 = 13\n{a} + {b} ="} for a in range(1, 10) for b in range(1, 10)]
IMAGES = 512


def sums_with_images(side: int) -> list[dict[str, Any]]:
    """Sums behind images, JPEG files of so many pixels a side: enough that no step of a run has an image of another one."""
    from PIL import Image

    rows = []
    for index, row in enumerate(itertools.islice(itertools.cycle(SUMS), IMAGES)):
        drawn = torch.randint(0, 256, (16, 16, 3), generator=torch.Generator().manual_seed(index), dtype=torch.uint8)
        file = io.BytesIO()
        Image.fromarray(drawn.numpy()).resize((side, side)).save(file, "JPEG", quality=90)
        rows.append({"prompt": f"<image>{row['prompt']}", "images": [file.getvalue()]})
    return rows


def model_path(name: str) -> str:
    """Find or make the folder of a model: smollm2, a folder, or a shape of `shapes.py` with random weights."""
    from benchmarks.lib.shapes import SEEING, SHAPES, random_model

    if name in {**SHAPES, **SEEING}:
        return random_model(name, ".models")
    return name if Path(name).is_dir() else str(rg.model_folder(name))


def graph(cfg: Config) -> rg.Graph:
    colocated = cfg.mode == "colocated"
    rollout_pool = rg.Pool("gpus" if colocated else "rollout")
    train_pool = rollout_pool if colocated else rg.Pool("train")
    model = model_path(cfg.model)
    generator = rg.Generator(
        model,
        pool=rollout_pool,
        sampling=rg.Sampling(max_tokens=cfg.response_tokens, ignore_eos=True),
        max_context=64 + (cfg.image // 28 + 1) ** 2 + cfg.response_tokens,
        images=1 if cfg.image else None,
        memory=cfg.memory,
        engines_per_gpu=cfg.engines_per_gpu,
        max_sequences=cfg.prompts * cfg.group_size // cfg.engines_per_gpu,
    )
    policy = rg.Policy(
        model,
        pool=train_pool,
        optimizer=rg.AdamW(lr=1e-5 if cfg.rank else 1e-6),
        adapter=rg.LoRA(rank=cfg.rank) if cfg.rank else None,
        micro_batch_tokens=cfg.micro_batch_tokens,
        compiled=cfg.compiled,
        recompute=cfg.recompute,
    )
    weights = rg.feedback("weights", depth=0 if colocated else 1, buffers=1 if colocated else 2)

    prompts = rg.prompts(sums_with_images(cfg.image) if cfg.image else SUMS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(length, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph(f"peer_job_{cfg.mode}", step.metrics)


def run(cfg: Config) -> None:
    """Run the job, print what it took and was predicted to take, and write the files that are asked for."""
    plan = rg.compile(graph(cfg), rg.local_cluster(), rg.planning.Costs.from_file(cfg.costs) if cfg.costs else None)
    print(plan, flush=True)
    steps = []
    with plan.launch() as job:
        for step in job.steps(cfg.steps):
            steps.append(step)
            print(f"step {step.index}: {step.seconds:.2f} s, generation {step.metrics['timing_s/gen']:.2f}, "
                  f"update {step.metrics['timing_s/update_actor']:.2f}, staleness {step.staleness}", flush=True)  # fmt: skip
        costs = job.costs()
        fitted = rg.compile(graph(cfg), rg.local_cluster(), costs).prediction.step_s
    if cfg.write_costs:
        costs.to_file(cfg.write_costs)
    timed = steps[cfg.warm_up :]
    seconds = statistics.median(step.seconds for step in timed)
    names = [name for name in sorted(timed[0].metrics) if name.startswith("timing_s/")]
    parts = {name: statistics.median(step.metrics.get(name, 0.0) for step in timed) for name in names}
    tokens = cfg.prompts * cfg.group_size * cfg.response_tokens
    print(f"{cfg.mode}: {seconds:.2f} s a step (median of {len(timed)}), {fitted:.2f} s fitted")
    print(f"predicted before the run, from {plan.prediction.cost} costs: {plan.prediction.step_s:.2f} s")
    print(f"{tokens / seconds:.0f} response tokens/s")
    for name, value in parts.items():
        print(f"  {name}: {value:.3f}")
    if cfg.json:
        from benchmarks.lib.machine import machine

        file = Path(cfg.json)
        found = json.loads(file.read_text()) if file.is_file() else {}
        found[cfg.name or cfg.mode + ("" if cfg.response_tokens == 1024 else f"_{cfg.response_tokens}_tokens")] = {
            "settings": {key: value for key, value in vars(cfg).items() if key not in ("json", "name", "costs", "write_costs")},
            "step_s": seconds,
            "steps_timed": len(timed),
            "spread_s": [min(s.seconds for s in timed), max(s.seconds for s in timed)],
            "timings": parts,
            "predicted_s": plan.prediction.step_s,
            "predicted_from": plan.prediction.cost,
            "fitted_s": fitted,
            "response_tokens": tokens,
            **machine(),
        }
        file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run(rg.config(Config))
