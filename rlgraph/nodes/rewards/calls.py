"""How a reward function is called: how many calls at a time, within which deadline, and what becomes of one that fails."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlgraph.errors import GraphError, shown
from rlgraph.nodes.rewards.retry import Retry

CONCURRENCY = 16


class Scorer(ABC):
    """A reward function that brings settings of its calls: how many run at a time, and what becomes of one that fails."""

    concurrency: int
    retries: Retry | None

    def check(self) -> None:  # noqa: B027 (a scorer may need nothing)
        """Check what the scorer needs before anything starts. Raises RlgraphError."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Score a response."""


@dataclass(frozen=True)
class Calls:
    """How a reward function is called. None for a scorer's own setting, or else for 16 at a time and no retries.

    `trial` says that the launch tries it on a made-up batch.
    """

    concurrency: int | None
    deadline_s: float
    retries: Retry | None
    trial: bool = True

    def tries(self, function: Callable[..., Any]) -> bool:
        """Whether the launch tries a function: not a scorer, which checks itself, and no calls that may fail."""
        return self.trial and self.retries is None and not isinstance(function, Scorer)

    def of(self, where: str, function: Callable[..., Any]) -> tuple[int, float, Retry | None]:
        """Look up the settings for a function. Raises GraphError if both give retries."""
        if not isinstance(function, Scorer):
            return self.concurrency or CONCURRENCY, self.deadline_s, self.retries
        if self.retries is not None and function.retries is not None:
            raise GraphError(f"{where} has retries={shown(self.retries)}, but {shown(function)} brings its own; set them there")
        return self.concurrency or function.concurrency, self.deadline_s, self.retries or function.retries
