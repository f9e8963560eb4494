"""Declare a graph: pools, nodes, the outputs that join them, the feedback edge, and the graph found from its outputs.

Find graphs that keep the rules and still give no learning signal. The compiler warns of them, and makes the plan.
"""

import itertools
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import networkx as nx

from rlgraph import settings
from rlgraph.errors import GraphError, choices
from rlgraph.graph import rules
from rlgraph.graph.operation import ModelTraits, NodeTraits, Operation
from rlgraph.notices import accept_old_names, old_attribute
from rlgraph.settings import Count, Name, Natural, Range, check_arguments

# The nodes of a graph, found from its outputs, and those that it leaves out.


def reachable(outputs: "Iterable[Output]") -> "tuple[Node, ...]":
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


def unreached_nodes(graph: "Graph") -> "tuple[Node, ...]":
    """Find the nodes that were declared with outputs or edges of a graph, and that none of its outputs depends on."""
    inside = set(graph.nodes)
    found: dict[Node, None] = {}
    open_nodes = [reader for node in graph.nodes for reader in node.readers]
    open_nodes += [reader for edge in (*graph.feedbacks, *graph.earlier) for reader in edge.readers]
    while open_nodes:
        node = open_nodes.pop()
        if node not in inside and node not in found:
            found[node] = None
            open_nodes += node.readers
    return tuple(sorted(found, key=lambda node: node.serial))


def unreached_warnings(graph: "Graph") -> tuple[str, ...]:
    """Name the nodes that a graph leaves out."""
    names = [node.name for node in unreached_nodes(graph)]
    return (f"no output of the graph depends on {names}, which never run: give rg.Graph their outputs, or leave them out",) if names else ()


def upstream_rollout(operation: "Operation", inputs: "Iterable[Output]", model: "Model | None") -> "Node | None":
    """Find the rollout whose chunks a new node works on."""
    sources = [output.node for output in inputs]
    streams = {source.stream for source in sources if source.stream is not None}
    if len(streams) != 1 or not operation.traits.by_group:
        return None
    stream = streams.pop()
    late = any(source.stream is None and source.needs(stream) for source in sources)
    return None if late or (model is not None and model.pool is stream.pool) else stream


Exact: TypeAlias = Annotated[int, Range(least=1, rule="an exact count, a whole number of at least 1")]
BUCKET_BYTES = 512 << 20  # of weights: with few buckets, receiving them takes little of the interpreter's time from decoding


@settings.refuse_unknown
@dataclass(frozen=True)
class Pool:
    """Devices that nodes time-share. Nodes of one pool never run at the same time; nodes of two pools overlap.

        >>> rollout, train = Pool("rollout", share=1), Pool("train", share=3)  # a quarter and three quarters of the GPUs
        >>> sandbox = Pool("sandbox", cpus=8)
        >>> sandbox.cpus
        8

    Raises GraphError for a share or a count that is not positive, an empty name, or two of `share`, `gpus` and `cpus`.

    * `name`: its name in plans, pictures and errors.
    * `share`: its share of the cluster's GPUs relative to the other pools; None lets the compiler choose. Without GPUs, shares
      divide the cores.
    * `gpus`: an exact number of GPUs, instead of `share`.
    * `cpus`: an exact number of host cores, for a pool without GPUs.
    """

    name: Name
    share: Annotated[float, Range(above=0, rule="a positive number, or None to let the compiler choose")] | None = 1
    gpus: Exact | None = None
    cpus: Exact | None = None

    def __post_init__(self) -> None:
        settings.check(self)
        rules.check_pool(self.name, self.share, self.gpus, self.cpus)


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

    __eq__, __hash__ = object.__eq__, object.__hash__  # a model is itself, whatever settings it has

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
        """Copy the model, to compute in `dtype`, which the plan chose where its traits have one."""
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


_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Node:
    """One stage of a graph: what it does, what it reads from which outputs, what it writes, and where it lives.

    It writes `rows` rows in a step. `pool` is None for a host node, which runs in a process of its own. It fires `chunks` times in a
    step, once for each chunk of the batch, in the order of the data: chunks that it makes itself, or those of the rollout that it
    `follows`. A node that is not `due` at a step passes an empty batch on. `earlier` is an edge of columns of an earlier step.
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
        """Whether it depends on another node within a step."""
        return any(output.node is other or output.node.needs(other) for output in self.inputs)

    def source_of(self, column: str) -> "Node":
        """Return the node whose output carries `column` to this one."""
        return self.carrier(column).node

    def carrier(self, column: str) -> "Output":
        """Return the input that carries `column`, which this node may know by another name than its writer."""
        return next(output for output in self.inputs if column in output.columns)

    def repeats(self, output: "Output") -> int:
        """Count how often a row of an input stands in the batch that this node takes: once in the widest input of the same prefix."""
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
    """A back edge of a graph, which carries weights or columns from a node to one of a later step. `rlgraph.feedback` makes it."""

    HOW: ClassVar[str] = "pass what rlgraph.feedback(...) returned"

    def __init__(self, name: str, depth: int, buffers: int, latest: bool, bucket_bytes: int, checksum: bool, columns: str = "") -> None:
        rules.check_feedback(name, depth, buffers, latest)
        self.name, self.depth, self.buffers, self.latest = name, depth, buffers, latest
        self.bucket_bytes, self.checksum = bucket_bytes, checksum
        self.columns = tuple(columns.split())
        rules.check_edge_of_columns(self, (buffers, latest, bucket_bytes, checksum) == (1, False, BUCKET_BYTES, False))
        self.source: Output | None = None
        self.readers: list[Node] = []

    def close(self, source: Output) -> None:
        """Connect the back edge to the update whose weights it carries, as `weights.close(step.weights)`, or to its columns' output."""
        kind = "batch" if self.columns else "weights"
        rules.check_close(self, source if isinstance(source, Output) and source.kind == kind else None, source)
        self.source = source
        source.node.closes.append(self)


@accept_old_names(freshest="latest")
@check_arguments(what="feedback")
def feedback(
    name: Name,
    *,
    depth: Annotated[Natural, Range(least=0, rule=rules.DEPTH_RULE)],
    buffers: Annotated[int, Range(least=1, most=2, rule=rules.BUFFERS_RULE)] = 1,
    latest: bool = False,
    bucket_bytes: Annotated[int, Range(least=1, rule="a whole number of bytes, at least 1: 1 << 29 is usual")] = BUCKET_BYTES,
    checksum: bool = False,
    columns: str = "",
) -> Feedback:
    """Make the feedback edge of a graph; a trained batch may lag `depth` weight versions behind the policy (0 is on-policy).

        >>> weights = feedback("weights", depth=1, buffers=2)
        >>> weights.depth  # pass it to generator.rollout(...), and close it with weights.close(step.weights)
        1

    Each step of the graph produces one version. Rollout k uses exactly version max(0, k - depth), so a run depends only on its seed and
    depth.

    * `latest`: uses the newest published version instead. The bound holds, but the run is not repeatable.
    * `buffers`: with 2 the generator receives the next version while it decodes; with 1 it receives between two steps.
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
            raise GraphError(f"node '{name}' was given {rules.describe(given)}; pass outputs of other nodes")
    rules.check_inputs(name, outputs, reads)
    if rows is None:
        if not outputs:
            raise GraphError(f"node '{name}' has neither inputs nor rows; set rows= to the number of rows per step, or pass inputs")
        rows = max(output.node.rows for output in outputs)
    rules.check_edges(name, reads, feedback, earlier)
    follows = None if chunks > 1 or earlier is not None else upstream_rollout(operation, outputs, model)
    chunks = follows.chunks if follows else chunks
    node = Node(name, operation, outputs, reads, writes, rows, model, feedback, chunks, follows, due, earlier)
    rules.check_rows(node)
    rules.check_chunks(node)
    for read in (*dict.fromkeys(output.node for output in outputs), *(edge for edge in (feedback, earlier) if edge is not None)):
        read.readers.append(node)
    return node


class Graph:
    """All nodes that its outputs depend on, through feedback edges too. It is checked when it is made, and never changes.

        >>> import rlgraph as rg
        >>> prompts = rg.prompts([{"prompt": "1 + 1 ="}], count=1)
        >>> rollout = rg.Generator("tiny", pool=Pool("gpu")).rollout(prompts)
        >>> [node.name for node in Graph("sampling", rollout).nodes]
        ['prompts', 'rollout']

    Raises GraphError with the place, what was found, the rule and the fix.
    """

    HOW: ClassVar[str] = "pass a graph, as rg.Graph('name', step.metrics)"

    @check_arguments(what="graph")
    def __init__(self, name: Name, *outputs: Output) -> None:
        self.name = name
        if not outputs:
            raise GraphError(f"graph '{name}' has no outputs; pass the outputs it should have, as Graph('{name}', step.metrics)")
        for output in outputs:
            if not isinstance(output, Output):
                given = rules.describe(output)
                raise GraphError(f"graph '{name}' was given {given} as an output; pass what a node returned, as step.metrics")
        self.outputs = outputs
        self.nodes = reachable(outputs)
        self.feedbacks = tuple(dict.fromkeys(n.feedback for n in self.nodes if n.feedback is not None))
        self.earlier = tuple(dict.fromkeys(n.earlier for n in self.nodes if n.earlier is not None))
        for rule in rules.GRAPH_RULES:
            rule(self)

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
        """Whether a node evaluates on a separate generator, and not on one that time-shares with rollouts."""
        if node.due is None or node.feedback is None:
            return False
        return all(other.due is not None for other in self.nodes if other.model is node.model and other.feedback is node.feedback)

    evaluates_apart = old_attribute("evaluates_apart", "is_separate_evaluation")

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """The pools in order of first use, host pools of tools included."""
        extra = (n.traits.host_pool for n in self.nodes)
        return tuple(dict.fromkeys(p for p in (*(n.pool for n in self.nodes), *extra) if p is not None))

    def node(self, name: str) -> Node:
        """Return the node called `name`. Raises GraphError with the names there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise GraphError(f"graph '{self.name}' has no node '{name}'; {choices(name, [n.name for n in self.nodes])}")


# A graph with other models in the places of its own, as with the folders of those that are named by a hub id.


def with_models(graph: Graph, models: Mapping[Model, Model]) -> Graph:
    """Copy a graph with other models in the places of some of its own, in its operations too; the graph itself stays as it is.

    >>> import rlgraph as rg
    >>> generator = rg.Generator("tiny", pool=Pool("gpu"))
    >>> graph = Graph("sampling", generator.rollout(rg.prompts([{"prompt": "1 + 1 ="}], count=1)))
    >>> other = with_models(graph, {generator: replace(generator, path="other")}).node("rollout")
    >>> other.model.path, other.operation.generator is other.model, graph.node("rollout").model.path
    ('other', True, 'tiny')
    """
    if not models:
        return graph
    nodes = (*graph.nodes, *unreached_nodes(graph))
    edges = {edge: None for node in nodes for edge in (node.feedback, node.earlier, *node.closes) if edge is not None}
    parts = (*nodes, *edges)  # they name each other in circles: all copies are there before their fields are
    copies: dict[int, Any] = {id(model): other for model, other in models.items()} | {id(part): copy(part) for part in parts}
    for part in parts:
        vars(copies[id(part)]).update({name: _with_copies(value, copies) for name, value in vars(part).items()})
    return Graph(graph.name, *(_with_copies(output, copies) for output in graph.outputs))


def _with_copies(value: Any, copies: dict[int, Any]) -> Any:
    """Put copies in the places of what they are of, in tuples, lists, mappings, operations and the like; what names none stays itself."""
    if id(value) in copies:
        return copies[id(value)]
    found = value
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        items = [_with_copies(item, copies) for item in value] if any(isinstance(item, COPIED) for item in value) else value
        found = type(value)(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
    elif isinstance(value, dict) and any(isinstance(item, COPIED) for item in value.values()):
        found = {name: _with_copies(item, copies) for name, item in value.items()}
    elif isinstance(value, Operation | Model | Output) or (is_dataclass(value) and not isinstance(value, type)):
        copies[id(value)] = value  # while its fields are looked through: one that names it again ends here
        fields = {name: _with_copies(item, copies) for name, item in (vars(value) if hasattr(value, "__dict__") else {}).items()}
        if any(item is not vars(value)[name] for name, item in fields.items()):
            found = copy(value)
            vars(found).update(fields)
    if found is not value:
        copies[id(value)] = found
    return found


COPIED = (Operation, Model, Node, Output, Feedback)  # what a container must hold to be copied; rows of data are not looked through


# Find graphs that keep the rules and still give no learning signal. The compiler warns of them, and makes the plan.


def no_signal_warnings(graph: Graph) -> tuple[str, ...]:
    """Warn of advantages that compare responses which cannot differ: groups of one, or greedy responses.

    A group of one has its reward, or 0, as its advantage; all responses of a greedy rollout to one prompt are the same.
    """
    found = []
    for node in graph.nodes:
        name, rollout = node.traits.compares, _rollout(node)
        if not name or rollout is None:
            continue
        sampling = rollout.traits.sampling
        if rollout.traits.group_size == 1:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples one per prompt "
                "(group_size=1), which leaves no baseline; sample several, or use an estimator without groups"
            )
        elif sampling is not None and sampling.temperature == 0:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples at temperature=0, so that "
                "all responses of a group are the same and every advantage is 0; use a temperature above 0"
            )
    return tuple(found)


def _rollout(node: Node) -> Node | None:
    """The rollout whose groups a node compares, if there is one."""
    return node.source_of("group_ids") if "group_ids" in node.reads else None
