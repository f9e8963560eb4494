"""Nodes as functions of columns. `rlgraph.node` makes a node of a user's function; it runs exactly like the library's nodes."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, TypeAlias

import torch

from rlgraph.columns import COLUMNS, Column, Columns
from rlgraph.errors import GraphError, function_name, show_value
from rlgraph.graph.nodes import Operation, Output, declare
from rlgraph.graph.traits import NodeTraits
from rlgraph.notices import accept_old_names, old_attribute
from rlgraph.settings import refuse_unknown

if TYPE_CHECKING:
    from rlgraph.engines.lora import SharedBase

Metrics: TypeAlias = Mapping[str, float]
Fired: TypeAlias = Columns | tuple[Columns, Metrics]
Stage: TypeAlias = Callable[[int, Columns], Fired]


@dataclass(frozen=True)
class ChunkedStage:
    """The stage of a node that yields the batch of a step in chunks, each as soon as it is ready; it is called once per step."""

    chunks: Callable[[int, Columns], Iterator[Fired]]


class Arrivals(Protocol):
    """Loads new versions of the weights while a node works. After each call `Context.version` is the version that the engine holds."""

    def poll(self) -> None:
        """Load the versions published so far, without waiting."""

    def wait(self, version: int) -> None:
        """Wait for this version and load it, after all earlier versions. Raises ChannelTimeout at the deadline."""


@accept_old_names(meeting="listen_fd", counted="report_progress", shared="shares_devices")
@refuse_unknown
@dataclass
class Context:
    """The worker's side of a node: its engine, its rank, and the version of the weights that the engine holds.

    The time that a node spends within `waiting()` is recorded as its wait for tools or environments. A long node reports its progress
    with `report_progress(done, total, unit)`; progress bars and reports of stalls show it:

    >>> def start(context: Context) -> Stage:  # of an operation
    ...     def fire(step: int, columns: Columns) -> Fired:
    ...         rows = columns["response_mask"]
    ...         for row in range(len(rows)):
    ...             context.report_progress(row + 1, len(rows), "responses")
    ...         return {}, {"responses": float(len(rows))}
    ...
    ...     return fire
    >>> start(Context())(0, {"response_mask": torch.ones(2, 3)})
    ({}, {'responses': 2.0})

    * `engine`: the return value of `load` of the node's model; None for a node without a model.
    * `rank`: the number of this worker among the `world` workers of the model.
    * `threads`: the cores that this worker computes with.
    * `version`: the version of the weights that the engine has.
    * `cache`: values that stages of this worker share, by name.
    * `rendezvous`: the torch.distributed address at which the ranks of one model meet.
    * `listen_fd`: if the ranks are on several hosts, the descriptor of the socket on which rank 0 listens.
    * `device`: the device that the engine computes on.
    * `shares_devices`: whether other models time-share the device.
    * `copies`: the versions of the weights that the engine keeps on the device.
    * `merging_bytes`: the bytes that the engine keeps on the device instead, to merge adapters; None: full weights arrive.
    * `sequences`: the most responses that the engine decodes at once.
    * `exact`: whether a policy that the engine follows computes bit-identical log-probs.
    * `shared_base`: the frozen weights that other models hold as well.
    * `arrivals`: loads new versions for a node that reads a feedback edge.
    * `set_aside`: places of the data order to skip, because their prompts killed a worker.
    """

    engine: Any = None
    rank: int = 0
    world: int = 1
    threads: int = 1
    rendezvous: str = ""
    listen_fd: int = -1
    version: int = 0
    device: str = "cpu"
    shares_devices: bool = False
    copies: int = 1
    merging_bytes: int | None = None
    arrivals: Arrivals | None = None
    set_aside: tuple[int, ...] = ()
    sequences: int = 0
    exact: bool = False
    shared_base: "SharedBase | None" = None
    report_progress: Callable[[int, int, str], None] = lambda done, total, unit: None
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    cache: dict[str, Any] = field(default_factory=dict)

    meeting = old_attribute("meeting", "listen_fd")
    counted = old_attribute("counted", "report_progress")
    shared = old_attribute("shared", "shares_devices")

    def tokenizer(self, path: str) -> Any:
        """Return the tokenizer of a model folder; only the first call loads it."""
        if path not in self.cache:
            from rlgraph.engines.hf.model_files import load_tokenizer

            self.cache[path] = load_tokenizer(path)
        return self.cache[path]


@dataclass(frozen=True)
class FunctionOperation(Operation):
    """Run a plain function of columns. `compares` names the estimator if the function compares the responses to one prompt."""

    function: Callable[[Columns], Fired]
    by_group: bool = False
    whole: str = ""
    compares: str = ""
    tried: bool = False  # at the launch, on a made-up batch

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(by_group=self.by_group, whole=self.whole, compares=self.compares, given=(self.function,), trial=self.tried)

    def start(self, context: Context) -> Stage:
        return lambda step, columns: self.function(ReadColumns(columns))


class ReadColumns(dict[str, Column]):
    """The columns that a node reads; any other column raises an error that explains how to read it."""

    def __missing__(self, name: str) -> Column:
        raise GraphError(f"the function reads column {show_value(name)}, but its node reads {list(self)}: add the column to reads=")


def custom(value: Any) -> bool:
    """Whether a function or an object belongs to the user, not to rlgraph."""
    return not str(getattr(value, "__module__", "")).startswith("rlgraph.")  # some callables of C have no signature


def declares(value: Any, flag: str) -> bool:
    """Whether the class of an estimator or a loss sets a flag itself: a class derived from it may compute something else."""
    return flag in vars(type(value)) and bool(getattr(value, flag))


class FunctionNode:
    """A function that declares a node when it is called with outputs. Made by `rlgraph.node`."""

    def __init__(
        self, function: Callable[[Columns], Fired], reads: tuple[str, ...], writes: tuple[str, ...], by_group: bool, trial: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.reads, self.writes, self.by_group, self.trial = function, reads, writes, by_group, trial

    def __call__(self, *inputs: Output, name: str | None = None) -> Output:
        """Declare a node that runs the function, and return its output."""
        title = name or self.function.__name__
        operation = FunctionOperation(self.function, self.by_group, tried=self.trial)
        return Output(declare(title, operation, inputs, reads=self.reads, writes=self.writes))


def node(
    *, reads: str | Sequence[str], writes: str | Sequence[str], by_group: bool = False, trial: bool = True
) -> Callable[[Callable[[Columns], Fired]], FunctionNode]:
    """Make a node of a function from columns to columns, e.g. with `@rg.node(reads="response_mask", writes="rewards")`.

    >>> @node(reads="response_mask", writes="rewards")
    ... def brevity(batch):
    ...     return {"rewards": -batch["response_mask"].sum(-1).float()}
    >>> brevity.reads, brevity.writes
    (('response_mask',), ('rewards',))

    `reads` and `writes` are column names, as a list or separated by spaces. The function gets the columns it reads and
    returns the columns it writes, or a pair of columns and metrics (name -> number). It runs in a separate process on the host.

    `by_group=True` promises that the result for the responses of one prompt depends only on these responses. The node then works
    on each chunk of a rollout with `chunks` as it arrives. Metrics are averaged over the chunks; `.../max` and `.../min` keep the extremes.

    The launch calls the function once on a made-up batch of two prompts with their groups, before anything starts, and checks its
    result as the run would. Set `trial=False` for a function with side effects, or one that needs a network.

    Raises GraphError for a function without exactly one argument, or a node that writes nothing.
    """
    read, written = _names(reads), _names(writes)

    def wrap(function: Callable[[Columns], Fired]) -> FunctionNode:
        name = function_name(function)
        if not callable(function) or len(inspect.signature(function).parameters) != 1:
            raise GraphError(f"node '{name}' must be a function of one argument, the columns it reads, e.g. def {name}(batch)")
        if not read or not written:
            raise GraphError(
                f"node '{name}' reads {list(read)} and writes {list(written)}; a node reads and writes at least one column each"
            )
        return FunctionNode(function, read, written, by_group, trial)

    return wrap


def _names(names: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def list_columns(inputs: Iterable[Any]) -> list[str]:
    """List the columns that the inputs carry. Skips an input that is not an output: `declare` refuses it with a better error."""
    return [column for output in inputs if isinstance(output, Output) for column in output.columns]


def checked_columns(node: str, writes: Sequence[str], columns: Columns, count: int | None = None) -> None:
    """Raise GraphError unless `columns` are the columns that the node declared, with `count` rows each, or equally many."""
    if not isinstance(columns, Mapping):
        raise GraphError(
            f"node '{node}' returned {show_value(columns)}; it returns its columns by name, e.g. {{'{(*writes, 'name')[0]}': …}}"
        )
    if set(columns) != set(writes):
        raise GraphError(f"node '{node}' returned columns {sorted(columns)}; it declares {list(writes)}: return exactly those")
    for name, column in columns.items():
        _check_kind(node, name, column)
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise GraphError(f"node '{node}' returned columns of different lengths {rows}; every column of a batch has one entry per row")
    if count is not None and any(found != count for found in rows.values()):
        raise GraphError(
            f"node '{node}' returned {min(rows.values())} rows, but the batch has {count}: return one entry for each row of the batch"
        )


def _check_kind(node: str, name: str, column: Any) -> None:
    """Raise GraphError unless a column is a tensor or a list of texts, and has the kind that rlgraph defines for its name."""
    spec, tensor = COLUMNS.get(name), isinstance(column, torch.Tensor)
    if not tensor and not (isinstance(column, list) and all(isinstance(row, str) for row in column)):
        raise GraphError(f"node '{node}' returned {name}={show_value(column)}; a column is a tensor of one row each, or a list of texts")
    if spec is None:
        return
    wanted = "a list of texts" if spec.dtype is str else f"a tensor [{', '.join(spec.dims)}] of {str(spec.dtype).removeprefix('torch.')}"
    alike = tensor and isinstance(spec.dtype, torch.dtype) and _kind(column.dtype) == _kind(spec.dtype) and column.ndim == len(spec.dims)
    if alike if spec.dtype is not str else not tensor:
        return
    found = f"a tensor {list(column.shape)} of {str(column.dtype).removeprefix('torch.')}" if tensor else "a list of texts"
    raise GraphError(f"node '{node}' returned {name} as {found}; this column is {wanted}: {spec.meaning}")


def _kind(dtype: torch.dtype) -> str:
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


def fired_parts(fired: Any) -> tuple[Columns, Metrics]:
    """Split the result of a node into columns and metrics."""
    written, metrics = fired if isinstance(fired, tuple) and len(fired) == 2 else (fired, {})
    return written, metrics


def tensor_of(columns: Columns, name: str) -> torch.Tensor:
    """Return a column that must be a tensor."""
    column = columns[name]
    assert isinstance(column, torch.Tensor), name
    return column


def checked_metrics(node: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Convert metrics to plain numbers. Raises GraphError for a name that is not text, or a value that is not a number."""
    for name, value in metrics.items():
        if not isinstance(name, str) or isinstance(value, torch.Tensor) or not isinstance(value, SupportsFloat):
            raise GraphError(
                f"node '{node}' returned the metric {show_value(name)} as {type(value).__name__}; "
                "a metric is a number under a name: return value.item()"
            )
    return {name: float(value) for name, value in metrics.items()}
