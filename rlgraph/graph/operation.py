"""The operation of a node, and the traits of operations and models.

Compiler and runtime read these attributes and no others: an attribute that is not declared here has no effect on a plan or a run.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from rlgraph.notices import old_attribute
from rlgraph.signatures import document_arguments
from rlgraph.values.trainer import TrainerSettings

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Node, Pool
    from rlgraph.values.drafts import PromptLookup
    from rlgraph.values.sampling import BatchAdmission, Running, Sampling

Work: TypeAlias = Literal["generate", "train", "forward", "host"]
Preferences: TypeAlias = Literal["pairs", "labels", "mismatched"]


@document_arguments
@dataclass(frozen=True, kw_only=True)
class NodeTraits:
    """The attributes of an operation that compiler and runtime read, besides the columns that its node reads and writes.

        >>> class LengthPenalty(Operation):
        ...     traits = NodeTraits(by_group=True)  # a response's penalty depends on its group alone
        ...     def start(self, context):
        ...         return lambda step, columns: {"rewards": -columns["response_mask"].sum(-1).float()}
        >>> LengthPenalty().traits.work
        'host'

    `work` is the kind of work, from which costs and memory are estimated. Nodes that "generate" deal their rows to the ranks of their
    model; of other nodes every rank gets the whole batch, and rank 0 writes it.

    `by_group` says that the columns it writes for the responses to one prompt depend on these responses alone: it then works on the
    chunks of a rollout as they come.

    `host_pool` is a pool of host cores that it uses from inside, as a rollout does for its tools.

    `dims` bounds dimensions of the columns it writes, such as `{"T": 1024}`: the sizes of messages are predicted from them.

    `sampling` is how it samples responses; None if it samples none. Log-probs of its responses are taken at this temperature.

    `group_size` is the number of responses that it samples for a prompt; None if that is not known.

    `admission` is the rule by which batches and new weights join responses that decode; None if none do.

    `one_turn` says that each response is sampled in one turn, without calls of tools in between.

    `looks_ahead` says that it looks up the prompts of later steps by itself. It cannot be tried on one prompt alone.

    `draws_from` is the source from which it draws prompts by itself, as many as it needs; nothing else may read that source.

    `epochs` is the number of passes of an update over its batch, and `mini_batches` the number of optimizer steps in each pass.

    `scored` is the share of an update's rows that it scores without gradients before it trains on them, as a loss that compares rows needs.

    `preferences` says what the column of that name holds: for "pairs" 1 and -1, for "labels" whether a row is good, and "mismatched" are
    labels with a second row for each, which has another's response. None if it writes no such column, or that is not known.

    `compares` names the estimator that compares the responses to one prompt with each other; empty if none does.

    `given` are the functions and objects that the user gave it, which must be picklable; None means the whole operation.

    `trial` says that the launch may start it and call its stage once on a made-up batch, before anything starts. A node with a model is
    not tried. Set it to False for an operation with side effects, or one that loads a model or needs a network.
    """

    work: Work = "host"
    by_group: bool = False
    host_pool: "Pool | None" = None
    dims: Mapping[str, int] = field(default_factory=dict)
    sampling: "Sampling | None" = None
    group_size: int | None = None
    admission: "BatchAdmission | None" = None
    one_turn: bool = False
    looks_ahead: bool = False
    draws_from: "Operation | None" = None
    epochs: int = 1
    mini_batches: int = 1
    scored: float = 0.0
    preferences: Preferences | None = None
    compares: str = ""
    given: tuple[Any, ...] | None = None
    trial: bool = True

    @property
    def interrupt(self) -> "Running | None":
        """What happens to the keys and values of running responses when new weights are swapped in; None if they are not."""
        return self.admission.interrupt if self.admission is not None else None

    @property
    def continuous(self) -> bool:
        """Whether responses stay in its engine between two steps, so that no other model may share its devices."""
        return self.admission is not None and self.admission.continuous

    @property
    def interrupt_rule(self) -> "Running":
        """What happens to the keys and values of running responses when new weights come."""
        return self.interrupt or "recompute"

    running = old_attribute("running", "interrupt_rule")

    @property
    def ahead(self) -> int:
        """The number of batches that may decode besides the one that is due."""
        return self.admission.ahead() if self.admission is not None else 0


class Operation(ABC):
    """The work of a node, as a picklable value. Derive from it for a node of your own, and declare the node by `rg.extend.declare`.

    >>> class Count(Operation):
    ...     traits = NodeTraits(by_group=True)
    ...
    ...     def start(self, context):
    ...         return lambda step, columns: {"rows": columns["responses"]}
    """

    HOW: ClassVar[str] = "derive from rlgraph.extend.Operation, or make the node of a function by @rg.node"

    @property
    def traits(self) -> NodeTraits:
        """The attributes that compiler and runtime read."""
        return NodeTraits()

    @abstractmethod
    def start(self, context: Any) -> Any:
        """Make the stage: the function that the worker calls with (step, columns) at each firing. Called once in each worker.

        The function returns the columns that the node writes, or a pair of columns and metrics (name -> number). Where the node makes
        the chunks of its batch (it has `chunks` and follows no rollout), the function is called once per step and returns an iterator
        of them. A stage with state is a `Stateful` object.
        """

    def check(self, node: "Node") -> None:  # noqa: B027 (most operations have nothing to check)
        """Check at the launch, before anything starts, that it can run. Raises DataError or GraphError."""

    def trial(self, node: "Node", columns: Any, rows: int) -> Any:
        """Call the user's function on made-up `columns` at the launch, and return those it writes; None where there is nothing to try.

        The node has `rows` rows. Raises RlgraphError as the run would. NotImplemented, the default, starts a copy of the operation and
        calls its stage once.
        """
        return NotImplemented

    def cursor(self, step: int) -> Mapping[str, Any] | None:
        """Give the position of a data source after `step` steps, with the settings of its order, as plain values; None for other nodes.

        A run continues from a checkpoint only if these are the same.
        """
        return None

    @property
    def prompt_characters(self) -> float | None:
        """The mean characters of its prompts, from which their tokens are estimated; None if that is not known."""
        return None


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

    Those of a trained model have its settings whole: see `TrainerSettings`.

        >>> ModelTraits(dtype="bfloat16", micro_batch_tokens=16_384).recompute
        False

    `dtype` is the data type of its computations: "auto" lets the device decide, and None is for a model that does not say.

    `estimates` predict the memory and the host resources that its engine takes; None derives them from the work of its nodes.

    `frees_memory` says that its engine gives its device memory away in sleep although it only scores.

    `micro_batch_tokens` bounds the tokens of a pass; None for a model that computes its batch at once.

    `shared_prompts` says that its passes without padding compute the prompt of several responses once.

    `fused_head` says that training never has the logits of all tokens of a pass in memory; None for a model without a vocabulary.

    `shares_base` says that its trainer can hold the frozen weights beside an `adapter` together with other models.

    `merges_adapters` says that it may follow a model with an `adapter`.

    `samples_exactly` says that its engine samples with log-probs that a trainer with `exact=True` computes to the bit.

    `max_context` bounds prompt and response together, in tokens; None if the model's configuration does.

    `sampling` is how it samples responses unless a rollout says otherwise; None for a model that samples none.

    `memory` is the share of a GPU's memory that it asks for; None if it asks for none.

    `weights_dtype` is the dtype in which its engine keeps the matrices of the layers, "fp8"; None for the one it computes in.

    `drafts` is how its engine guesses tokens ahead; None if it does not.

    `engine_args` are the arguments that the user hands on to its engine; those in `gpu_only` need a GPU, each with the reason.

    `shares_steps` says that responses which joined later share each decode step with those already decoding.

    With `any_vocabulary` ranks that share matrices need not divide the vocabulary, and with `any_heads` those that share rows the heads.

    `prepare` imports what its engine needs into a warm process from which its workers are forked; None if that of other nodes will do.

    `made_of` tells what its engine is made of, by which a later job finds one that was kept; it is None, or gives None, where none can be.
    """

    dtype: str | None = None
    estimates: "EngineEstimates | None" = None
    frees_memory: bool = False
    micro_batch_tokens: int | None = None  # type: ignore[assignment] # of a model without passes
    shared_prompts: bool = False
    shares_base: bool = False
    merges_adapters: bool = False
    samples_exactly: bool = False
    max_context: int | None = None
    sampling: "Sampling | None" = None
    memory: float | None = None
    weights_dtype: str | None = None
    drafts: "PromptLookup | None" = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    gpu_only: Mapping[str, str] = field(default_factory=dict)
    shares_steps: bool = True
    any_vocabulary: bool = False
    any_heads: bool = False
    prepare: Callable[[], None] | None = None
    made_of: Callable[[], str | None] | None = None

    @property
    def kv_itemsize(self) -> int | None:
        """The bytes of a number of its keys and values, where the arguments of its engine say so."""
        return 1 if str(self.engine_args.get("kv_cache_dtype")).startswith("fp8") else None

    @property
    def worker_multiple(self) -> int:
        """The workers of which a model has a multiple: whole groups that compute a pass, and that share experts."""
        return lcm(self.ranks_per_pass, self.pipeline_parallel * self.expert_parallel)

    together = old_attribute("together", "worker_multiple")
