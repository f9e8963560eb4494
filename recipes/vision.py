"""A model that reads pictures: fine-tuned until it counts a little, then GRPO on right answers.

    python recipes/vision.py [key=value ...] [config=FILE.yaml]

Trains a LLaVA of a million random weights, made at the start, to count the filled cells of drawn pictures; its tower stays as it is drawn.
Two cores take three minutes. `--help` lists the settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tasks.pictures import pictures, right_count, small_model

import rlgraph as rg


@dataclass
class Config:
    model: str = "tiny"  # a folder with a model that reads images, or tiny: made in OUT
    engine: str = "transformers"  # or vllm
    examples: int = 64  # examples per step of fine-tuning
    sft_steps: int = 40
    prompts: int = 32  # prompts per step of GRPO
    group_size: int = 8  # responses per prompt
    rl_steps: int = 60
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    held_out: int = 400  # questions of an evaluation
    every: int = 20  # steps between two evaluations
    profiled: int = 0  # steps of a profile before each graph, from which its step is predicted
    seed: int = 0
    out: str = "runs/vision"


def graphs(cfg: Config) -> tuple[list[Callable[..., rg.Graph]], list[int]]:
    """The graphs one after the other, and their steps."""
    rows, unseen = pictures(2048, cfg.seed), pictures(cfg.held_out, cfg.seed + 1)
    greedy = rg.Sampling(max_tokens=2, temperature=0)

    def fine_tuning() -> rg.Graph:
        model = str(small_model(Path(cfg.out) / "tiny")) if cfg.model == "tiny" else rg.model_folder(cfg.model)
        optimizer = rg.AdamW(lr=1e-3, schedule=rg.optim.Constant(warmup_steps=20))
        policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=optimizer)
        step = policy.update(rg.examples(rows, cfg.examples, policy, seed=cfg.seed), loss=rg.SFTLoss())
        return rg.Graph("fine_tuning", step.metrics)

    def reinforcement(fine_tuning: str) -> rg.Graph:  # the folder of the weights that the first graph left
        sampling = rg.Sampling(max_tokens=2)
        generator = rg.Generator(fine_tuning, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, images=1, seed=cfg.seed)
        policy = rg.Policy(fine_tuning, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=2e-4))
        weights = rg.feedback("weights", depth=cfg.depth)

        prompts = rg.prompts(rows, count=cfg.prompts, seed=cfg.seed)
        rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
        rewards = rg.reward(right_count, prompts, rollout)
        advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
        step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
        score = rg.evaluate(generator, unseen, weights, reward=right_count, every=cfg.every, at_start=True, sampling=greedy)
        weights.close(step.weights)
        return rg.Graph("reinforcement", step.metrics, score)

    return [fine_tuning, reinforcement], [cfg.sft_steps, cfg.rl_steps]


if __name__ == "__main__":
    cfg = rg.config(Config)
    stages, steps = graphs(cfg)
    for done in rg.run(stages, cfg.out, steps=steps, profiled=cfg.profiled):
        print(f"{done.name}: {done.folder}, weights {done.model}")
