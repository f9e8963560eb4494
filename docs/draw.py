"""Draw the graph of the README's program.

python docs/draw.py FILE.svg
"""

import sys

import rlgraph as rg


def right(responses: list[str], answers: list[str]) -> list[float]:
    return [float(answer in response) for response, answer in zip(responses, answers, strict=True)]


def grpo() -> rg.Graph:
    model = "Qwen/Qwen3-0.6B"  # compiling never opens it
    generator = rg.Generator(model, pool=rg.Pool("rollout"))
    policy = rg.Policy(model, pool=rg.Pool("train"))
    weights = rg.feedback("weights", depth=1)

    prompts = rg.prompts([{"prompt": f"{a} + 4 =", "answer": str(a + 4)} for a in range(20)], count=8)
    rollout = generator.rollout(prompts, weights, group_size=8)
    rewards = rg.reward(right, prompts, rollout)
    advantages = rg.advantages(rollout, rewards, estimator=rg.GRPO())
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss())
    weights.close(step.weights)
    return rg.Graph("grpo", step.metrics)


if __name__ == "__main__":
    rg.compile(grpo(), rg.Cluster(gpus=2, cpus=16)).draw(sys.argv[1])
