"""The costs of a graph's nodes: given, measured and scaled, estimated from shapes, or nominal where nothing is known."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path

from rlgraph import settings
from rlgraph.compiler.placement import model_names
from rlgraph.compiler.plan import CostSource
from rlgraph.costs.costs_file import read, written
from rlgraph.costs.functions import NodeCost, Setting, SleepCost, number_or_function
from rlgraph.costs.lengths import Array, Lengths
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Graph, Node
from rlgraph.graph.operation import Work
from rlgraph.settings import AtLeastZero, Natural

DRAWN_STEPS = 400  # of a prediction that follows lengths and spreads
DRAWN_ROWS = 1 << 20  # at most, over all steps
LEAST_STEPS = 64
FORWARD = 1 / 3  # of a pass forward and backward


@dataclass(frozen=True)
class Costs:
    """Seconds of each node by name, and of moving weights.

    A plain number holds for any count of devices and rows; comparing plans by it warns. `{1: 38.2, 2: 19.0}` are the seconds on
    1 and on 2 devices of its pool; a `NodeCost` is a function of devices, rows and lengths.

    `publish_s` stages a version on the trainer, `receive_s` brings it to a generator, `swap_s` puts it into the engine;
    `publish_bytes` is the size of a version. `lengths` is the distribution of the responses, for nodes whose cost
    depends on tokens. `on` says in words where the costs were taken. `sleep` holds the cost of sleeping and waking for models that
    time-share their devices, by the names that a plan gives them ("generator", "policy"); missing ones are estimated.

    Raises PlanError for a cost that is negative or no number, or one that needs lengths where there are none.

    >>> costs = Costs({"prompts": 0.0, "rollout": {1: 38.2, 2: 19.0}, "update": {1: 9.2, 2: 4.9}})
    >>> costs.mean("rollout", Setting(devices=2))
    19.0
    """

    nodes: Mapping[str, float | NodeCost | Mapping[int, float]]
    publish_s: AtLeastZero = 0.0
    receive_s: AtLeastZero = 0.0
    swap_s: AtLeastZero = 0.0
    source: CostSource = field(default="given")
    lengths: Lengths | None = None
    publish_bytes: Natural | None = None
    on: str = ""
    sleep: Mapping[str, SleepCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.nodes, Mapping):
            object.__setattr__(self, "nodes", {name: number_or_function(name, cost) for name, cost in self.nodes.items()})
        settings.check(self, PlanError)
        for name, cost in self.nodes.items():
            if self.lengths is None and isinstance(cost, NodeCost) and cost.by_length:
                raise PlanError(
                    f"the cost of '{name}' follows the tokens of a batch, but these costs have no lengths; give "
                    "lengths=rg.Lengths(at=(0, 0.5, 1), tokens=(10, 200, 4096)), or the node's seconds as a number"
                )

    def cost_of(self, node: str) -> NodeCost:
        """Turn the cost of a node, in whatever way it was given, into a function of the node's setting."""
        cost = self.nodes[node]
        if isinstance(cost, NodeCost):
            return cost
        return NodeCost.on(cost) if isinstance(cost, Mapping) else NodeCost(serial_s=float(cost))

    def law(self, node: str) -> NodeCost:
        """Call `cost_of`, with a warning: the name of an older version."""
        warnings.warn("Costs.law(...) is now Costs.cost_of(...)", DeprecationWarning, stacklevel=2)
        return self.cost_of(node)

    def is_plain(self, node: str) -> bool:
        """Tell whether the seconds of `node` are a plain number above 0, which holds on any devices and for any rows."""
        cost = self.nodes[node]
        return self.source != "nominal" and isinstance(cost, int | float) and cost > 0

    def seconds(self, node: str, setting: Setting, steps: int, rows_drawn: int | None = None) -> Array:
        """Predict the seconds `[steps]` of firings of `node`."""
        return self.cost_of(node).seconds(setting, self.lengths, steps, rows_drawn or setting.rows)

    def mean(self, node: str, setting: Setting, rows_drawn: int | None = None) -> float:
        """Predict the mean seconds of one firing of `node`."""
        rows = rows_drawn or setting.rows
        return _mean(self.cost_of(node), setting, self.lengths, self.steps_drawn(rows) if self.varies(node) else 1, rows)

    def varies(self, node: str) -> bool:
        """Tell whether single firings of `node` differ."""
        cost = self.cost_of(node)
        return bool(cost.spread) or cost.by_length

    def steps_drawn(self, rows: int) -> int:
        """Choose the number of steps for which a prediction draws lengths."""
        return max(min(DRAWN_STEPS, DRAWN_ROWS // max(rows, 1)), LEAST_STEPS)

    def source_at(self, node: str, setting: Setting) -> CostSource:
        """Tell where the seconds of `node` at this setting come from: "scaled" if they were measured at another one."""
        cost = self.cost_of(node)
        counts = [count for count, _ in cost.by_devices]
        elsewhere = cost.measured not in (None, setting) or (counts and setting.devices not in counts) or cost.recomputes_otherwise(setting)
        return "scaled" if elsewhere else self.source

    def sleep_source(self, model: str, setting: Setting) -> CostSource:
        """Tell where the seconds in which a model wakes and sleeps at this setting come from."""
        cost = self.sleep[model]
        if cost.estimated:
            return "estimated"
        at = cost.measured
        return "scaled" if at is not None and (at.devices, at.engines) != (setting.devices, setting.engines) else self.source

    def only(self, graph: Graph) -> "Costs":
        """Keep the costs of the nodes and models that a graph has."""
        nodes, models = {node.name for node in graph.nodes}, model_names(graph)
        return replace(
            self,
            nodes={name: cost for name, cost in self.nodes.items() if name in nodes},
            sleep={name: cost for name, cost in self.sleep.items() if name in models},
        )

    def to_file(self, path: str | Path) -> None:
        """Write the costs as YAML, which `Costs.from_file` reads."""
        Path(path).write_text(written(self), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path) -> "Costs":
        """Read the costs that `to_file` wrote. Raises PlanError for a file that is missing or holds anything else."""
        found = read(path, _Written)
        return Costs(**{each.name: getattr(found, each.name) for each in fields(Costs)})


@dataclass(frozen=True)
class _Written(Costs):
    """Costs as their file holds them: seconds by device count are a NodeCost there, as msgspec takes one mapping in a union."""

    nodes: Mapping[str, float | NodeCost]


@lru_cache(maxsize=4096)
def _mean(cost: NodeCost, setting: Setting, lengths: Lengths | None, steps: int, rows: int) -> float:
    return float(cost.seconds(setting, lengths, steps, rows).mean())


# Device-seconds of equally large models, by kind of work: a training token costs three forward ones (Kaplan et al., 2020,
# section 2.1), and decoding, bound by memory traffic, about twice a training pass over the same tokens.
NOMINAL: Mapping[Work, NodeCost] = {
    "generate": NodeCost(parallel_s=6.0),
    "train": NodeCost(parallel_s=3.0),
    "forward": NodeCost(parallel_s=1.0),
    "host": NodeCost(serial_s=0.01),
}


def nominal(graph: Graph) -> Costs:
    """Make costs that only rank plans: every model has the same size, and the seconds are of no machine."""
    nodes = {node.name: _nominal(node) for node in graph.nodes}
    return Costs(nodes, publish_s=0.02, receive_s=0.02, swap_s=0.01, source="nominal")


def _nominal(node: Node) -> NodeCost:
    cost = NOMINAL[node.traits.work]
    return replace(cost, parallel_s=cost.parallel_s * walks_of(node))


def epochs_of(node: Node) -> int:
    """Read the number of epochs of an update; 1 for other nodes."""
    return node.traits.epochs


def walks_of(node: Node) -> float:
    """Count the passes over its batch, in those of the node's kind: an update that scores rows first takes a third more for them.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> pairs = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, policy)
    >>> round(walks_of(policy.update(pairs, loss=rg.SimPO()).metrics.node), 3)
    1.333
    """
    return node.traits.epochs * (1.0 + node.traits.scored * FORWARD)


def checked(graph: Graph, costs: Costs | None) -> Costs:
    """Check that costs name exactly the graph's nodes. Raises PlanError for an unknown or a missing node."""
    if costs is None:
        return nominal(graph)
    names = [node.name for node in graph.nodes]
    for name in costs.nodes:
        if name not in names:
            raise PlanError(f"costs name a node '{name}' that graph '{graph.name}' lacks; its nodes are {names}")
    models = list(model_names(graph))
    for name in costs.sleep:
        if name not in models:
            raise PlanError(f"costs name a model '{name}' in `sleep` that graph '{graph.name}' lacks; its models are {models}")
    for name in names:
        if name not in costs.nodes:
            raise PlanError(f"costs lack node '{name}' of graph '{graph.name}'; give each node a cost, or none at all for nominal ones")
    return costs
