"""Retries of calls that fail: how often, after which pause, and the score if all fail."""

import random
from dataclasses import dataclass
from typing import Annotated

from rlgraph import settings
from rlgraph.settings import AtLeastZero, Finite, Natural, Range, Seconds


class Busy(Exception):
    """A service asks to be called again, after `after_s` seconds at the earliest."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


@settings.refuse_unknown
@dataclass(frozen=True, kw_only=True)
class Retry:
    """Call a reward again if it fails: raises, misses its deadline, or returns no finite number. For calls over a network.

    >>> import rlgraph as rg
    >>> retry = rg.Retry(times=2, backoff_s=1.0, default=0.0)  # for rg.reward(judge, rollout, retries=retry)
    >>> 1.0 <= retry.delay(place=0, attempt=0) < 1.5, 2.0 <= retry.delay(place=0, attempt=1) < 3.0
    (True, True)

    * `times`: further calls after one that failed.
    * `backoff_s`: seconds before the first of them. Each next pause is twice as long, up to `most_s`. A random share of up to `jitter`,
      drawn by `seed`, makes each pause longer, so that calls that failed together do not come back together.
    * `default`: the score of a response whose calls all failed. None: they end the run with the error of the last.

    An `RlgraphError` that the function raises ends the run at once: it means that no further call can succeed. A call that misses
    its deadline is left alone if it runs on a thread, and cancelled if it is async.
    """

    times: Annotated[int, Range(least=0, rule="how many times a failed call is repeated, a whole number of at least 0")] = 3
    backoff_s: Annotated[float, Range(least=0, rule="a number of seconds of at least 0")] = 1.0
    most_s: Seconds = 60.0
    jitter: AtLeastZero = 0.5
    default: Finite | None = None
    seed: Natural = 0

    def __post_init__(self) -> None:
        settings.check(self)

    def delay(self, place: int, attempt: int, at_least_s: float = 0.0) -> float:
        """Compute the seconds between the failure of an attempt, 0 for the first, and the next. The call's place seeds the jitter."""
        pause = min(self.backoff_s * 2**attempt, self.most_s)
        return max(pause, at_least_s) * (1 + self.jitter * random.Random(f"{self.seed} {place} {attempt}").random())


ONCE = Retry(times=0)  # a call that fails ends the run
