"""One response of several turns: its messages, its tokens, and which of these the model wrote."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlgraph.engines.api import Finish, Request, Response
from rlgraph.engines.hf_models.chat_template import ChatPrompt
from rlgraph.nodes.environments.agent import Environment
from rlgraph.nodes.environments.messages import Message
from rlgraph.nodes.rollout.decode_loop import Outcome, Task

NEXT_TURN = 7_368_787  # added to the seed for each turn


@dataclass(eq=False)
class Conversation:
    """A conversation so far. `written` marks the tokens that the model sampled; the others are what it read between its turns.

    `rewards` are by the place of the last token of each turn, and `counts` are added to the metrics.
    """

    task: Task
    chat: ChatPrompt
    begun: float
    prompt: Sequence[int] = ()
    environment: Environment | None = None
    said: Message | None = None
    turn: int = 0
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    rewards: dict[int, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    finish: Finish = "stop"
    ended: bool = False

    @property
    def room(self) -> int:
        """How many tokens the response may still get, those of answers included."""
        return self.task.request.sampling.max_tokens - len(self.tokens)

    def next_request(self, close: int, most: int | None = None) -> Request:
        """Build the request of the present turn: the prompt and all turns so far.

        A turn ends at the template's token `close`, and has at most `most` tokens.
        """
        return Request(
            f"{self.task.request.id}/{self.turn}",
            [*self.prompt, *self.tokens],
            self.task.request.sampling.of_turn(self.room if most is None else min(self.room, most), close),
            (self.task.request.seed + NEXT_TURN * self.turn) % 2**31,
            self.task.request.id,
        )

    def wrote(self, response: Response) -> None:
        """Append a turn of the model."""
        self.tokens += response.tokens
        self.log_probs += response.log_probs
        self.versions += response.versions
        self.written += [True] * len(response.tokens)
        self.finish = response.finish
        self.turn += 1

    def rewarded(self, reward: float) -> None:
        """Add a reward for the last turn of the model: at its last token."""
        place = len(self.written) - 1 - self.written[::-1].index(True)
        self.rewards[place] = self.rewards.get(place, 0.0) + reward

    def told(self, tokens: Sequence[int]) -> None:
        """Append what the model reads. These tokens are not trained, since the policy did not write them."""
        said = list(tokens)[: self.room]
        self.tokens += said
        self.log_probs += [0.0] * len(said)
        self.versions += [self.versions[-1] if self.versions else 0] * len(said)
        self.written += [False] * len(said)

    def sampled(self) -> Outcome:
        """The response as a rollout writes it."""
        counts = {
            "turns": self.turn,
            "seconds": time.monotonic() - self.begun,
            "tokens": len(self.written) - sum(self.written),
            **self.counts,
        }
        response = Response(self.tokens, self.log_probs, self.versions, self.finish)
        return Outcome(self.prompt, response, self.written, self.rewards, counts)
