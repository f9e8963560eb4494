"""Tasks of Reasoning Gym as conversations: the model may try again."""

from dataclasses import dataclass

from rlgraph import settings
from rlgraph.nodes.environments.messages import Message, Turn
from rlgraph.nodes.rewards.scorers import ReasoningGym
from rlgraph.settings import Count, Name


@dataclass(frozen=True, eq=False)
class Tries:
    """Makes conversations about the items of a task: see `reasoning_gym`."""

    task: ReasoningGym
    tries: Count = 3
    again: Name = "That is wrong. Try again."

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, item: int) -> "Trying":
        return Trying(self, item)


def reasoning_gym(task: ReasoningGym, *, tries: int = 3, again: str = "That is wrong. Try again.") -> Tries:
    """Ask the questions of a task, and let the model try again: `agent=rg.environments.reasoning_gym(task)`.

    >>> import rlgraph as rg
    >>> task = rg.scorers.reasoning_gym("chain_sum", size=10)
    >>> rg.environments.reasoning_gym(task, tries=2).tries
    2

    `task` is an `rg.scorers.reasoning_gym("chain_sum", size=500)`, which `rg.prompts` takes as its data too. The reward of a turn is the
    gain of the task's score over the best one so far, divided by the number of the try: an early right answer is worth the most. After an
    answer whose score is below 1 the model reads `again`.
    """
    return Tries(task, tries, again)


class Trying:
    """A question, and the tries to answer it."""

    def __init__(self, of: Tries, item: int) -> None:
        self.of, self.item, self.tries, self.best = of, item, 0, 0.0

    async def reset(self) -> None:
        """The question is the prompt's own."""

    async def step(self, said: Message) -> Turn:
        self.tries += 1
        score = self.of.task.score(said.content, self.item)
        better, self.best = max(score - self.best, 0.0), max(score, self.best)
        done = score >= 1 or self.tries >= self.of.tries
        return Turn(
            [Message("user", self.of.again)], reward=better / self.tries, done=done, info={"tries": 1.0, "solved": float(score >= 1)}
        )

    async def close(self) -> None:
        """Do nothing: it holds no resources."""
