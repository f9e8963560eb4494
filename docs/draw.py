"""Draw the graph that the README shows: PPO with a critic and a reference, on 8 GPUs.

python docs/draw.py FILE.svg
"""

import sys

import rlgraph as rg

QUESTIONS = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(10)]


def exact(responses: list[str], answers: list[str]) -> list[float]:
    return [float(r.strip() == a) for r, a in zip(responses, answers, strict=True)]


def ppo() -> rg.Graph:
    model = "Qwen/Qwen3-0.6B"  # compiling never opens it
    rollout_pool, train_pool, score_pool = rg.Pool("rollout", share=4), rg.Pool("train", share=3), rg.Pool("score", share=1)
    generator, policy = rg.Generator(model, pool=rollout_pool), rg.Policy(model, pool=train_pool)
    critic, reference = rg.Critic(model, pool=train_pool), rg.Reference(model, pool=score_pool)
    weights = rg.feedback("weights", depth=1)

    prompts = rg.prompts(QUESTIONS, count=128)
    rollout = generator.rollout(prompts, weights)
    rewards = rg.reward(exact, prompts, rollout)
    old, ref, values = policy.log_probs(rollout), reference.log_probs(rollout), critic.values(rollout)
    shaped = rg.stages.kl_shaped_rewards(rollout, rewards, old, ref, coef=0.05)
    targets = rg.advantages(rollout, shaped, values, estimator=rg.GAE(gamma=1.0, lam=0.95))
    actor_step = policy.update(rollout, old, targets, loss=rg.ClippedLoss())
    critic_step = critic.update(rollout, values, targets, loss=rg.losses.ValueLoss(clip=0.5))
    weights.close(actor_step.weights)
    return rg.Graph("ppo", actor_step.metrics, critic_step.metrics)


if __name__ == "__main__":
    rg.compile(ppo(), rg.Cluster(gpus=8, cpus=64)).draw(sys.argv[1])
