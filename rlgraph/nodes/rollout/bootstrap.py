"""Best, worst and majority of k answers to an item, estimated by a bootstrap over its n answers with verl's draws."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

DRAWS = 1000
SEED = 42  # verl's: the same draws for every item, variable and step


def sizes(answers: int) -> list[int]:
    """List the k of an item with so many answers: 2, 4, 8, … and all of them; none for a single answer.

    >>> sizes(6)
    [2, 4, 6]
    """
    return [1 << i for i in range(1, answers.bit_length()) if 1 << i < answers] + ([answers] if answers > 1 else [])


@lru_cache(maxsize=16)
def draws(answers: int, k: int) -> npt.NDArray[np.int64]:
    """Draw k of an item's answers with replacement, 1000 times: their places, [1000, k]."""
    return np.random.RandomState(SEED).choice(answers, size=(DRAWS, k), replace=True)


def bootstrap(values: Sequence[float], votes: Sequence[str] | None = None) -> dict[str, float]:
    """Compute `best@k/mean`, `worst@k/mean` and, with `votes`, `maj@k/mean` of an item's answers, and each's `std` over the draws.

    `maj@k` is the value of the answer given most often among k, the one drawn first among equals; its value is that of the first
    response that gives it. Equal to verl 0.9.1's `bootstrap_metric` and `calc_maj_val`, bit for bit.

    >>> found = bootstrap([1.0, 0.0, 0.0], ["4", "5", "5"])
    >>> found["best@2/mean"], found["maj@3/mean"]
    (0.574, 0.284)
    """
    given = np.asarray(values, dtype=np.float64)
    found: dict[str, float] = {}
    for k in sizes(len(given)):
        drawn = given[draws(len(given), k)]
        outcomes = {"best": drawn.max(-1), "worst": drawn.min(-1)}
        if votes is not None:
            outcomes["maj"] = drawn[np.arange(DRAWS), _elected(votes, k)]
        for name, outcome in outcomes.items():
            found |= {f"{name}@{k}/mean": float(outcome.mean()), f"{name}@{k}/std": float(outcome.std())}
    return found


def _elected(votes: Sequence[str], k: int) -> npt.NDArray[np.int64]:
    """Find, in each draw, the place of the first answer that most of the draw agree on, [1000]."""
    numbers = {vote: number for number, vote in enumerate(dict.fromkeys(votes))}
    cast = np.array([numbers[vote] for vote in votes])[draws(len(votes), k)]
    rows = np.arange(DRAWS)[:, None]
    counts = np.bincount((rows * len(numbers) + cast).ravel(), minlength=DRAWS * len(numbers)).reshape(DRAWS, -1)
    return counts[rows, cast].argmax(-1)
