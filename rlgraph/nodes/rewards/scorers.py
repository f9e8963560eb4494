"""Ready-made scorers for `rlgraph.reward`: `reasoning_gym` tasks, mathematics by `math-verify`, code by its tests, and judges."""

import functools
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlgraph.errors import DataError, shown
from rlgraph.nodes.rewards.code import code
from rlgraph.nodes.rewards.judge import judge, score_in
from rlgraph.nodes.rewards.mathematics import math_verify
from rlgraph.nodes.rewards.score import Score

__all__ = ["Score", "answer_in", "code", "judge", "math_verify", "reasoning_gym", "score_in"]

TAG_OR_BOX = re.compile(r"<answer>|\\boxed\{([^{}]*)\}")
END = "</answer>"


@dataclass(frozen=True)
class ReasoningGym:
    """A task of `reasoning_gym`: a data set for `rlgraph.prompts`, and `score` for `rlgraph.reward`.

    Each process makes the items again from `seed`, so only their numbers travel with a batch.
    """

    task: str
    size: int
    seed: int
    settings: tuple[tuple[str, Any], ...] = ()
    instruction: str = field(default="{question}")

    def __post_init__(self) -> None:
        if "{question}" not in self.instruction:
            raise DataError(f"reasoning_gym: instruction={shown(self.instruction)} has no {{question}}, where the question goes")
        _entries(self)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        question = _entries(self)[index]["question"]
        return {"prompt": self.instruction.replace("{question}", question), "item": index, "data_source": self.task}

    def score(self, response: str, item: int) -> float:
        """Score the answer of a response by `reasoning_gym`, from 0 to 1. See `answer_in` for the answer."""
        return float(_entries(self).score_answer(answer=answer_in(response), entry=_entries(self)[item]))


@functools.cache
def _entries(task: ReasoningGym) -> Any:
    try:
        gym = importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        raise DataError("reasoning_gym: the package reasoning-gym is not installed: pip install 'rlgraph-dataflow[rewards]'") from error
    try:
        return gym.create_dataset(task.task, size=task.size, seed=task.seed, **dict(task.settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning_gym: task '{task.task}' with {dict(task.settings)} cannot be made: {error}") from error


def reasoning_gym(task: str, *, size: int, seed: int = 0, instruction: str = "{question}", **settings: Any) -> ReasoningGym:
    """Make a task of `reasoning_gym`, such as `reasoning_gym("chain_sum", size=500, max_terms=3)`.

    >>> import rlgraph as rg
    >>> task = rg.scorers.reasoning_gym("chain_sum", size=10, max_terms=2, instruction="{question} End with \\\\boxed{}.")
    >>> rg.prompts(task, count=4).columns
    ('prompt_texts', 'prompt_ids', 'items', 'data_sources')
    >>> task.score("I do not know.", item=0)
    0.0

    Pass it to `rlgraph.prompts` and its `score` to `rlgraph.reward`. `instruction` wraps each question at `{question}`.
    Raises DataError if the package is missing, or has no such task or setting.
    """
    return ReasoningGym(task, size, seed, tuple(sorted(settings.items())), instruction)


def answer_in(response: str) -> str:
    r"""Extract the answer: the content of the last `<answer>…</answer>` or `\boxed{…}`, or else the whole response, stripped.

    >>> answer_in("So it is <answer> 42 </answer>."), answer_in(r"So it is \boxed{42}."), answer_in(" 42 ")
    ('42', '42', '42')
    """
    found, at, ends = "", 0, True  # in time linear in the text: a model writes it
    while opened := TAG_OR_BOX.search(response, at):
        at = opened.end()
        if opened[1] is not None:
            found = opened[1]
        elif ends and (ends := (end := response.find(END, at)) >= 0):
            found, at = response[at:end], end + len(END)
    return (found or response).strip()
