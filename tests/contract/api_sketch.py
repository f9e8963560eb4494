"""The public API, as its users write it. This file is the contract: it must run unchanged, with no Ray and no GPU.

python api_sketch.py [key=value ...]      declares, compiles, prints and draws every graph below
"""

from dataclasses import dataclass

import rlgraph as rg


@dataclass
class Config:  # omegaconf structured config: typed, unknown keys rejected; dataclass < config=FILE.yaml < key=value
    model: str = "Qwen/Qwen3-0.6B"
    prompts: int = 128  # prompts a step
    group_size: int = 8  # responses a prompt
    depth: int = 1  # staleness bound in weight versions; 0 is on-policy
    gpus: int = 8
    steps: int = 100


def exact_match(responses: list[str], answers: list[str]) -> list[float]:
    return [float(a == r.strip()) for r, a in zip(responses, answers, strict=True)]


QUESTIONS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]


def grpo(cfg: Config, rollout_pool: rg.Pool, train_pool: rg.Pool, depth: int, buffers: int = 1) -> rg.Graph:
    generator = rg.Generator(cfg.model, pool=rollout_pool, sampling=rg.Sampling(max_tokens=1024, temperature=1.0))
    policy = rg.Policy(cfg.model, pool=train_pool, optimizer=rg.AdamW(lr=1e-6))
    weights = rg.feedback("weights", depth=depth, buffers=buffers)  # the graph's one back edge

    prompts = rg.prompts(QUESTIONS, count=cfg.prompts, seed=0)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size)
    rewards = rg.reward(exact_match, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)  # the graph is found from its outputs


def sync_colocated(cfg: Config) -> rg.Graph:  # one pool, time-shared; on-policy
    pool = rg.Pool("shared")
    return grpo(cfg, pool, pool, depth=0)


def one_step_off(cfg: Config) -> rg.Graph:  # two pools, GPUs 1:3; rollout k+1 overlaps update k
    return grpo(cfg, rg.Pool("rollout", share=1), rg.Pool("train", share=3), depth=1)


def k_step_off(cfg: Config) -> rg.Graph:  # deeper pipeline; the compiler chooses the shares; weights land in a second buffer
    return grpo(cfg, rg.Pool("rollout", share=None), rg.Pool("train", share=None), depth=cfg.depth + 1, buffers=2)


def ppo(cfg: Config) -> rg.Graph:  # old, reference and value passes are nodes of their own and overlap by themselves
    rollout_pool, train_pool, score_pool = rg.Pool("rollout", share=2), rg.Pool("train", share=2), rg.Pool("score", share=1)
    generator, policy = rg.Generator(cfg.model, pool=rollout_pool), rg.Policy(cfg.model, pool=train_pool)
    critic, reference = rg.Critic(cfg.model, pool=train_pool), rg.Reference(cfg.model, pool=score_pool)
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(QUESTIONS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights)
    rewards = rg.reward(exact_match, prompts, rollout)
    old, ref, values = policy.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout)
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, coef=0.05)
    targets = rg.advantages(rollout, shaped, values, estimator=rg.GAE(gamma=1.0, lam=0.95))
    correction = rg.stages.rollout_correction(rollout, old, weights=rg.estimators.TruncatedIS(level="token", threshold=2.0))
    actor_step = policy.update(rollout, old, targets, correction, loss=rg.ClippedLoss())
    critic_step = critic.update(rollout, values, targets, loss=rg.losses.ValueLoss(clip=0.5))
    weights.close(actor_step.weights)
    return rg.Graph("ppo", actor_step.metrics, critic_step.metrics)


def tool_use(cfg: Config) -> rg.Graph:  # the turn loop lives inside one node; tools run on a CPU pool
    generator = rg.Generator(cfg.model, pool=rg.Pool("rollout", share=3))
    policy = rg.Policy(cfg.model, pool=rg.Pool("train", share=1))
    tools = rg.Tools([rg.tools.python], pool=rg.Pool("sandbox", cpus=32))
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2)

    prompts = rg.prompts(QUESTIONS, count=cfg.prompts)
    rollout = generator.rollout(prompts, weights, tools=tools, max_turns=8, group_size=cfg.group_size)
    advantages = rg.advantages(rollout, rg.reward(exact_match, prompts, rollout), estimator=rg.RLOO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())  # response_mask is 0 on tool tokens
    weights.close(step.weights)
    return rg.Graph("tool_use", step.metrics)


@rg.node(reads="response_mask", writes="rewards")  # a user's own node is what the library's nodes are
def brevity(batch: rg.Columns) -> rg.Columns:
    return {"rewards": -batch["response_mask"].sum(-1).float() / 1000}


if __name__ == "__main__":
    cfg = rg.config(Config)
    for build in (sync_colocated, one_step_off, k_step_off, ppo, tool_use):
        plan = rg.compile(build(cfg), rg.Cluster(gpus=cfg.gpus, cpus=64))  # pure: no Ray, no GPU, milliseconds
        print(plan)  # GPUs per pool, channels, staleness bound, predicted step time, critical cycle
        plan.draw(f"{build.__name__}.svg")
        plan.timeline(f"{build.__name__}.json", steps=6)  # Perfetto; a measured trace uses the same track names

# To run one:
#     with plan.launch() as job:              # Ray actors, channels and one Compiled Graph, torn down on exit
#         for step in job.steps(cfg.steps):
#             print(step.index, step.metrics, step.staleness)
