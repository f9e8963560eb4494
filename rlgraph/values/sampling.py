"""How a generator samples responses, and how batches and new weights join those that decode."""

from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, TypeAlias

from rlgraph import settings
from rlgraph.notices import old_attribute
from rlgraph.settings import Count, Name, Natural, Range

Running: TypeAlias = Literal["keep", "recompute"]  # what becomes of the keys and values of running requests at new weights


@settings.refuse_unknown
@dataclass(frozen=True)
class Sampling:
    """How a generator samples responses. A response ends with its end-of-text token, a stop token or a stop string, and includes it.

    * `max_tokens`: the most tokens per response.
    * `temperature`: divides the logits; 0 is greedy.
    * `top_k`: samples from the k most likely tokens; 0: from all.
    * `top_p`: samples from the most likely tokens that together have this probability; 1: from all.
    * `min_p`: samples from the tokens with at least `min_p` times the probability of the most likely token; 0: from all. It applies before
      `top_k` and `top_p`.
    * `stop_token_ids`: further token ids that end a response.
    * `stop`: texts that end a response. The response keeps all sampled tokens: the stop string, and any text after it in its last token.
      Special tokens count with their text. Each turn of a conversation ends at them too.
    * `ignore_eos`: continues past the end-of-text token, up to `max_tokens`.

    Raises GraphError for a value out of its range.

    >>> import rlgraph as rg
    >>> sampling = rg.Sampling(max_tokens=256, temperature=0.7, top_p=0.95)
    >>> sampling.top_k, sampling.stop_token_ids
    (0, ())
    """

    max_tokens: Count = 1024
    temperature: Annotated[float, Range(least=0, rule="a number of at least 0, and 0 is greedy")] = 1.0
    top_p: Annotated[float, Range(above=0, most=1, rule="a probability above 0 and at most 1, and 1 keeps all tokens")] = 1.0
    top_k: Natural = 0
    stop_token_ids: tuple[Natural, ...] = ()
    ignore_eos: bool = False
    min_p: Annotated[float, Range(least=0, most=1, rule="a share of at least 0 and at most 1, and 0 keeps all tokens")] = 0.0
    stop: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def is_full_distribution(self) -> bool:
        """Whether any token of the vocabulary may be sampled, so that log-probs are those that a trainer computes."""
        return self.top_p == 1 and self.top_k == 0 and self.min_p == 0 and self.temperature > 0

    @property
    def distribution(self) -> str:
        """What the distribution is that tokens are drawn from, for errors."""
        return f"top_p={self.top_p}, top_k={self.top_k}, min_p={self.min_p} and temperature={self.temperature}"

    whole = old_attribute("whole", "is_full_distribution")

    def of_turn(self, most: int, close: int) -> "Sampling":
        """The same for a turn of a conversation: at most `most` tokens, and it also ends with the token `close`.

        The copy is not checked again: a check would last longer than a decode step of some engines.
        """
        turn = copy(self)  # not shared yet
        object.__setattr__(turn, "max_tokens", most)
        object.__setattr__(turn, "stop_token_ids", _stops(self.stop_token_ids, close))
        return turn


@lru_cache(maxsize=64)
def _stops(given: tuple[int, ...], close: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys((*given, close)))


@dataclass(frozen=True)
class BatchAdmission:
    """The rule by which new weights and new prompts join running responses. `depth` is None without a feedback edge.

    `interrupt`: the engine swaps in each published version before its next decode step, even if the edge is not `latest`. The clock
    decides when a version arrives, so a run no longer repeats bit for bit.

    `continuous`: batch k + 1 joins once half of the responses of batch k have ended. It needs version k + 1 - depth, and the rest of
    batch k goes on under that version. Without `interrupt` the engine waits for exactly this version, so a run still depends on its
    seed and depth alone. With `interrupt` up to `depth` batches join ahead, each as soon as the engine holds a version it may use.
    """

    interrupt: Running | None = None
    continuous: bool = False
    depth: int | None = None

    @property
    def interrupt_rule(self) -> Running:
        """What the engine does with the keys and values of running responses when the weights change."""
        return self.interrupt or "recompute"

    def needs(self, step: int) -> int:
        """Compute the oldest version of the weights that may write a token of batch `step`."""
        return 0 if self.depth is None else max(0, step - self.depth)

    def ahead(self) -> int:
        """Compute how many batches may decode beside the one that is due."""
        if not self.continuous:
            return 0
        return self.depth or 1 if self.interrupt else 1
