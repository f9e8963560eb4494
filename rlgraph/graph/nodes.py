"""Declare the nodes of a graph: models, operations, the outputs that join them, and the feedback edge.

Each declaration is checked here when it is made; `rules` checks whole graphs.
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import networkx as nx

from rlgraph import settings
from rlgraph.columns import COLUMNS
from rlgraph.errors import GraphError, choices, show_value
from rlgraph.graph.traits import ImageSizes, ModelTraits, NodeTraits
from rlgraph.notices import accept_old_names, old_attribute
from rlgraph.settings import Count, Name, Natural, Range, check_arguments
from rlgraph.values.pool import Pool

SAMPLED = "rollout_log_probs"  # computed by the engine, under its own sampling
MAX_SLOTS = 64  # of a channel
MAX_DEPTH = MAX_SLOTS - 2  # prompts are up to two batches further ahead
DEPTH_RULE = "how many weight versions a trained batch may be behind, a whole number of at least 0 (0 is on-policy, 1 is one-step-off)"
BUFFERS_RULE = "1, the generator's one copy of the weights, or 2, so that it receives while it decodes"
BUCKET_BYTES = 512 << 20  # of weights: with few buckets, receiving leaves the interpreter free for decoding


@settings.refuse_unknown
@dataclass(frozen=True, eq=False, kw_only=True)
class Model:
    """A model on a pool. Its methods declare nodes, all of which run in the model's workers.

        >>> class TableModel(Model):
        ...     def load(self, context):
        ...         return {"hello": 1.0}  # the engine, built in each worker
        >>> TableModel("folder", pool=Pool("host", cpus=1)).pool.name
        'host'

    Derive from it for a custom engine; `rg.Generator`, `rg.Policy` and the others do.

    * `path`: a folder in Hugging Face format, or a hub id.
    * `pool`: the devices that it runs on.
    """

    role: ClassVar[str] = "model"
    path: Name = field(kw_only=False)
    pool: Pool

    __eq__, __hash__ = object.__eq__, object.__hash__  # two models with equal settings are still two models

    def __post_init__(self) -> None:
        settings.check(self)

    @property
    def group(self) -> int:
        """The devices that one worker of this model needs."""
        return 1

    @property
    def engines(self) -> int:
        """The workers of this model that share one group of devices."""
        return 1

    @property
    def ranks(self) -> int | None:
        """The number of workers that the user asked for; None means as many as the pool's devices allow."""
        return None

    @property
    def traits(self) -> ModelTraits:
        """The attributes that compiler and runtime read, besides its folder, its pool and its ranks."""
        return ModelTraits()

    def with_dtype(self, dtype: str) -> "Model":
        """Copy the model with `dtype`, which the plan chose, in its traits if they have one."""
        return replace(self, dtype=dtype)  # type: ignore[call-arg] # a model whose traits have a dtype has this field

    def load(self, context: Any) -> Any:
        """Make the engine. Called once in each of the model's workers."""
        raise NotImplementedError


@dataclass(frozen=True)
class Due:
    """The steps of an evaluation: the last of each `every` steps, the last of `steps`, and with `at_start` also the first.

    >>> [step for step in range(7) if Due(every=3, steps=7)(step)]
    [2, 5, 6]
    """

    every: Count
    steps: Count | None = None
    at_start: bool = False

    def __post_init__(self) -> None:
        settings.check(self)

    def __call__(self, step: int) -> bool:
        """Whether the evaluation happens at this step."""
        return (step + 1) % self.every == 0 or step + 1 == self.steps or self.begins(step)

    def begins(self, step: int) -> bool:
        """Whether the evaluation happens at this step on the initial weights."""
        return self.at_start and step == 0


class Operation(ABC):
    """The work of a node, as a picklable value. Derive from it for a custom node, and declare the node with `rg.extend.declare`.

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

        The function returns the columns that the node writes, or a pair of columns and metrics (name -> number). If the node makes
        the chunks of its batch (it has `chunks` and follows no rollout), the function is called once per step and returns an iterator
        of them. A stage with state is a `Stateful` object.
        """

    def check(self, node: "Node") -> None:  # noqa: B027 (most operations have nothing to check)
        """Check at the launch, before anything starts, that it can run. Raises DataError or GraphError."""

    def trial(self, node: "Node", columns: Any, rows: int) -> Any:
        """Call the user's function on made-up `columns` at the launch, and return the columns it writes; None if there is nothing to try.

        The node has `rows` rows. Raises RlgraphError as the run would. NotImplemented, the default, starts a copy of the operation and
        calls its stage once.
        """
        return NotImplemented

    def cursor(self, step: int) -> Mapping[str, Any] | None:
        """Return the position of a data source after `step` steps, with the settings of its order, as plain values; None for other nodes.

        A run resumes from a checkpoint only if they are equal.
        """
        return None

    @property
    def prompt_characters(self) -> float | None:
        """The mean characters of its prompts, from which their tokens are estimated; None if unknown."""
        return None

    @property
    def image_sizes(self) -> ImageSizes:
        """The sizes of the images of its first prompts, from which the work with images is estimated; empty if it has none."""
        return ()


_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Node:
    """One stage of a graph: what it does, what it reads from which outputs, what it writes, and where it lives.

    It writes `rows` rows per step. `pool` is None for a host node, which runs in a separate process. It fires `chunks` times per step, once
    for each chunk of the batch, in the order of the data: chunks that it makes itself, or the chunks of the rollout that it `follows`. A
    node that is not `due` at a step passes an empty batch on. `earlier` is an edge of columns of an earlier step.
    """

    name: str
    operation: Operation
    inputs: tuple["Output", ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    rows: int
    model: Model | None = None
    feedback: "Feedback | None" = None
    chunks: int = 1
    follows: "Node | None" = None
    due: Due | None = None
    earlier: "Feedback | None" = None
    serial: int = field(default_factory=lambda: next(_serial))
    readers: list["Node"] = field(default_factory=list, repr=False)  # nodes that were declared with its outputs
    closes: list["Feedback"] = field(default_factory=list, repr=False)  # edges that were closed with them

    @property
    def pool(self) -> Pool | None:
        return self.model.pool if self.model else None

    @property
    def traits(self) -> NodeTraits:
        """The traits of its operation, which compiler and runtime read."""
        return self.operation.traits

    @property
    def stream(self) -> "Node | None":
        """The rollout whose chunks it makes or works on."""
        return self if self.chunks > 1 and self.follows is None else self.follows

    @cached_property
    def batch(self) -> "Output":
        """Its columns, for the nodes that read them."""
        return Output(self)

    @cached_property
    def weights(self) -> "Output":
        """The new version of the weights that it trains, for `feedback.close`."""
        return Output(self, "weights")

    @cached_property
    def metrics(self) -> "Output":
        """Its metrics, for the graph."""
        return Output(self, "metrics")

    def needs(self, other: "Node") -> bool:
        """Whether it depends on another node in the same step."""
        return any(output.node is other or output.node.needs(other) for output in self.inputs)

    def source_of(self, column: str) -> "Node":
        """Return the node whose output carries `column` to this one."""
        return self.carrier(column).node

    def carrier(self, column: str) -> "Output":
        """Return the input that carries `column`, which this node may know by another name than its writer."""
        return next(output for output in self.inputs if column in output.columns)

    def repeats(self, output: "Output") -> int:
        """Count how often the node's batch repeats each row of an input: once for the widest input of the same prefix."""
        return max(other.node.rows for other in self.inputs if other.prefix == output.prefix) // output.node.rows


@dataclass(frozen=True, eq=False, repr=False)
class Output:
    """An output of a node: a batch of columns, a new version of weights, or the metrics of a step.

    >>> import rlgraph as rg
    >>> prompts = rg.prompts([{"prompt": "1 + 1 =", "answer": "2"}], count=1)
    >>> prompts, prompts.columns
    (the batch of 'prompts', ('prompt_texts', 'prompt_ids', 'answers'))
    """

    HOW: ClassVar[str] = "pass the output of another node"
    node: Node
    kind: Literal["batch", "weights", "metrics"] = "batch"
    prefix: str = ""

    def __repr__(self) -> str:
        return f"the {self.kind} of '{self.node.name}'"

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.prefix + column for column in self.node.writes) if self.kind == "batch" else ()

    def with_prefix(self, prefix: str) -> "Output":
        """Return the same batch under prefixed names: a node that reads it keeps its rows separate from rows without the prefix.

        >>> import rlgraph as rg
        >>> rg.prompts([{"prompt": "1 + 1 ="}], count=1).with_prefix("more.").columns
        ('more.prompt_texts', 'more.prompt_ids')
        """
        return replace(self, prefix=prefix + self.prefix)

    apart = old_attribute("apart", "with_prefix")


class Feedback:
    """A back edge of a graph, which carries weights or columns from a node to a node of a later step. `rlgraph.feedback` makes it."""

    HOW: ClassVar[str] = "pass what rlgraph.feedback(...) returned"

    def __init__(self, name: str, depth: int, buffers: int, latest: bool, bucket_bytes: int, checksum: bool, columns: str = "") -> None:
        check_feedback(name, depth, buffers, latest)
        self.name, self.depth, self.buffers, self.latest = name, depth, buffers, latest
        self.bucket_bytes, self.checksum = bucket_bytes, checksum
        self.columns = tuple(columns.split())
        check_edge_of_columns(self, (buffers, latest, bucket_bytes, checksum) == (1, False, BUCKET_BYTES, False))
        self.source: Output | None = None
        self.readers: list[Node] = []

    def close(self, source: Output) -> None:
        """Connect the back edge to the update whose weights it carries, as in `weights.close(step.weights)`, or to its columns' output."""
        kind = "batch" if self.columns else "weights"
        check_close(self, source if isinstance(source, Output) and source.kind == kind else None, source)
        self.source = source
        source.node.closes.append(self)


@accept_old_names(freshest="latest")
@check_arguments(what="feedback")
def feedback(
    name: Name,
    *,
    depth: Annotated[Natural, Range(least=0, rule=DEPTH_RULE)],
    buffers: Annotated[int, Range(least=1, most=2, rule=BUFFERS_RULE)] = 1,
    latest: bool = False,
    bucket_bytes: Annotated[int, Range(least=1, rule="a whole number of bytes, at least 1: 1 << 29 is usual")] = BUCKET_BYTES,
    checksum: bool = False,
    columns: str = "",
) -> Feedback:
    """Declare the feedback edge on which the policy's weights return to the generator.

        >>> weights = feedback("weights", depth=1, buffers=2)
        >>> weights.depth  # pass it to generator.rollout(...), and close it with weights.close(step.weights)
        1

    Each step of the graph produces one version. Rollout k uses exactly version max(0, k - depth), so a run depends only on its seed and
    depth.

    * `name`: the edge's name in plans and errors.
    * `depth`: how many weight versions a training batch may lag behind the policy. 0 is on-policy.
    * `buffers`: with 2 the generator receives the next version while it decodes; with 1 it receives between two steps.
    * `latest`: uses the newest published version instead. The bound holds, but the run is not repeatable.
    * `bucket_bytes`: the second buffer begins to fill as soon as the trainer has staged this many bytes of the parameters.
    * `checksum`: the generator compares every version with the trainer's, parameter by parameter, before it uses it.
    * `columns`: names separated by spaces. The edge carries these columns of a batch instead of weights. The firing of step k receives
      the columns of step k - depth - 1, or nothing if there is no such step. `rg.prompts(results=…)` accepts such an edge for rewards,
      and custom nodes accept it with `declare(earlier=…)`.

        >>> feedback("results", depth=1, columns="rewards").columns  # close it with the output that carries them
        ('rewards',)

    Raises GraphError for a negative depth, for `buffers` other than 1 and 2, and for `bucket_bytes` below 1.
    """
    return Feedback(name, depth, buffers, latest, bucket_bytes, checksum, columns)


# What a declaration must be.


def describe(value: Any) -> str:
    """Describe a wrong argument in a message: an output by its node, anything else with its type."""
    text = show_value(value)
    return text if text.startswith(("a ", "an ", "the ")) else f"{type(value).__name__} {text}"


def check_feedback(name: str, depth: int, buffers: int, latest: bool) -> None:
    """Refuse a depth that exceeds the slots of a channel, and settings without effect at depth 0."""
    where = f"feedback '{name}'"
    if depth > MAX_DEPTH:
        raise GraphError(f"{where} has depth={depth}; at most {MAX_DEPTH} are possible, since a channel holds 64 batches")
    if depth == 0 and buffers == 2:
        raise GraphError(f"{where} has buffers=2 at depth=0, where nothing is decoded while weights arrive; use buffers=1 or depth>=1")
    if depth == 0 and latest:
        raise GraphError(f"{where} has latest=True at depth=0, where only one version exists; leave it out, or use depth>=1")


def check_edge_of_columns(feedback: Feedback, plain: bool) -> None:
    """Refuse settings of weights on an edge of columns; `plain` is True if it has none."""
    if feedback.columns and not plain:
        raise GraphError(
            f"feedback '{feedback.name}' carries columns {list(feedback.columns)}: buffers, latest, bucket_bytes and checksum are about "
            "weights and have no effect; leave them out"
        )


def check_edges(name: str, reads: Sequence[str], feedback: Feedback | None, earlier: Feedback | None) -> None:
    """Refuse an edge of columns in place of weights and the reverse, and columns that the node also reads from its own step."""
    if feedback is not None and feedback.columns:
        raise GraphError(
            f"node '{name}' loads weights from feedback '{feedback.name}', which carries columns; pass a feedback without columns="
        )
    if earlier is None:
        return
    if not earlier.columns:
        raise GraphError(f"node '{name}' has earlier='{earlier.name}', which carries weights; pass rg.feedback(…, columns='rewards')")
    twice = sorted(set(reads) & set(earlier.columns))
    if twice:
        raise GraphError(
            f"node '{name}' reads {twice} from the current step and from an earlier one; names of columns must differ: rename one of them"
        )


def check_close(feedback: Feedback, source: Output | None, given: Any) -> None:
    """Check the argument of `feedback.close`. `source` is the same value, or None if it is not an output of weights or columns."""
    where = f"feedback '{feedback.name}'"
    if feedback.source is not None:
        raise GraphError(f"{where} is closed twice; an edge has one source: make a second feedback for a second update")
    if feedback.columns:
        missing = [column for column in feedback.columns if source is None or column not in source.columns]
        if missing:
            raise GraphError(f"{where} was closed with {describe(given)}; close it with the output of a node that carries {missing}")
        return
    if source is None:
        raise GraphError(f"{where} was closed with {describe(given)}; close it with the weights of an update, e.g. close(step.weights)")
    if source.node.model is not None and source.node.model.role == "critic":
        raise GraphError(
            f"{where} was closed with the weights of '{source.node.name}', a critic; close it with the weights of the policy's update"
        )


def check_inputs(name: str, inputs: Sequence[Output], reads: Sequence[str]) -> None:
    """Refuse a column that no input or more than one carries, and an input of which nothing is read."""
    where = f"node '{name}'"
    carried = Counter(column for output in set(inputs) for column in output.columns)
    names = [output.node.name for output in inputs]
    for column in reads:
        if carried[column] == 0:
            raise GraphError(f"{where} reads column '{column}', which none of its inputs {names} carries; {_fix(column, inputs)}")
        if carried[column] > 1:
            both = [output.node.name for output in inputs if column in output.columns]
            raise GraphError(f"{where} reads column '{column}', which {both} both carry; pass one of them, or join them in your own node")
    for output in inputs:
        if not set(output.columns) & set(reads):
            raise GraphError(
                f"{where} reads nothing of its input '{output.node.name}', which carries {list(output.columns)}; "
                f"it reads {list(reads)}: leave that input out"
            )
    check_whole_distribution(name, inputs, reads)


def check_whole_distribution(name: str, inputs: Sequence[Output], reads: Sequence[str]) -> None:
    """Refuse a reader of log-probs over a part of the vocabulary: a trainer's log-probs are always over all of it."""
    for output in inputs:
        sampling = output.node.traits.sampling
        if sampling is None or sampling.is_full_distribution or output.prefix + SAMPLED not in {*output.columns} & {*reads}:
            continue
        raise GraphError(
            f"node '{name}' reads '{SAMPLED}' of '{output.node.name}', which samples with {sampling.distribution}: the engine samples from "
            "some tokens, the trainer's log-probs cover the whole vocabulary; use top_p=1, top_k=0, min_p=0 and a temperature above 0, or "
            "pass policy.log_probs(rollout) to an update"
        )


def _fix(column: str, inputs: Sequence[Output]) -> str:
    upstream = [output.node for output in inputs]
    while upstream:
        node = upstream.pop(0)
        if column in node.writes:
            return f"pass the output of '{node.name}' to it"
        upstream += [output.node for output in node.inputs]
    if column in COLUMNS:
        return f"pass the output of '{COLUMNS[column].written_by}' to it"
    there = dict.fromkeys(name for output in inputs for name in output.columns)
    return f"{choices(column, there)}; or pass the output of a node that writes it"


def check_rows(node: Node) -> None:
    """Refuse inputs whose rows cannot be repeated to match the widest input, and a node whose number of rows does not fit its inputs."""
    alone = len({output.prefix for output in node.inputs}) == 1
    for output in node.inputs:
        widest = max(other.node.rows for other in node.inputs if other.prefix == output.prefix)
        chosen = alone and widest > node.rows > 0 and widest % node.rows == 0  # a node that keeps some rows of each group
        rows = node.rows if alone and not chosen else widest
        if output.node.rows <= 0 or rows % output.node.rows:
            raise GraphError(
                f"node '{node.name}' joins {rows} rows per step with the {output.node.rows} of '{output.node.name}'; "
                "one must be a multiple of the other"
            )


def check_chunks(node: Node) -> None:
    """Refuse a number of chunks that does not divide the rows of each input."""
    for output in node.inputs:
        if node.chunks > 1 and output.node.rows % node.chunks:
            raise GraphError(
                f"node '{node.name}' has chunks={node.chunks}, which does not divide the {output.node.rows} rows per step of "
                f"'{output.node.name}'; chunks are of equal size and hold whole groups: choose a divisor, or another count of prompts"
            )


def upstream_rollout(operation: Operation, inputs: Iterable[Output], model: Model | None) -> Node | None:
    """Find the rollout whose chunks a new node works on."""
    sources = [output.node for output in inputs]
    streams = {source.stream for source in sources if source.stream is not None}
    if len(streams) != 1 or not operation.traits.by_group:
        return None
    stream = streams.pop()
    late = any(source.stream is None and source.needs(stream) for source in sources)
    return None if late or (model is not None and model.pool is stream.pool) else stream


@check_arguments()
def declare(
    name: Name,
    operation: Operation,
    inputs: Iterable[Any],
    *,
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    rows: int | None = None,
    model: Model | None = None,
    feedback: Feedback | None = None,
    chunks: Count = 1,
    due: Due | None = None,
    earlier: Feedback | None = None,
) -> Node:
    """Declare a custom node: `operation` reads columns of the inputs and writes others, on the host or on the pool of `model`.

        >>> class Brevity(Operation):
        ...     def start(self, context):
        ...         return lambda step, columns: {"rewards": -columns["response_mask"].sum(-1).float()}
        >>> rollout = Node("rollout", Brevity(), (), (), ("response_mask",), rows=8)
        >>> declare("brevity", Brevity(), [rollout.batch], reads=("response_mask",), writes=("rewards",)).batch
        the batch of 'brevity'

    Its outputs are `node.batch`, `node.weights` and `node.metrics`. Inputs with fewer rows are repeated to match the largest: a prompt's
    columns for each of its responses.

    * `rows`: the rows that it writes per step; required for a node without inputs.
    * `feedback`: the edge whose weights its model loads.
    * `earlier`: an edge of columns; the node receives the columns of an earlier step.
    * `chunks`: above 1, the node returns its batch in that many chunks. A node that works by group follows an input that arrives in chunks,
      unless it also needs the whole batch, or waits for the rollout's own pool.

    Raises GraphError for a column that no input carries, or that two carry, for an unused input, and for an
    operation that is not an `rlgraph.extend.Operation`.
    """
    outputs = tuple(inputs)
    for given in outputs:
        if not isinstance(given, Output) or given.kind != "batch":
            raise GraphError(f"node '{name}' was given {describe(given)}; pass outputs of other nodes")
    check_inputs(name, outputs, reads)
    if rows is None:
        if not outputs:
            raise GraphError(f"node '{name}' has neither inputs nor rows; set rows= to the number of rows per step, or pass inputs")
        rows = max(output.node.rows for output in outputs)
    check_edges(name, reads, feedback, earlier)
    follows = None if chunks > 1 or earlier is not None else upstream_rollout(operation, outputs, model)
    chunks = follows.chunks if follows else chunks
    node = Node(name, operation, outputs, reads, writes, rows, model, feedback, chunks, follows, due, earlier)
    check_rows(node)
    check_chunks(node)
    for read in (*dict.fromkeys(output.node for output in outputs), *(edge for edge in (feedback, earlier) if edge is not None)):
        read.readers.append(node)
    return node


def reachable(outputs: Iterable[Output]) -> tuple[Node, ...]:
    """Find every node that the outputs depend on, producers first, otherwise in order of declaration."""
    found: set[Node] = set()
    open_nodes = [output.node for output in outputs]
    while open_nodes:
        node = open_nodes.pop()
        if node in found:
            continue
        found.add(node)
        open_nodes += [output.node for output in node.inputs]
        open_nodes += [edge.source.node for edge in (node.feedback, node.earlier) if edge is not None and edge.source is not None]
    return tuple(sorted(found, key=lambda node: node.serial))


class UncheckedGraph:
    """All nodes that outputs depend on, also through feedback edges, and how they are joined. A `Graph` also keeps the rules."""

    def __init__(self, name: str, *outputs: Output) -> None:
        self.name = name
        self.outputs = outputs
        self.nodes = reachable(outputs)
        self.feedbacks = tuple(dict.fromkeys(n.feedback for n in self.nodes if n.feedback is not None))
        self.earlier = tuple(dict.fromkeys(n.earlier for n in self.nodes if n.earlier is not None))

    @cached_property
    def forward(self) -> "nx.DiGraph[Node]":
        """The forward part as a networkx graph; each edge holds the columns it carries."""
        graph: nx.DiGraph[Node] = nx.DiGraph()
        graph.add_nodes_from(self.nodes)
        for node in self.nodes:
            for column in node.reads:
                output = node.carrier(column)
                columns = graph.edges[output.node, node]["columns"] if graph.has_edge(output.node, node) else ()
                graph.add_edge(output.node, node, columns=tuple(dict.fromkeys((*columns, column.removeprefix(output.prefix)))))
        return graph

    def is_separate_evaluation(self, node: Node) -> bool:
        """Whether a node evaluates on a separate generator, not on a generator that time-shares with rollouts."""
        if node.due is None or node.feedback is None:
            return False
        return all(other.due is not None for other in self.nodes if other.model is node.model and other.feedback is node.feedback)

    evaluates_apart = old_attribute("evaluates_apart", "is_separate_evaluation")

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The pools in order of first use, host pools of tools included."""
        extra = (n.traits.host_pool for n in self.nodes)
        return tuple(dict.fromkeys(p for p in (*(n.pool for n in self.nodes), *extra) if p is not None))

    @cached_property
    def models(self) -> tuple[Model, ...]:
        """The models in order of first use."""
        return tuple(dict.fromkeys(n.model for n in self.nodes if n.model is not None))

    @cached_property
    def rows(self) -> int:
        """The most rows that a node has in a step."""
        return max(n.rows for n in self.nodes)

    def node(self, name: str) -> Node:
        """Return the node called `name`. Raises GraphError with the known names."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(f"graph '{self.name}' has no node '{name}'; {choices(name, [n.name for n in self.nodes])}")
