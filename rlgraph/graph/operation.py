"""What a node is made of: an operation, and the traits by which compiler and runtime know it.

Nothing else is read of an operation or of a model: what is not declared here has no effect on a plan or a run.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from rlgraph.costs.estimates import Estimates
    from rlgraph.engines.api import Running, Sampling
    from rlgraph.graph.nodes import Node, Pool
    from rlgraph.nodes.rollout.batch_admission import Joining

Work: TypeAlias = Literal["generate", "train", "forward", "host"]


@dataclass(frozen=True, kw_only=True)
class NodeTraits:
    """What compiler and runtime know of an operation, beside what its node reads and writes.

        >>> NodeTraits(work="forward", by_group=True).epochs
        1

    `work` is the kind of work: costs and memory are estimated from it. Nodes that "generate" deal their rows to the ranks of their model;
    of other nodes every rank gets the whole batch, and rank 0 writes it.

    `by_group` says that what it writes for the responses to one prompt depends on these alone: it then works on the parts of a rollout
    with `chunks` as they come.

    `host_pool` is a pool of host cores that it uses from inside, as a rollout does for its tools.

    `dims` bounds dimensions of the columns it writes, such as `{"T": 1024}`: the sizes of messages are predicted from them.

    `sampling` is how it samples responses; None for what samples none. Log-probs of its responses are taken at this temperature.

    `group_size` is how many responses it samples for a prompt; None where that is not known.

    `joining` is the rule by which batches and new weights join responses that decode; None where none does.

    `one_turn` says that each response is sampled in one go, no tool asked in between.

    `looks_ahead` says that it looks up the prompts of later steps by itself. It cannot be tried on one prompt alone.

    `draws_from` is the source whose prompts it draws by itself, as many as it needs; nothing else may read that source.

    `epochs` is how often an update walks its batch, and `mini_batches` in how many parts each time.

    `compares` names the estimator that compares the responses to one prompt with each other; empty where none does.

    `given` are the functions and objects of the user in it, which must be picklable; None stands for the whole operation.
    """

    work: Work = "host"
    by_group: bool = False
    host_pool: "Pool | None" = None
    dims: Mapping[str, int] = field(default_factory=dict)
    sampling: "Sampling | None" = None
    group_size: int | None = None
    joining: "Joining | None" = None
    one_turn: bool = False
    looks_ahead: bool = False
    draws_from: "Operation | None" = None
    epochs: int = 1
    mini_batches: int = 1
    compares: str = ""
    given: tuple[Any, ...] | None = None

    @property
    def interrupt(self) -> "Running | None":
        """What becomes of the keys and values of running responses at new weights, where these are swapped in while they decode."""
        return self.joining.interrupt if self.joining is not None else None

    @property
    def continuous(self) -> bool:
        """Whether responses stay in its engine between two steps, so that no other model may share its devices."""
        return self.joining is not None and self.joining.continuous

    @property
    def running(self) -> "Running":
        """What becomes of the keys and values of running responses at new weights, whenever these come."""
        return self.interrupt or "recompute"

    @property
    def ahead(self) -> int:
        """How many batches may decode beside the one that is due."""
        return self.joining.ahead() if self.joining is not None else 0


class Operation(ABC):
    """What a node does, as a picklable value. Derive from it for a node of your own, and declare the node by `rg.declare`.

    >>> class Count(Operation):
    ...     traits = NodeTraits(by_group=True)
    ...
    ...     def start(self, context):
    ...         return lambda step, columns: {"rows": columns["responses"]}
    """

    HOW: ClassVar[str] = "derive from rlgraph.Operation, or make the node of a function by @rg.node"

    @property
    def traits(self) -> NodeTraits:
        """What compiler and runtime know of it."""
        return NodeTraits()

    @abstractmethod
    def start(self, context: Any) -> Any:
        """Give the stage: the function that the worker calls with (step, columns) at each firing. Called once in each worker.

        It returns the columns that the node writes, or a pair of columns and metrics (name -> number). Where the node gives its batch
        in parts (`chunks`, and nothing that it follows), the function is called once a step and returns an iterator of them.
        A stage with a state is an object of the kind `Stateful`.
        """

    def check(self, node: "Node") -> None:  # noqa: B027 (most operations have nothing to check)
        """Raise DataError or GraphError at the launch, before anything starts, for what could not run."""

    def cursor(self, step: int) -> Mapping[str, Any] | None:
        """Where a source of data stands after `step` steps and what its order is made from, as plain values; None for what is no source.

        A run goes on from a checkpoint only where these are as they were.
        """
        return None

    @property
    def prompt_characters(self) -> float | None:
        """Mean characters of the prompts it gives, from which their tokens are estimated; None where that is not known."""
        return None


@runtime_checkable
class Stateful(Protocol):
    """A stage that checkpoints keep the state of. Each rank has its own."""

    def __call__(self, step: int, columns: Any, /) -> Any:
        """Do the node's work for a step."""

    def state(self) -> Any:
        """Give what a checkpoint keeps: None, numbers, text, bytes, tensors, and lists, tuples and dicts of these."""

    def load_state(self, state: Any, /) -> None:
        """Go on from a `state`."""


@runtime_checkable
class HasState(Protocol):
    """One half of `Stateful`, by which a stage that forgot the other half is found."""

    def state(self) -> Any:
        """Give what a checkpoint keeps."""


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """What compiler and runtime know of a model, beside its folder, its pool and its ranks.

    `dtype` is what it computes in, as its user asks: "auto" where the device decides, None for a model that does not say.

    `estimates` are what its engine takes of devices and host; None has that estimated by what its nodes do.

    `micro_batch_tokens` bounds the tokens of a pass; None for a model that computes its batch at once.

    `recompute` says that only the input of each layer is kept for the backward pass.

    `max_context` bounds prompt and response together, in tokens; None where the model's configuration does.

    `sampling` is how it samples responses unless a rollout says otherwise; None for a model that samples none.

    `memory` is the share of a GPU's memory that it asks for; None where it asks for none.

    `shares_steps` says that responses which joined later take one decode step together with those under way.
    """

    dtype: str | None = None
    estimates: "Estimates | None" = None
    micro_batch_tokens: int | None = None
    recompute: bool = False
    max_context: int | None = None
    sampling: "Sampling | None" = None
    memory: float | None = None
    shares_steps: bool = True
