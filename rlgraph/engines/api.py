"""What an engine is: what generators and trainers can do, and the values that pass through them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol, TypeAlias

import torch

from rlgraph import settings
from rlgraph.algorithms.aggregation import Totals
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.errors import DataError
from rlgraph.kinds import Range
from rlgraph.settings import Count, Natural

Finish: TypeAlias = Literal["stop", "length", "turns", "abort"]  # as in `columns.FINISH_REASONS`
Running: TypeAlias = Literal["keep", "recompute"]  # what becomes of the keys and values of running requests at new weights


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled: at most `max_tokens` of them, at `temperature` (0 is greedy), from the `top_k` most
    likely tokens (0: all) that make up a probability of `top_p`. A response ends with its end-of-text token or one of
    `stop_token_ids`, both of which it keeps; `ignore_eos` lets it run on past the end-of-text token.

    Raises GraphError for a value out of its range.
    """

    max_tokens: Count = 1024
    temperature: Annotated[float, Range(least=0, rule="a number of at least 0, and 0 is greedy")] = 1.0
    top_p: Annotated[float, Range(above=0, most=1, rule="a probability above 0 and at most 1, and 1 keeps all tokens")] = 1.0
    top_k: Natural = 0
    stop_token_ids: tuple[Natural, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        settings.check(self)


@dataclass(frozen=True)
class Request:
    """One response to be sampled. `id` is the caller's own, and no other request that the engine holds has it.

    The response depends on weights, prompt, sampling and seed, and not on what else the engine decodes.
    """

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True)
class Response:
    """One sampled response: its token ids, and for each its log-prob under the distribution it was drawn from, and the version of
    the weights that drew it.

    `finish` says why it ended: "stop" with a stop token, "length" at its limit of tokens or of the context, "abort" when it was dropped.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[int] = field(default_factory=list, compare=False)
    finish: Finish = "stop"


class GenerateEngine(ABC):
    """A model that writes responses, one decode step at a time, and takes new weights between two steps.

    An engine of your own defines the abstract methods; `step`, `abort`, `load_weights` and `generate` are built on them.
    """

    def __init__(self) -> None:
        self.version = 0
        self._ends: dict[str, list[tuple[int, int]]] = {}  # by request: (tokens it had, version) at each change of weights
        self._finished: dict[str, Response] = {}  # and not handed out yet

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Take a request; it joins the others at a coming step, in the order submitted, once the engine has room.

        Raises DataError for a prompt that cannot be continued, or an id that the engine holds already.
        """

    @abstractmethod
    def decode(self) -> dict[str, Response]:
        """Advance by one decode step, and give what it finished, without versions. Each response says why it ended (`finish`)."""

    @abstractmethod
    def unfinished(self) -> int:
        """How many requests the engine holds."""

    @abstractmethod
    def written(self) -> dict[str, int]:
        """How many tokens each unfinished request has so far; 0 while it waits."""

    @abstractmethod
    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests, and return what they have so far, without versions. Unknown ones are left out."""

    @abstractmethod
    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        """Take new weights; see `load_weights`."""

    @abstractmethod
    def context_length(self) -> int:
        """How many tokens prompt and response may have together."""

    @abstractmethod
    def close(self) -> None:
        """Free the model."""

    def sleep(self) -> int | None:
        """Give device memory back until `wake`, where another model of the pool needs it; nothing runs meanwhile.

        Returns how many bytes of each device went to host memory, and None where that is not known.
        """
        return None  # an engine that holds no device memory of note has nothing to do

    def wake(self) -> None:  # noqa: B027
        """Be ready to load weights and to decode again, once this returns."""

    def step(self, prefix: str = "") -> dict[str, Response]:
        """Advance by one decode step, if there is one to do, and give what has finished, by request id.

        Of several nodes that share the engine each gives the prefix of its own ids, and gets what finished in steps of the others.
        """
        if self.unfinished():
            self._finished |= self._tagged(self.decode())
        mine = {name: response for name, response in self._finished.items() if name.startswith(prefix)}
        for name in mine:
            del self._finished[name]
        return mine

    def abort(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests, and return what they have so far. Those that are unknown or finished are left out."""
        return {name: replace(response, finish="abort") for name, response in self._tagged(self.drop(ids)).items()}

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None, running: Running = "recompute") -> None:
        """Take new weights: full tensors under their Hugging Face names. Every later token comes from them.

        Such tokens are of `version` (None: the next). Running requests go on: with "recompute" as if the new weights had read all
        that they have so far, with "keep" on the keys and values that the old weights left, which is faster and gives log-probs
        that no single version would give. Requests without a token yet know the new weights alone.

        Raises DataError unless they are all of the model's parameters, each of its full shape.
        """
        self.replace_weights(weights, running)
        for request_id, count in self.written().items():
            if count:
                self._ends.setdefault(request_id, []).append((count, self.version))
        self.version = self.version + 1 if version is None else version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Response]:
        """Sample one response for each prompt, in the order given. Requests submitted before go on beside them.

        Raises DataError for a prompt that cannot be continued, or where there is not one seed for each.
        """
        if len(prompts) != len(seeds):
            raise DataError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds; each prompt has one seed")
        prefix = "generate "
        ids = [f"{prefix}{row}" for row in range(len(prompts))]
        try:
            for request in map(Request, ids, prompts, [sampling] * len(ids), seeds):
                self.submit(request)
        except DataError:
            self.abort(ids)
            raise
        done: dict[str, Response] = {}
        while len(done) < len(ids):
            done |= self.step(prefix)
        return [done[request_id] for request_id in ids]

    def _tagged(self, responses: Mapping[str, Response]) -> dict[str, Response]:
        """Attach to each response the weight version that sampled each of its tokens."""
        return {name: replace(r, versions=self._versions(name, len(r.tokens))) for name, r in responses.items()}

    def _versions(self, request_id: str, count: int) -> list[int]:
        versions: list[int] = []
        for end, version in [*self._ends.pop(request_id, []), (count, self.version)]:
            versions += [version] * (end - len(versions))
        return versions


class PolicyLossFn(Protocol):
    """A loss of the policy over the rows of a micro-batch.

    Called with log-probs `[b, T]`, the rows of the batch, the totals of the whole mini-batch over all ranks, and the
    entropy `[b, T]` where `needs_entropy`. The results of all micro-batches of all ranks add up to the loss and to the
    metrics of the mini-batch.
    """

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the log-probs."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss is to be called with the entropy of each distribution."""

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's part of the loss and of the metrics."""


class ValueLossFn(Protocol):
    """A loss of the critic over the rows of a micro-batch: as a policy's, but of values `[b, T]`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that the loss needs besides the values."""

    @property
    def needs_entropy(self) -> bool:
        """False: values have none."""

    def __call__(self, values: torch.Tensor, batch: Columns, totals: Totals) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's part of the loss and of the metrics."""


Loss: TypeAlias = PolicyLossFn | ValueLossFn


Guard: TypeAlias = Callable[[Mapping[str, float]], bool]  # of the metrics of an optimizer step: whether it may be taken


class TrainEngine(Protocol):
    """A model that is trained: one rank of it. All ranks are called with the same batch and in the same order."""

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Give each response token its score under the current weights, `[B, T]` float32, 0 on padding: a policy's are log-probs at
        the `temperature` of the sampling, a critic's values."""

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Give a policy's scores and, alike, the sum of the squared probabilities of the vocabulary at each token."""

    def update(self, batch: Columns, loss: Loss, *, temperature: float = 1.0, guard: Guard | None = None) -> dict[str, float]:
        """Take one optimizer step over the batch and return its metrics, the same on every rank.

        `guard` sees the metrics, with the norm of the gradients among them, before the step; where it says False, or raises, weights
        and moments stay as they are. It answers alike on every rank.
        """

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield the boxes of Hugging Face parameters that this rank holds, live and without a copy.

        Each rank yields names of its own. The boxes of all ranks hold every element of every parameter once; what several ranks hold
        alike is numbered by `WeightShard.replica`, and number 0 is sent.
        """

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        """Copy all that is needed to go on from here, and give the function that writes the copy into `folder`.

        Every rank calls both, the function on a thread of its own while training goes on; it makes the folder, returns the files that
        this rank wrote, and raises CheckpointError where the disk refuses or another rank does not answer within `deadline_s`.
        """

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, whatever the number of ranks that wrote it. Raises CheckpointError for another model's."""

    def sleep(self) -> int | None:
        """Give device memory back until `wake`, where another model of the pool needs it; nothing runs meanwhile.

        Returns how many bytes of the device went to host memory, and None where that is not known.
        """

    def wake(self) -> None:
        """Be ready to compute again, once this returns."""

    def close(self) -> None:
        """Free the model."""


def check_request(request: Request, held: Container[str], context: int, vocab: int) -> None:
    """Raise DataError unless the id is new, and the prompt is token ids of the vocabulary and leaves room for a response."""
    where = f"request '{request.id}'"
    if request.id in held:
        raise DataError(f"{where}: the engine holds a request of that id; give each its own")
    if not 1 <= len(request.prompt) < context:
        raise DataError(
            f"{where}: the prompt has {len(request.prompt)} tokens; a prompt has at least 1 and leaves room for a response in the "
            f"context of {context} tokens: shorten it, or give a longer context"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
        raise DataError(f"{where}: the prompt has a token id outside of 0..{vocab - 1}: it was encoded with the tokenizer of another model")


def check_weights(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError unless the weights are exactly the model's parameters, each of its full shape."""
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unknown:
        raise DataError(
            f"load_weights: missing {missing[:3]}, unknown {unknown[:3]}; every parameter comes once, under its Hugging Face name"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise DataError(f"load_weights: '{name}' has shape {tuple(weights[name].shape)}, the model's is {shape}; send full tensors")
