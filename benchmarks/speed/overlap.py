"""One-step-off with half of the GPUs for each stage, against the same work time-shared on all GPUs: step time, bound, prediction.

    python benchmarks/speed/overlap.py SHAPE [prompts=64] [group_size=8] [median_tokens=256] [steps=6] [json=PATH]

A model with random weights and the shape of Qwen3 writes responses of geometric lengths: p99 is 6.6 times the median. The bound of the
one-step-off graph is max(generation, training) a step. The time-shared step is predicted from the costs of that run, then measured;
`right_winner` says whether the prediction named the faster of the two. What those costs give for their own run is a fit.
"""

import json
import math
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import rlgraph as rg
from benchmarks.lib.shapes import VOCAB, random_model


@dataclass
class Config:
    shape: str = "0.6B"
    models: str = ".models"
    prompts: int = 64
    group_size: int = 8
    median_tokens: int = 256
    max_tokens: int = 2048
    micro_batch_tokens: int = 16384
    engines_per_gpu: int = 1
    steps: int = 6
    warm_up: int = 2
    in_turns: bool = True  # as well
    json: str = ""


def parity(responses: list[str]) -> list[float]:
    """A reward that differs between the responses of a group."""
    return [float(len(response) % 2) for response in responses]


QUESTIONS = [{"prompt": f"Question {i}: what is {i} times {i + 1}?"} for i in range(512)]


def graph(cfg: Config, colocated: bool) -> rg.Graph:
    rollout_pool = rg.Pool("gpus" if colocated else "rollout")
    train_pool = rollout_pool if colocated else rg.Pool("train")
    folder = random_model(cfg.shape, cfg.models)
    stops = tuple(range(1000, 1000 + round(VOCAB * math.log(2) / cfg.median_tokens)))  # each token is as likely as any other
    sampling = rg.Sampling(max_tokens=cfg.max_tokens, stop_token_ids=stops)
    context = cfg.max_tokens + 128
    generator = rg.Generator(
        folder, pool=rollout_pool, sampling=sampling, max_context=context, max_sequences=512, engines_per_gpu=cfg.engines_per_gpu
    )
    policy = rg.Policy(folder, pool=train_pool, optimizer=rg.AdamW(lr=1e-7), micro_batch_tokens=cfg.micro_batch_tokens)
    weights = rg.feedback("weights", depth=0 if colocated else 1, buffers=1 if colocated else 2)

    prompts = rg.prompts(QUESTIONS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(parity, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("colocated" if colocated else "one_step_off", step.metrics)


def run(cfg: Config, colocated: bool) -> tuple[dict[str, Any], rg.planning.Costs]:
    plan = rg.compile(graph(cfg, colocated), rg.local_cluster())
    steps = []
    with plan.launch() as job:
        for step in job.steps(cfg.steps):
            steps.append(step)
            timings = {k.removeprefix("timing_s/"): round(v, 2) for k, v in step.metrics.items() if k.startswith("timing_s/")}
            print(plan.graph, step.index, f"{step.seconds:.2f} s", timings, flush=True)
        costs = job.costs()
    timed = steps[cfg.warm_up :]

    def median(name: str) -> float:
        return float(statistics.median(step.metrics.get(name, 0.0) for step in timed))

    found = {
        "step_s": statistics.mean(step.seconds for step in timed),
        "steps_s": [step.seconds for step in timed],
        "generate_s": statistics.mean(step.metrics["timing_s/gen"] for step in timed),
        "train_s": statistics.mean(step.metrics["timing_s/update_actor"] for step in timed),
        "bound_s": statistics.mean(max(step.metrics["timing_s/gen"], step.metrics["timing_s/update_actor"]) for step in timed),
        "publish_s": median("timing_s/publish"),
        "wake_s": median("timing_s/wake"),
        "sleep_s": median("timing_s/sleep"),
        "update_weights_s": median("timing_s/update_weights"),
    }
    return found, costs


def main() -> None:
    shape, *rest = sys.argv[1:]
    cfg = rg.config(Config, [f"shape={shape}", *rest])
    ahead, costs = run(cfg, colocated=False)
    bound = max(ahead["generate_s"], ahead["train_s"])
    own, turns = (rg.compile(graph(cfg, colocated), rg.local_cluster(), costs) for colocated in (False, True))
    row = {
        "settings": {key: value for key, value in vars(cfg).items() if key != "json"},
        "one_step_off": ahead,
        "step_over_bound": ahead["step_s"] / bound,
        "fitted_one_step_off_s": own.prediction.step_s,
        "predicted_colocated_s": turns.prediction.step_s,  # waking and sleeping are estimated
        "predicted_colocated_events_s": {event.name: event.seconds for event in turns.schedule.events},
    }
    print(f"{shape}: one-step-off {ahead['step_s']:.2f} s a step, fitted {own.prediction.step_s:.2f}; {row['step_over_bound']:.3f} of")
    print(f"  max(generate {ahead['generate_s']:.2f} s, train {ahead['train_s']:.2f} s)", flush=True)
    write(cfg, row)
    if cfg.in_turns:
        together, _ = run(cfg, colocated=True)
        ratio = together["step_s"] / ahead["step_s"]
        right = (turns.prediction.step_s > own.prediction.step_s) == (ratio > 1)
        row |= {"colocated": together, "colocated_over_one_step_off": ratio, "right_winner": right}
        print(f"  in turns {together['step_s']:.2f} s, predicted {turns.prediction.step_s:.2f}")
        write(cfg, row)


def write(cfg: Config, row: dict[str, Any]) -> None:
    if cfg.json:
        from benchmarks.lib.machine import machine

        Path(cfg.json).write_text(json.dumps(row | machine(), indent=1) + "\n")


if __name__ == "__main__":
    main()
