"""What loops of conversations have in common, for the rollouts that sample by them."""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from typing import ClassVar

from rlgraph.nodes.rollout.decode_loop import Outcome, Task


class ConversationLoop(ABC):
    """Samples conversations; a decoder of `DecodeLoop`.

    `seconds` are those of `reply` and `idle`, and errors of `close`, until they are taken. `counted` names further counts of its own.
    """

    counted: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Queue a task."""

    @abstractmethod
    def step(self) -> Mapping[str, Outcome]:
        """Decode one step, or wait a while if nothing can; return the responses that have ended, by the id of their request."""

    @abstractmethod
    def close(self) -> None:
        """End all conversations, where the rollout has failed."""
