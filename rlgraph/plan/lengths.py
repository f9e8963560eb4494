"""The lengths of responses: a distribution defined by its quantiles, the batches drawn from it, and its measurement."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from rlgraph import settings
from rlgraph.errors import PlanError, show_value
from rlgraph.settings import AtLeastZero, Fraction

Array: TypeAlias = np.ndarray
# Denser towards 1: the longest response of a batch sets the time of a rollout.
PROBABILITIES = (*(i / 50 for i in range(49)), 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 1.0)


@settings.refuse_unknown
@dataclass(frozen=True)
class Lengths:
    """Tokens of a response: `tokens[i]` is the quantile of probability `at[i]`, with straight lines between them.

    Raises PlanError for quantiles that do not rise from 0 to 1.

    * `at`: probabilities, rising from 0 to 1.
    * `tokens`: the response length at each probability.
    * `prompt_tokens`: the mean length of a prompt.

    >>> Lengths(at=(0, 0.5, 1), tokens=(10, 200, 4000), prompt_tokens=50).mean
    1102.5
    """

    at: tuple[Fraction, ...]
    tokens: tuple[AtLeastZero, ...]
    prompt_tokens: AtLeastZero = 0.0

    def __post_init__(self) -> None:
        settings.check(self, PlanError)
        rising = all(a < b for a, b in zip(self.at, self.at[1:], strict=False))
        growing = all(a <= b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if len(self.at) != len(self.tokens) or len(self.at) < 2 or self.at[0] != 0 or self.at[-1] != 1 or not rising or not growing:
            raise PlanError(
                f"lengths have at={show_value(self.at)} and tokens={show_value(self.tokens)}; pass equally many probabilities, "
                "rising from 0 to 1, and non-decreasing tokens: at=(0, 0.5, 1), tokens=(10, 200, 4096)"
            )

    @classmethod
    def fit(cls, responses: Sequence[int], prompt_tokens: float) -> "Lengths":
        """Fit the distribution to the lengths of the responses of a run."""
        found = np.quantile(np.asarray(responses, dtype=float), PROBABILITIES)
        return cls(PROBABILITIES, tuple(float(f"{value:.6g}") for value in found), float(f"{prompt_tokens:.6g}"))

    @property
    def mean(self) -> float:
        """The mean tokens of a response."""
        return float(np.trapezoid(self.tokens, self.at))

    @property
    def sequence_of_a_token(self) -> float:
        """The mean length of a token's sequence, prompts included: long sequences have most of the tokens.

        >>> Lengths(at=(0, 1), tokens=(100, 100), prompt_tokens=50).sequence_of_a_token
        150.0
        """
        low, high = np.array(self.tokens[:-1]) + self.prompt_tokens, np.array(self.tokens[1:]) + self.prompt_tokens
        squares = (np.diff(self.at) * (low * low + low * high + high * high) / 3).sum()  # quantiles have straight lines between them
        return float(squares / max(self.mean + self.prompt_tokens, 1e-9))

    @property
    def longest(self) -> float:
        """The most tokens of a response."""
        return self.tokens[-1]

    def batches(self, steps: int, rows: int) -> Array:
        """Draw response lengths `[steps, rows]`; the same arguments always yield the same lengths."""
        return _batches(self, steps, rows)


@lru_cache(maxsize=16)
def _batches(lengths: Lengths, steps: int, rows: int) -> Array:
    drawn = np.random.default_rng(0).random((steps, rows))
    found: Array = np.ceil(np.interp(drawn, lengths.at, lengths.tokens) - 1e-9)
    return found
