"""The traits of operations and models.

Compiler and runtime read these attributes and no others: an attribute that is not declared here does not affect a plan or a run.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from rlgraph.notices import old_attribute
from rlgraph.signatures import document_arguments
from rlgraph.values.drafts import PromptLookup
from rlgraph.values.pool import Pool
from rlgraph.values.sampling import BatchAdmission, Running, Sampling
from rlgraph.values.trainer import TrainerSettings

Work: TypeAlias = Literal["generate", "train", "forward", "host"]
ImageSizes: TypeAlias = tuple[tuple[tuple[int, int], ...], ...]  # width and height of each image of some prompts
Preferences: TypeAlias = Literal["pairs", "labels", "mismatched"]


@document_arguments
@dataclass(frozen=True, kw_only=True)
class NodeTraits:
    """The attributes of an operation that compiler and runtime read, besides the columns that its node reads and writes.

        >>> from rlgraph.extend import Operation
        >>> class LengthPenalty(Operation):
        ...     traits = NodeTraits(by_group=True)  # a response's penalty depends only on its group
        ...     def start(self, context):
        ...         return lambda step, columns: {"rewards": -columns["response_mask"].sum(-1).float()}
        >>> LengthPenalty().traits.work
        'host'

    * `work`: the kind of work, from which costs and memory are estimated. Nodes that "generate" split their rows between the ranks of
      their model. For other nodes every rank receives the whole batch, and rank 0 writes it.
    * `by_group`: the columns for the responses to one prompt depend only on these responses. The node then works on the
      chunks of a rollout as they arrive.
    * `whole`: why it only works on whole batches, for errors, e.g. "calls a function of yours".
    * `host_pool`: a pool of host cores that it uses by itself, e.g. a rollout for its tools.
    * `dims`: bounds of dimensions of the columns that it writes, e.g. `{"T": 1024}`; they predict the sizes of messages.
    * `sampling`: its sampling; None if it samples nothing. Log-probs of its responses use this temperature.
    * `group_size`: the responses that it samples per prompt; None if unknown.
    * `admission`: the rule by which batches and new weights join running responses; None if nothing joins.
    * `one_turn`: each response is sampled in one turn, without calls of tools in between.
    * `reorders`: its rows are not in the order of its inputs, whose columns it carries itself.
    * `looks_ahead`: it reads the prompts of later steps by itself, so it cannot be tried on a single prompt.
    * `draws_from`: the source from which it draws prompts by itself, as needed; nothing else may read that source.
    * `epochs`: how many times an update iterates over its batch.
    * `mini_batches`: the optimizer steps per epoch.
    * `scored`: the share of an update's rows that it scores without gradients before it trains on them, for a loss that compares rows.
    * `preferences`: the content of the column of that name: "pairs" are 1 and -1, "labels" mark good rows, and "mismatched" are
      labels with a second row for each, which has another row's response. None: no such column, or unknown.
    * `compares`: the name of the estimator that compares the responses to one prompt; empty if none does.
    * `given`: the functions and objects that the user passed, which must be picklable; None means the whole operation.
    * `trial`: the launch may start the operation and call its stage once on a made-up batch, before anything starts. A node with a model is
      not tried. Set it to False for an operation with side effects, or one that loads a model or needs a network.
    """

    work: Work = "host"
    by_group: bool = False
    whole: str = ""
    host_pool: Pool | None = None
    dims: Mapping[str, int] = field(default_factory=dict)
    sampling: Sampling | None = None
    group_size: int | None = None
    admission: BatchAdmission | None = None
    one_turn: bool = False
    reorders: bool = False
    looks_ahead: bool = False
    draws_from: object = None
    epochs: int = 1
    mini_batches: int = 1
    scored: float = 0.0
    preferences: Preferences | None = None
    compares: str = ""
    given: tuple[Any, ...] | None = None
    trial: bool = True

    @property
    def interrupt(self) -> Running | None:
        """What happens to the keys and values of running responses when new weights are swapped in; None if they never are."""
        return self.admission.interrupt if self.admission is not None else None

    @property
    def continuous(self) -> bool:
        """Whether responses stay in its engine between two steps, so that no other model may share its devices."""
        return self.admission is not None and self.admission.continuous

    @property
    def interrupt_rule(self) -> Running:
        """What happens to the keys and values of running responses when new weights arrive."""
        return self.interrupt or "recompute"

    running = old_attribute("running", "interrupt_rule")

    @property
    def ahead(self) -> int:
        """The number of batches that may decode besides the one that is due."""
        return self.admission.ahead() if self.admission is not None else 0


@runtime_checkable
class Stateful(Protocol):
    """A stage whose state is part of checkpoints. Each rank has its own."""

    def __call__(self, step: int, columns: Any, /) -> Any:
        """Do the node's work for a step."""

    def state(self) -> Any:
        """Collect the state for a checkpoint: None, numbers, text, bytes, tensors, and lists, tuples and dicts of these."""

    def load_state(self, state: Any, /) -> None:
        """Restore a `state`."""


@runtime_checkable
class HasState(Protocol):
    """One half of `Stateful`; a stage that has only this half is refused."""

    def state(self) -> Any:
        """Collect the state for a checkpoint."""


class EngineEstimates(Protocol):
    """The memory and the decode time of an engine, as its model names them; `rlgraph.plan.estimates.Estimates` has the defaults."""

    @property
    def sleep_bytes(self) -> Callable[[int, int], int]: ...
    @property
    def loading_bytes(self) -> Callable[[int, int], int]: ...
    @property
    def reads_shards(self) -> bool: ...
    @property
    def in_each_group(self) -> bool: ...
    @property
    def gathers_shards(self) -> bool: ...
    @property
    def host_heads(self) -> tuple[int, ...]: ...
    @property
    def memory_estimate(self) -> Callable[[Any], Any]: ...
    @property
    def shares(self) -> tuple[float, float] | None: ...
    @property
    def decode_law(self) -> Callable[[Any, Any, float], Any]: ...


@document_arguments
@dataclass(frozen=True, kw_only=True)
class ModelTraits(TrainerSettings):
    """The attributes of a model that compiler and runtime read, besides its folder, its pool and its ranks.

    For a trained model they include all of its settings: see `TrainerSettings`.

        >>> ModelTraits(dtype="bfloat16", micro_batch_tokens=16_384).recompute
        False

    * `dtype`: the data type of its computations; "auto" lets the device decide. None: unspecified.
    * `estimates`: predicts the memory and the host resources of its engine; None derives them from the work of its nodes.
    * `frees_memory`: its engine frees device memory in sleep although it only scores.
    * `micro_batch_tokens`: the most tokens per micro-batch; None for a model that computes its batch at once.
    * `shared_prompts`: packed micro-batches compute the prompt of several responses once.
    * `fused_head`: training never holds the logits of a whole micro-batch in memory; None for a model without a vocabulary.
    * `shares_base`: its trainer can share the frozen weights of an `adapter` with other models.
    * `merges_adapters`: it may follow a model with an `adapter`.
    * `samples_exactly`: its engine's log-probs are bit-identical to a trainer with `exact=True`.
    * `max_context`: the most tokens of prompt and response together; None: the limit in the model's configuration.
    * `sampling`: the sampling of its rollouts, unless a rollout sets another; None for a model that samples nothing.
    * `memory`: the share of a GPU's memory that it reserves; None: it reserves nothing.
    * `weights_dtype`: the dtype of the layers' matrices in its engine, "fp8"; None: the dtype that it computes in.
    * `drafts`: the method by which its engine guesses tokens ahead; None: no guesses.
    * `images`: the most images of a prompt that its engine reads; None: it reads none.
    * `engine_args`: the user's arguments for its engine.
    * `gpu_only`: the arguments that need a GPU, each with the reason.
    * `shares_steps`: responses that join later share each decode step with the responses already decoding.
    * `any_vocabulary`: the number of ranks that share matrices need not divide the vocabulary.
    * `any_heads`: the number of ranks that share rows need not divide the heads.
    * `tower`: counts the part of the model that reads images, and its work for prompts with images of some sizes, as a `Tower` of
      `rlgraph.plan.model_shapes`. None: it reads none.
    * `prepare`: imports the packages of its engine into a warm process from which its workers are forked. None: other nodes' imports
      suffice.
    * `made_of`: returns a description of its engine by which a later job finds a cached engine. It is None, or returns None, if the engine
      cannot be cached.
    """

    dtype: str | None = None
    estimates: EngineEstimates | None = None
    frees_memory: bool = False
    micro_batch_tokens: int | None = None  # type: ignore[assignment] # of a model without micro-batches
    shared_prompts: bool = False
    shares_base: bool = False
    merges_adapters: bool = False
    samples_exactly: bool = False
    max_context: int | None = None
    sampling: Sampling | None = None
    memory: float | None = None
    weights_dtype: str | None = None
    drafts: PromptLookup | None = None
    images: int | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    gpu_only: Mapping[str, str] = field(default_factory=dict)
    shares_steps: bool = True
    any_vocabulary: bool = False
    any_heads: bool = False
    tower: Callable[[ImageSizes], Any] | None = None
    prepare: Callable[[], None] | None = None
    made_of: Callable[[], str | None] | None = None

    @property
    def kv_itemsize(self) -> int | None:
        """The bytes per element of its keys and values, if the arguments of its engine set them."""
        return 1 if str(self.engine_args.get("kv_cache_dtype")).startswith("fp8") else None

    @property
    def worker_multiple(self) -> int:
        """The number that divides a model's workers into whole groups, which compute a micro-batch or share experts."""
        return lcm(self.ranks_per_pass, self.pipeline_parallel * self.expert_parallel)

    together = old_attribute("together", "worker_multiple")
