"""The interfaces of engines, one that generates and one that trains, and the values that pass through them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from rlgraph.algorithms.masks import Totals
from rlgraph.channels.weights.shards import WeightShard
from rlgraph.columns import Columns
from rlgraph.engines.lora import SharedBase
from rlgraph.errors import DataError
from rlgraph.notices import accept_old_methods, old_attribute
from rlgraph.values.sampling import Running, Sampling

Finish: TypeAlias = Literal["stop", "length", "turns", "abort"]  # as in `columns.FINISH_REASONS`


@dataclass(frozen=True)
class Images:
    """The images of a prompt: a JSON list of data URLs, and for each the places `(begin, end)` of its tokens in the prompt."""

    urls: str
    places: Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Request:
    """A request for one response. The caller chooses `id`; no two requests that an engine holds share one.

    The response depends on weights, prompt, sampling and seed, not on the other requests in the engine. As a rule the prompt of a request
    begins with the prompt and the response of the one before it in its `conversation`: an engine may keep what it has read of that, until
    the caller says that the conversation has ended. Only an engine with images gets `images`.
    """

    id: str
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    conversation: str = ""
    images: Images | None = None


@dataclass(frozen=True)
class Response:
    """A sampled response: its token ids, and for each token its log-prob under the sampling distribution and the version of the
    weights that sampled it.

    `finish` is why it ended: "stop" at a stop token or string, "length" at its limit of tokens or of the context, "abort" if dropped.
    `routes` [prompt + response, layers, k], int16, are the experts that an engine with routes chose for each token when it read it first;
    -1 where they are not known, as for the last token, which it never reads.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[int] = field(default_factory=list, compare=False)
    finish: Finish = "stop"
    routes: torch.Tensor | None = field(default=None, compare=False)


class GenerateEngine(ABC):
    """A model that generates responses, one decode step at a time, and loads new weights between two steps.

    Your own engine defines the abstract methods; `step`, `abort`, `load_weights` and `generate` are built on them.
    """

    unfinished = old_attribute("unfinished", "count_requests")
    written = old_attribute("written", "count_tokens")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        accept_old_methods(cls, unfinished="count_requests", written="count_tokens")

    def __init__(self) -> None:
        self.version = 0
        self._ends: dict[str, list[tuple[int, int]]] = {}  # by request: (its tokens so far, version) at each change of weights
        self._finished: dict[str, Response] = {}  # not returned by `step` yet

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Queue a request. It joins a later decode step, in the order submitted, once the engine has room.

        Raises DataError for a prompt that cannot be continued, or an id that the engine holds already.
        """

    @abstractmethod
    def decode(self) -> dict[str, Response]:
        """Run one decode step and return the responses that it finished, without versions. Each says why it ended (`finish`)."""

    @abstractmethod
    def count_requests(self) -> int:
        """Count the requests that the engine holds."""

    @abstractmethod
    def count_tokens(self) -> dict[str, int]:
        """Count the tokens that each unfinished request has so far; 0 while it waits."""

    @abstractmethod
    def drop(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests and return their responses so far, without versions. Unknown ids are ignored."""

    @abstractmethod
    def replace_weights(self, weights: Mapping[str, torch.Tensor], running: Running) -> None:
        """Copy new weights into the model; see `load_weights`."""

    @abstractmethod
    def context_length(self) -> int:
        """The number of tokens that prompt and response may have together."""

    @abstractmethod
    def close(self) -> None:
        """Free the model."""

    def sleep(self) -> int | None:
        """Free device memory for another model of the pool, until `wake`; nothing runs meanwhile.

        Returns the bytes that each device moved to host memory, or None if unknown.
        """
        return None  # an engine that holds no device memory of note has nothing to do

    def wake(self) -> None:  # noqa: B027
        """Take the device memory back, so that the engine can load weights and decode when this returns."""

    def forget(self) -> None:
        """End all requests and begin again at version 0, so that the engine can wait for another job; see `EngineSpec.renews`."""
        self.drop([*self.count_tokens()])
        self._ends.clear()
        self._finished.clear()
        self.version = 0

    def renew(self) -> None:
        """Load the weights of the folder as they are now, and be as a new engine is. Only one whose `EngineSpec` `renews` is asked."""
        raise NotImplementedError

    def end_conversations(self, conversations: Iterable[str]) -> None:  # noqa: B027
        """Forget what the engine keeps of these conversations between their requests, if it does. Unknown ones are ignored."""

    def decode_metrics(self) -> dict[str, float]:
        """Metrics of the decode steps since this was last asked."""
        return {}

    def step(self, prefix: str = "") -> dict[str, Response]:
        """Run one decode step, if any request is unfinished, and return the finished responses by request id.

        Nodes that share the engine pass the `prefix` of their own ids. A node also gets its responses that finished in another node's step.
        """
        if self.count_requests():
            self._finished |= self._tag_versions(self.decode())
        mine = {name: response for name, response in self._finished.items() if name.startswith(prefix)}
        for name in mine:
            del self._finished[name]
        return mine

    def abort(self, ids: Sequence[str]) -> dict[str, Response]:
        """End these requests and return their responses so far. Unknown and finished ids are ignored."""
        return {name: replace(response, finish="abort") for name, response in self._tag_versions(self.drop(ids)).items()}

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, version: int | None = None, running: Running = "recompute") -> None:
        """Load new weights: full tensors by their Hugging Face names. They sample every later token.

        These tokens carry `version` (None: the next number). Running requests go on. "recompute" has the new weights read all tokens of
        a request so far. "keep" goes on with the keys and values of the old weights; it is faster, and its log-probs are those of no
        single version. A request without a token yet sees only the new weights.

        Raises DataError unless `weights` are exactly the model's parameters, each of its full shape.
        """
        self.replace_weights(weights, running)
        for request_id, count in self.count_tokens().items():
            if count:
                self._ends.setdefault(request_id, []).append((count, self.version))
        self.version = self.version + 1 if version is None else version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int], images: Sequence[Images | None] = ()
    ) -> list[Response]:
        """Sample one response for each prompt, in order, with its `images` if there are some. Requests submitted before go on meanwhile.

        Raises DataError for a prompt that leaves no room for a response, or unless there is one seed for each prompt.
        """
        if len(prompts) != len(seeds):
            raise DataError(f"generate: {len(prompts)} prompts but {len(seeds)} seeds; each prompt has one seed")
        prefix = "generate "
        ids = [f"{prefix}{row}" for row in range(len(prompts))]
        try:
            shown: Sequence[Images | None] = images or [None] * len(ids)
            for name, prompt, seed, own in zip(ids, prompts, seeds, shown, strict=True):
                self.submit(Request(name, prompt, sampling, seed, images=own))
        except DataError:
            self.abort(ids)
            raise
        done: dict[str, Response] = {}
        while len(done) < len(ids):
            done |= self.step(prefix)
        return [done[request_id] for request_id in ids]

    def _tag_versions(self, responses: Mapping[str, Response]) -> dict[str, Response]:
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
        """The names of the columns that the loss reads besides the log-probs."""

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss is called with the entropy of each distribution."""

    def __call__(
        self, log_probs: torch.Tensor, batch: Columns, totals: Totals, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss and of the metrics."""


class ValueLossFn(Protocol):
    """A loss of the critic over the rows of a micro-batch: like a policy's, but of values `[b, T]`."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the columns that the loss reads besides the values."""

    @property
    def needs_entropy(self) -> bool:
        """False: values have none."""

    def __call__(self, values: torch.Tensor, batch: Columns, totals: Totals) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute this micro-batch's share of the loss and of the metrics."""


Loss: TypeAlias = PolicyLossFn | ValueLossFn


def chosen_at(loss: Any) -> str | None:
    """Name the column `[B, T, K]` with the tokens whose log-probs a loss reads beside those of the responses; None for most losses.

    The trainer hands them to the loss as the column `chosen_log_probs` `[b, T, K]`, with gradients.
    """
    at: str | None = getattr(loss, "chosen_at", None)  # a loss of a user's need not have it
    return at


Guard: TypeAlias = Callable[[Mapping[str, float]], bool]  # from the metrics of an optimizer step: whether to take it


class TrainEngine(Protocol):
    """One rank of a model that is trained. Every rank is called with the same batches in the same order."""

    def scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Compute the scores of the response tokens under the current weights, `[B, T]` float32, 0 on padding.

        A policy's scores are log-probs at the sampling `temperature`, a critic's are values.
        """

    def base_scores(self, batch: Columns, *, temperature: float = 1.0) -> torch.Tensor:
        """Compute a policy's `scores` without its adapter. Only a model with `adapter=` is asked for them."""

    def scores_and_squares(self, batch: Columns, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a policy's scores, and for each token the sum of the squared probabilities of the vocabulary, both `[B, T]`."""

    def top_scores(self, batch: Columns, top_k: int | None, *, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute a policy's scores, and of the `top_k` most probable tokens at each position ids (int32) and log-probs `[B, T, K]`.

        None is for all tokens of the vocabulary, in its order. Only a `rg.Teacher` calls it.
        """

    def update(self, batch: Columns, loss: Loss, *, temperature: float = 1.0, guard: Guard | None = None) -> dict[str, float]:
        """Take one optimizer step over the batch and return its metrics, the same on every rank.

        `guard` gets the metrics, including the gradient norm, before the step. If it returns False or raises, weights and moments stay
        as they are. It must return the same on every rank.
        """

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield the shards of Hugging Face parameters that this rank holds, live and without a copy.

        Ranks may yield different names. Together the shards hold every element of every parameter once; equal shards of several ranks
        are numbered by `WeightShard.replica`, and only replica 0 is sent.
        """

    def save(self, folder: Path, deadline_s: float) -> Callable[[], list[Path]]:
        """Copy the training state, and return a function that writes the copy into `folder`.

        Every rank calls both, the function in its own thread while training goes on. The function makes the folder and returns the files
        that this rank wrote. It raises CheckpointError if the disk fails or another rank does not answer within `deadline_s`.
        """

    def load(self, folder: Path) -> None:
        """Load a state that `save` wrote, with any number of ranks. Raises CheckpointError for the state of another model."""

    def sleep(self) -> int | None:
        """Free device memory for another model of the pool, until `wake`; nothing runs meanwhile.

        Returns the bytes moved to host memory, or None if unknown.
        """

    def wake(self) -> None:
        """Take the device memory back, so that the engine can compute when this returns."""

    def close(self) -> None:
        """Free the model."""


class StreamedTrainEngine(TrainEngine, Protocol):
    """A `TrainEngine` whose updates get a batch in chunks. Its `TrainerSpec` has `streams=True`."""

    def add_gradients(self, batch: Columns, loss: Loss, totals: Totals, *, temperature: float = 1.0) -> dict[str, float]:
        """Add the gradients of a part of a batch for the next optimizer step, and return the part's metrics.

        With totals of 1 token and 1 row, losses, gradients and metrics are sums. `scores` may be called between two parts.
        """

    def apply_gradients(
        self, metrics: Mapping[str, float], *, learns: bool, guard: Guard | None = None, divisor: int = 1
    ) -> dict[str, float]:
        """Divide the gradients that were added, take the optimizer step as `update` does, and return the metrics with those of the step.

        If the batch has no token that `learns`, weights and moments stay as they are.
        """


def check_request(request: Request, held: Container[str], context: int, vocab: int) -> None:
    """Raise DataError unless the id is new, and the prompt is token ids of the vocabulary and leaves room for a response."""
    where = f"request '{request.id}'"
    if request.id in held:
        raise DataError(f"{where}: the engine already holds a request with this id; use a different id for each request")
    if not 1 <= len(request.prompt) < context:
        raise DataError(
            f"{where}: the prompt has {len(request.prompt)} tokens; a prompt has at least 1 and leaves room for a response in the "
            f"context of {context} tokens: shorten it, or use a longer context"
        )
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
        raise DataError(f"{where}: the prompt has a token id outside of 0..{vocab - 1}: it was encoded with the tokenizer of another model")


def check_weights(weights: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError unless the weights are exactly the model's parameters, each of its full shape."""
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unknown:
        raise DataError(
            f"load_weights: missing {missing[:3]}, unknown {unknown[:3]}; every parameter must arrive once, under its Hugging Face name"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise DataError(f"load_weights: '{name}' has shape {tuple(weights[name].shape)}, the model's is {shape}; send full tensors")


class Place(Protocol):
    """The place of an engine: its rank among the workers of its model, its device and cores, the number of weight versions on
    that device, what merging adapters takes of it instead, whether a trainer computes its log-probs to the bit, and the frozen
    weights that it holds together with other models, if there are such."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def rendezvous(self) -> str: ...

    @property
    def listen_fd(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def shares_devices(self) -> bool: ...

    @property
    def copies(self) -> int: ...

    @property
    def merging_bytes(self) -> int | None: ...

    @property
    def sequences(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    @property
    def shared_base(self) -> SharedBase | None: ...

    @property
    def report_progress(self) -> Callable[[int, int, str], None]: ...
