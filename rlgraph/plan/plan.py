"""The plan: what a graph becomes on a cluster. Frozen values that print, compare and serialise."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from rlgraph import settings
from rlgraph.channels.api import TRANSPORTS
from rlgraph.errors import PlanError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import BUCKET_BYTES, Due, Model
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.cost_functions import Passes
from rlgraph.plan.model_shapes import Shapes, adapter_size
from rlgraph.plan.schedule import Reason, Schedule
from rlgraph.settings import Count, Fraction, Natural, Seconds, check_arguments
from rlgraph.values.lora import ALL_LINEAR

if TYPE_CHECKING:
    import rlgraph  # the public names, so that an editor knows what a job offers

# The keys of a plan in JSON: keys of older versions, and unknown keys.

RENAMED: Mapping[tuple[str, ...], Mapping[str, str]] = {  # by place in a plan: the old name of the key and the new one
    ("schedule", "dependencies"): {"tokens": "credits"},
    ("schedule", "events"): {"part": "chunk"},
    ("channels",): {"tokens": "credits", "parts": "chunks"},
    ("nodes", "passes"): {"parts": "mini_batches"},
    ("loops",): {"freshest": "latest"},
    ("prediction",): {"critical_tokens": "critical_credits"},
}


def with_new_names(plan: Any) -> Any:
    """Rename the old keys of a plan that was decoded from JSON; other values stay as they are.

    >>> with_new_names({"channels": [{"name": "rollout", "tokens": 1}]})
    {'channels': [{'name': 'rollout', 'credits': 1}]}
    """
    for place, names in RENAMED.items():
        plan = _rename_keys(plan, place, names)
    return plan


def _rename_keys(value: Any, place: tuple[str, ...], names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_rename_keys(item, place, names) for item in value]
    if not isinstance(value, dict):
        return value
    if place:
        return {key: _rename_keys(item, place[1:], names) if key == place[0] else item for key, item in value.items()}
    return {names.get(key, key): item for key, item in value.items()}


def unknown_keys(raw: Any, known: Any, where: str) -> list[str]:
    """List the places of the keys in `raw` that `known`, the plan decoded from it, does not have.

    >>> unknown_keys({"nodes": [{"name": "rollout", "colour": 1}]}, {"nodes": ({"name": "rollout"},)}, "plan")
    ['plan.nodes[0].colour']
    """
    if isinstance(raw, dict) and isinstance(known, dict):
        return [f"{where}.{key}" for key in raw if key not in known] + [
            place for key in raw if key in known for place in unknown_keys(raw[key], known[key], f"{where}.{key}")
        ]
    if isinstance(raw, list) and isinstance(known, list | tuple):
        return [place for i, (a, b) in enumerate(zip(raw, known, strict=False)) for place in unknown_keys(a, b, f"{where}[{i}]")]
    return []


# What a plan guarantees before it runs, for the whole graph and for each loop.


@dataclass(frozen=True)
class LoopBound:
    """The guarantees of the schedule for one feedback edge: the most versions behind, and the most batches open at once."""

    name: str
    staleness: int
    open_batches: int


@dataclass(frozen=True)
class Certificate:
    """The guarantees of the schedule for any timing, derived from its credits. Edges that lead only to evaluations have no bound in
    `loops`.

    `exact` is True if the trainers' log-probs are bit-identical to the engines'. This relies on one kernel for both sides, on one core or
    on GPUs, and on a check of some tokens of each step.
    """

    staleness_bound: int
    deadlock_free: bool
    open_batches: int
    buffered_bytes: int | None
    period_s: float
    loops: tuple[LoopBound, ...] = ()
    exact: bool = False


# The adapter that a feedback edge carries instead of a model's weights, as the plan names it.


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter of this `rank`; a reader adds its product, times `scale`, to the base that it keeps, rounded as `base` says.

    It has these `targets`, and starts with the adapter in `folder`, or at zero. `bytes` are the bytes of a version, and `matrices` the
    elements of the matrices that it changes, if known.
    """

    rank: int
    scale: float
    bytes: int | None
    base: str | None = None
    targets: str | tuple[str, ...] = ALL_LINEAR
    folder: str | None = None
    matrices: int | None = None

    @classmethod
    def of(cls, model: Model | None, shapes: Shapes) -> "PlannedAdapter | None":
        """Plan the adapter that a model publishes; None for full weights."""
        adapter = model.traits.adapter if model is not None else None
        if model is None or adapter is None:
            return None
        size = adapter_size(model, shapes.get(model.path))
        own, changed = (None, None) if size is None else (size.bytes, size.matrices)
        return cls(adapter.rank, adapter.scale, own, adapter.base, adapter.targets, adapter.folder, changed)

    def merging_bytes(self, itemsize: int, versions: int) -> int | None:
        """The bytes that a reader keeps besides its weights: the base of the matrices that change, and `versions`; None if unknown."""
        return None if self.bytes is None or self.matrices is None else itemsize * self.matrices + versions * self.bytes


# The memory of a place in a plan: its parts at the peak, and at each instant of an update.


@dataclass(frozen=True)
class PlannedMemory:
    """Estimated bytes on a GPU of a pool or on the host (None), while a job runs or loads: its parts, its peak, what must fit, and the
    capacity.

        >>> need = PlannedMemory("train", (("weights", 2**30), ("logits", 2**29)), 3 * 2**29, 3 * 2**29, None, False,
        ...                      (("head", (("logits", 2**29),)), ("backward of a layer", (("activations", 2**28),))))
        >>> print(need)
        a GPU of 'train': 1.50 GiB at the peak
          peak                          1.50 GiB: weights 1.00, logits 0.50
          head                          0.50 GiB: logits 0.50
          backward of a layer           0.25 GiB: activations 0.25

    `parts` are the parts of the peak. `instants` has the temporary parts at each instant of an update; the peak is the largest instant.
    `print(need)` shows both.
    """

    pool: str | None
    parts: tuple[tuple[str, int], ...]
    peak_bytes: int
    least_bytes: int
    limit: int | None
    loading: bool = False
    instants: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.peak_bytes / 2**30:.2f} GiB at the peak", _sizes("peak", self.parts)]
        return "\n".join([*lines, *(_sizes(instant, parts) for instant, parts in self.instants)])

    @property
    def place(self) -> str:
        """The place and the time in words."""
        return ("host" if self.pool is None else f"a GPU of '{self.pool}'") + (" while models load" if self.loading else "")


def _sizes(instant: str, parts: tuple[tuple[str, int], ...]) -> str:
    total = sum(size for _, size in parts)
    return f"  {instant:26} {total / 2**30:7.2f} GiB: " + ", ".join(f"{what} {size / 2**30:.2f}" for what, size in parts)


DEADLINE_S = 600.0  # default deadline of each wait of one worker for another

CostSource: TypeAlias = Literal["nominal", "given", "measured", "scaled", "roofline", "estimated"]


@dataclass(frozen=True)
class PlannedPool:
    """Devices of a pool: GPU numbers, or for pools on the host the number of cores."""

    name: str
    device: Literal["gpu", "cpu"]
    gpus: tuple[int, ...]
    cpus: int
    busy: float  # predicted share of the period in which the pool works

    @property
    def count(self) -> int:
        """The number of devices."""
        return len(self.gpus) or self.cpus


@dataclass(frozen=True)
class PlannedJoin:
    """The batches that decode besides the one that is due, at most `ahead`; `shared` is True if all share their decode steps."""

    ahead: int
    shared: bool


@dataclass(frozen=True)
class PlannedNode:
    """A node as the plan runs it. `pool` is None for a host node, `seconds` is the predicted time of a firing, with all chunks."""

    name: str
    work: str
    model: str | None
    pool: str | None
    workers: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    rows: int
    seconds: float
    cost: CostSource
    chunks: int = 1  # of a batch, for which it fires one after another
    due: Due | None = None  # the steps at which it works, if not at each
    passes: Passes | None = None  # into which a batch is cut, if known
    any_devices: bool = False  # the seconds are a plain number, used for any devices
    joins: PlannedJoin | None = None  # batches that decode besides the one that is due


@dataclass(frozen=True)
class PlannedWorker:
    """One process: rank `rank` of `world` of a model, or a process of host nodes. It fires `nodes` in this order, once per step."""

    name: str
    pool: str | None
    model: str | None
    rank: int
    world: int
    gpus: tuple[int, ...]
    threads: int
    nodes: tuple[str, ...]
    host: int = 0  # the driver is on host 0


ChannelKind: TypeAlias = Literal["batch", "order", "earlier"]


@dataclass(frozen=True)
class PlannedChannel:
    """A channel from one node to its readers: the columns they read, the transport, and how many messages it holds.

    A message is a batch, or one of its `chunks`. `kind` "order" carries nothing: it keeps nodes of
    one pool that run in different processes from overlapping. "earlier" carries columns to a later step.
    """

    name: str
    writer: str
    readers: tuple[str, ...]
    columns: tuple[str, ...]
    transport: str  # a name of `channels.api.TRANSPORTS`
    slots: int
    bytes: int | None  # of one message, if the columns' sizes are known
    kind: ChannelKind = "batch"
    credits: int = 0  # messages in it before the first step; with -n the first n messages are never sent
    chunks: int = 1  # messages a step
    stream: str | None = None  # the rollout whose chunks they are


@dataclass(frozen=True)
class ChannelEnd:
    """One end of a channel in one worker: the worker puts there, or takes the messages of the writer's rank `rank`."""

    name: str
    side: Literal["put", "take"]
    rank: int = 0


@dataclass(frozen=True)
class PlannedLoop:
    """A feedback edge: its staleness bound and what it costs."""

    name: str
    writer: str
    readers: tuple[str, ...]
    depth: int
    buffers: int
    latest: bool
    staleness: float  # expected in the steady state; the bound is `depth`
    transport: str  # a name of `channels.api.TRANSPORTS`
    slots: int
    publish_s: float
    hidden: bool  # whether publishing does not lengthen the period
    bucket_bytes: int = BUCKET_BYTES
    checksum: bool = False
    due: Due | None = None  # the steps whose weights it carries, if not all; the weights are then for the same step
    adapter: PlannedAdapter | None = None  # what it carries instead of full weights
    bytes: int | None = None  # of a version, if known

    def carries(self, step: int) -> bool:
        """Whether this edge carries the weights that `step` publishes."""
        return self.due is None or (self.due(step) and not self.due.begins(step))


PlannedEnd: TypeAlias = PlannedChannel | PlannedLoop


@dataclass(frozen=True)
class PlannedSleep:
    """A model that time-shares its devices: seconds of one wake and of one sleep, and the bytes that it moves from each device to host
    memory for a sleep, if known."""

    model: str
    wake_s: float
    sleep_s: float
    bytes: int | None
    cost: CostSource


@dataclass(frozen=True)
class PlannedModel:
    """A model: the `dtype` it computes in and the reason `why`; as JSON, the user's `engine_args`; and the `split` of a pass over its
    ranks, e.g. "tp 2 × dp 2"."""

    name: str
    dtype: str
    why: str
    engine_args: str = ""
    split: str = ""


@dataclass(frozen=True)
class PlannedWait:
    """Seconds per step that a pool, or a worker on the host, waits for `on`: a channel or a feedback edge.

    `reason` is "data" (no message yet), "slots" (no room to put), "loop" (the weights have not arrived).
    """

    who: str
    on: str
    reason: Reason
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """The predicted steady state: seconds per step, the cycle that sets it, and advice in words.

    `period_s` is the period of the critical cycle, with the mean seconds until the last engine of a firing is done. `simulated_s` comes
    from playing the schedule with the lengths and spreads of the costs: it counts the waits for long responses, and an engine that is done
    continues while another decodes. `step_s` is the number to expect. `first_step_s` lasts from the first tick to the end of the first
    step, without start-up.
    """

    period_s: float
    simulated_s: float
    critical: tuple[str, ...]  # event names along the critical cycle
    critical_credits: int
    cost: CostSource
    advice: tuple[str, ...]
    step_s: float
    first_step_s: float
    waits: tuple[PlannedWait, ...]
    warnings: tuple[str, ...] = ()  # unmeasured numbers on which the choice of this plan rests
    left_out: tuple[str, ...] = ()  # work of the run that the seconds do not count
    assumed: tuple[str, ...] = ()  # unmeasured numbers on which the seconds rest, and how far they may be off


LEAST_STEPS = 3  # to look at: the first one warms up


@settings.refuse_unknown
@dataclass(frozen=True)
class Replan:
    """When a job looks for a faster plan of its run, and what it may choose. For `plan.launch(replan=…)`.

    >>> import rlgraph as rg
    >>> rg.planning.Replan(every=100).gain
    0.1

    * `every`: the steps between two looks. The costs are fitted to these steps.
    * `gain`: the least part of the step time that a change is predicted to save.
    * `graphs`: graphs of the same nodes with other pools, e.g. with generator and trainer in one pool, among which it may also choose.
    """

    every: Count = 50
    gain: Fraction = 0.1
    graphs: tuple[Graph, ...] = ()

    def __post_init__(self) -> None:
        settings.check(self, PlanError)
        if self.every < LEAST_STEPS:
            raise PlanError(f"Replan(every={self.every}): costs are fitted to the steps between two looks; set at least {LEAST_STEPS}")


@dataclass(frozen=True)
class Plan:
    """A graph placed on a cluster: workers, channels, loops, schedule, prediction and certificate.

    `rg.compile` makes it. Print it, draw it, compare it with another, write it as JSON, or launch it. A plan that `from_json` reads has no
    graph, so it cannot be launched.

    >>> import rlgraph as rg
    >>> plan = rg.compile(rg.Graph("questions", rg.prompts([{"prompt": "1 + 1 ="}], count=1)), rg.Cluster(cpus=2))
    >>> rg.Plan.from_json(plan.to_json()) == plan
    True
    """

    graph: str
    cluster: Cluster
    pools: tuple[PlannedPool, ...]
    nodes: tuple[PlannedNode, ...]
    workers: tuple[PlannedWorker, ...]
    channels: tuple[PlannedChannel, ...]
    loops: tuple[PlannedLoop, ...]
    schedule: Schedule
    window: int  # steps that may be in flight
    hosts: int  # hosts that the GPU pools use
    prediction: Prediction
    certificate: Certificate
    memory: tuple[PlannedMemory, ...]  # of the places whose models' shapes are known
    sleeps: tuple[PlannedSleep, ...] = ()  # of the models that share their devices
    models: tuple[PlannedModel, ...] = ()  # those that have a dtype
    source: Graph | msgspec.UnsetType = field(default=msgspec.UNSET, compare=False, repr=False)  # UNSET if it was read from JSON

    @property
    def facade(self) -> Any:
        """Import `rlgraph.api`, which draws and launches the plan. It imports all other packages, so it is imported when first used."""
        return import_module("rlgraph.api")

    @property
    def values(self) -> "Plan":
        """Copy the plan without its graph, for the trace of a run."""
        return replace(self, source=msgspec.UNSET)

    def __str__(self) -> str:
        return str(self.facade.text(self))

    def _repr_svg_(self) -> str:
        return str(self.facade.svg(self))

    def draw(self, path: str | Path) -> None:
        """Write a picture of the plan to `path`: SVG, or Mermaid text if the name ends in `.mmd`. Raises PlanError for any other ending."""
        self.facade.draw(self, path)

    def timeline(self, path: str | Path, steps: int = 6) -> None:
        """Write the predicted timeline of the first `steps` steps to `path`, as Chrome-trace JSON for ui.perfetto.dev."""
        self.facade.timeline(self, path, steps)

    @check_arguments(PlanError)
    def launch(
        self,
        *,
        dispatch: Literal["compiled_graph", "calls", "processes"] | None = None,
        deadline_s: Seconds = DEADLINE_S,
        checkpoint: str | Path | None = None,
        every: Count = 10,
        keep: Count = 2,
        restarts: Natural = 0,
        fresh: bool = False,
        export_every: Count | None = None,
        replan: Replan | None = None,
        transport: str | None = None,
        wait_for_hosts_s: Seconds | None = None,
        encrypt: bool = False,
    ) -> "rlgraph.Job":
        """Make the `rlgraph.Job` of the plan, for a `with` block: entering the block starts the workers, leaving it stops them.

        * `dispatch`: what starts the workers' loops: one execution of a Compiled Graph of Ray ("compiled_graph"), an actor call per worker
          ("calls"), or, on one host and without Ray, "processes". None: a Compiled Graph on one host if this Ray has them, else calls. The
          driver itself ticks the steps, equally fast with each.
        * `deadline_s`: the seconds that one worker may wait for another.
        * `checkpoint`: the folder of the checkpoints. If it holds checkpoints already, the job resumes from the newest. The job also writes
          one after its last step.
        * `every`: the steps between two checkpoints.
        * `keep`: how many checkpoints the folder keeps.
        * `restarts`: how often the job restarts without a new checkpoint in between, when a worker dies or a node fails.
        * `fresh`: moves existing checkpoints aside and starts from the beginning.
        * `export_every`: the steps between two exports of the policy as a Hugging Face folder, `exports/step-…` next to the checkpoints.
        * `replan`: looks every few steps for a faster plan, and changes to it: `rg.planning.Replan(every=50)`. It requires `checkpoint`.
          A job that loses a host continues under a plan for the others.
        * `transport`: how columns cross processes of a host: "shm" (the default), or "ray" with the channels of Ray's Compiled Graphs. The
          results are bit-identical.
        * `wait_for_hosts_s`: how many seconds the start waits for hosts that Ray lacks, and for GPUs that other jobs hold.
        * `encrypt`: encrypts with TLS every connection that rlgraph opens between hosts. A plan in which another library sends columns
          or weights between hosts is refused.

        Raises PlanError if this machine or its Ray lacks what the plan needs, and DataError for models and prompts that
        cannot be used, both before anything starts. Entering the job raises CheckpointError for a folder that cannot be used.
        """
        job: rlgraph.Job = self.facade.launch(
            self,
            dispatch=dispatch,
            deadline_s=deadline_s,
            checkpoint=checkpoint,
            every=every,
            keep=keep,
            restarts=restarts,
            fresh=fresh,
            export_every=export_every,
            replan=replan,
            transport=transport,
            wait_for_hosts_s=wait_for_hosts_s,
            encrypt=encrypt,
        )
        return job

    def run_here(self) -> Any:
        """Make an `rlgraph.runtime.local.LocalJob`, which runs the plan in this process, without Ray, for tests and debuggers."""
        return self.facade.run_here(self)

    def ray_dag(self, actors: Mapping[str, Any]) -> Any:
        """Bind the forward graph to actors as a graph of Ray; `actors` maps each worker's name to its actor. See `rlgraph.api.ray_dag`."""
        return self.facade.ray_dag(self, actors)

    def to_json(self) -> str:
        """Write the plan as JSON, without its graph; `Plan.from_json` returns an equal plan."""
        return msgspec.json.format(msgspec.json.encode(self.values), indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read the JSON `text` that `to_json` wrote, in this version or an older one. Raises PlanError for other text or an unknown key."""
        here = f"this is rlgraph {_version()}, which reads the plans that it writes: compile the graph again"
        try:
            raw = with_new_names(msgspec.json.decode(text))
            plan = msgspec.convert(raw, Plan)
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError) as error:
            raise PlanError(f"Plan.from_json: {error}; {here}") from None
        names = {end.transport for end in plan.ends}
        unknown = [f"transport '{name}'" for name in names - TRANSPORTS.keys()] + unknown_keys(raw, msgspec.to_builtins(plan), "plan")
        if unknown:
            raise PlanError(f"Plan.from_json: {unknown[0]} means nothing here; {here}")
        return plan

    @property
    def ends(self) -> tuple[PlannedEnd, ...]:
        """All that moves between workers: channels and feedback edges."""
        return (*self.channels, *self.loops)

    @property
    def counts(self) -> Mapping[str, int]:
        """The devices of each pool: GPUs, or for pools on the host cores."""
        return {pool.name: pool.count for pool in self.pools}

    @property
    def split_text(self) -> str:
        """The devices of each pool in words, e.g. "rollout 3, train 1"."""
        return ", ".join(f"{name} {count}" for name, count in self.counts.items())

    def steps_ahead(self) -> Mapping[str, int]:
        """Count for each worker how many steps ahead of the finished step it runs, because other workers need them.

        If update k follows rollout k + 1 in their pool, the rollout and its prompts run one step ahead.
        """
        found = {worker.name: 0 for worker in self.workers}
        settled = False
        while not settled:
            settled = True
            for channel in self.channels:
                ahead = max(found[name] for reader in channel.readers for name in self.node(reader).workers)
                needed = ahead - -(-channel.credits // channel.chunks)
                for name in self.node(channel.writer).workers:
                    if found[name] < needed:
                        found[name], settled = needed, False
        return found

    def due_events(self) -> Mapping[str, Due]:
        """Map each event that does not happen at every step to the steps at which it does."""
        found = {name: node.due for node in self.nodes if node.due is not None for name in (node.name,)}
        ends = {d.via: (d.before, d.after) for d in self.schedule.dependencies if d.reason == "slots"}
        return found | {name: loop.due for loop in self.loops if loop.due is not None for name in ends[loop.name]}

    def node(self, name: str) -> PlannedNode:
        """Return the node of this name."""
        return next(node for node in self.nodes if node.name == name)

    def dtype(self, model: str | None) -> str | None:
        """Return the dtype that a model computes in, or None for a model without one."""
        return next((found.dtype for found in self.models if found.name == model), None)

    def worker(self, name: str) -> PlannedWorker:
        """Return the worker of this name."""
        return next(worker for worker in self.workers if worker.name == name)


def _version() -> str:
    try:
        return version("rlgraph-dataflow")
    except PackageNotFoundError:  # not installed: rlgraph runs from its source tree
        return "of the present source"
