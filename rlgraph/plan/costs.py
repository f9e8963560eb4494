"""The costs of a graph's nodes: given, measured and scaled, estimated from shapes, or placeholders if nothing is known."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from rlgraph import settings
from rlgraph.errors import PlanError, choices
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Node
from rlgraph.graph.traits import Work
from rlgraph.plan.cost_functions import NodeCost, Setting, SleepCost, number_or_function
from rlgraph.plan.lengths import Array, Lengths
from rlgraph.plan.placement import model_names
from rlgraph.plan.plan import CostSource
from rlgraph.settings import AtLeastZero, Natural

# Costs as a YAML file that people read and change.

C = TypeVar("C")
KNOWN = ("recompute", False), ("compiled", False)  # these values are known, the defaults are not
HEAD = """\
# What each node of a graph costs, in seconds: rlgraph.planning.Costs.from_file reads it. A node's cost is a number of seconds, or the
# seconds by count of devices, as {1: 38.2, 2: 19.0}, or
#   serial_s + (parallel_s + token_s * tokens) / devices, where a pass of training on a GPU takes at least pass_s, or sharded_pass_s
#   where ranks share the model; and for a generator `decode`: start_s + prefill_s * prompt tokens + step_s * (longest response)
#   + sequence_s * (response tokens), by engine.
# `measured` is the setting it was taken at, `spread` single firings over what the function gives, `lengths` the quantiles of the responses.
"""


def to_yaml(costs: object) -> str:
    """Format costs as YAML."""
    raw = msgspec.to_builtins(costs)
    short = {**_short(raw), "nodes": {name: _cost(_short(cost)) for name, cost in raw["nodes"].items()}}
    text: str = yaml.safe_dump(short, sort_keys=False, default_flow_style=None, width=120)
    return HEAD + text


def _cost(value: Any) -> Any:
    """Write costs that only depend on the device count in the short form: {1: 38.2, 2: 19.0}."""
    return dict(value["by_devices"]) if isinstance(value, dict) and list(value) == ["by_devices"] else value


def _short(value: Any) -> Any:
    """Round the values to six digits, and leave out zeros and empty values, which are the defaults."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items() if part not in (None, "", [], (), 0) or (key, part) in KNOWN}
    if isinstance(value, list | tuple):
        return [_short(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path: str | Path, kind: type[C]) -> C:
    """Read the costs of a file as the dataclass `kind`. Raises PlanError naming the file and the place in it."""
    file = Path(path)
    if not file.is_file():
        raise PlanError(f"costs file '{path}': there is no such file; write one with job.costs().to_file('{path}')")
    try:
        raw = msgspec.yaml.decode(file.read_text(encoding="utf-8"))
        for name, cost in _nodes(raw).items():
            if isinstance(cost, dict) and cost and all(isinstance(key, int) for key in cost):
                number_or_function(name, cost)
                raw["nodes"][name] = {"by_devices": [list(pair) for pair in sorted(cost.items())]}
        _rename_old_keys(raw)
        costs = msgspec.convert(raw, kind)
        _check_keys("costs", raw, costs)
        return costs
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PlanError(f"costs file '{path}': {error}; it holds what Costs.to_file writes: nodes, each with its seconds") from None
    except PlanError as error:
        raise PlanError(f"costs file '{path}': {error}") from None


def _rename_old_keys(raw: Any) -> None:
    """Rename keys of an older version: the `parts` of passes are `mini_batches` now."""
    for cost in _nodes(raw).values():
        measured = cost.get("measured") if isinstance(cost, dict) else None
        passes = measured.get("passes") if isinstance(measured, dict) else None
        if isinstance(passes, dict) and "parts" in passes:
            passes["mini_batches"] = passes.pop("parts")


def _nodes(raw: Any) -> Mapping[str, Any]:
    nodes = raw.get("nodes") if isinstance(raw, dict) else None
    return nodes if isinstance(nodes, dict) else {}


def _check_keys(where: str, raw: Any, made: Any) -> None:
    """Raise PlanError for an unknown key: a misspelt one would otherwise count as 0 seconds."""
    if not isinstance(raw, dict):
        return
    known = made.keys() if isinstance(made, Mapping) else {field.name for field in fields(made)}
    for key, part in raw.items():
        if key not in known:
            raise PlanError(f"{where} has no '{key}'; {choices(key, sorted(known))}")
        _check_keys(f"{where}.{key}", part, made[key] if isinstance(made, Mapping) else getattr(made, key))


DRAWN_STEPS = 400  # steps of a prediction with lengths and spreads
DRAWN_ROWS = 1 << 20  # at most, over all steps
LEAST_STEPS = 64
FORWARD = 1 / 3  # share of a forward and backward pass


@settings.refuse_unknown
@dataclass(frozen=True)
class Costs:
    """Seconds of each node by name, and of moving weights.

    A plain number counts the same on any devices and for any rows; a comparison of plans that rests on it warns. `{1: 38.2, 2: 19.0}` are
    the seconds on 1 and on 2 devices of its pool; a `NodeCost` is a function of devices, rows and lengths.

    Raises PlanError for a cost that is negative or not a number, or a cost that needs `lengths` without them.

    >>> costs = Costs({"prompts": 0.0, "rollout": {1: 38.2, 2: 19.0}, "update": {1: 9.2, 2: 4.9}})
    >>> costs.mean("rollout", Setting(devices=2))
    19.0

    * `nodes`: the seconds of each node, by its name.
    * `publish_s`: seconds to stage a version on the trainer.
    * `receive_s`: seconds to bring it to a generator.
    * `swap_s`: seconds to put it into the engine.
    * `publish_bytes`: the bytes of a version.
    * `lengths`: the distribution of the responses, for nodes whose cost depends on tokens.
    * `sleep`: the cost of sleeping and waking of models that time-share their devices, by their names in the plan ("generator",
      "policy"); missing costs are estimated.
    * `source`: where the costs come from: "measured", "given" by you, or an estimate.
    * `on`: the machine on which they were measured, in words.
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
            # At construction, so that every reader finds numbers and functions.
            object.__setattr__(self, "nodes", {name: number_or_function(name, cost) for name, cost in self.nodes.items()})
        settings.check(self, PlanError)
        for name in ("publish_s", "receive_s", "swap_s"):  # a plan read from its JSON has floats
            object.__setattr__(self, name, float(getattr(self, name)))
        for name, cost in self.nodes.items():
            if self.lengths is None and isinstance(cost, NodeCost) and cost.by_length:
                raise PlanError(
                    f"the cost of '{name}' depends on the tokens of a batch, but these costs have no lengths; pass "
                    "lengths=rg.planning.Lengths(at=(0, 0.5, 1), tokens=(10, 200, 4096)), or the node's seconds as a number"
                )

    def cost_of(self, node: str) -> NodeCost:
        """Turn the cost of a node, whatever its form, into a function of the node's setting."""
        cost = self.nodes[node]
        if isinstance(cost, NodeCost):
            return cost
        return NodeCost.on(cost) if isinstance(cost, Mapping) else NodeCost(serial_s=float(cost))

    def law(self, node: str) -> NodeCost:
        """Call `cost_of`: its old name, which warns."""
        warnings.warn("Costs.law(...) is now Costs.cost_of(...)", DeprecationWarning, stacklevel=2)
        return self.cost_of(node)

    def is_plain(self, node: str) -> bool:
        """Whether the seconds of `node` are a plain number above 0, which counts the same on any devices and for any rows."""
        cost = self.nodes[node]
        return self.source != "nominal" and isinstance(cost, int | float) and cost > 0

    def seconds(self, node: str, setting: Setting, steps: int, rows_drawn: int | None = None) -> Array:
        """Predict the seconds `[steps]` of firings of `node`."""
        return self.cost_of(node).seconds(setting, self.lengths, steps, rows_drawn or setting.rows)

    def mean(self, node: str, setting: Setting, rows_drawn: int | None = None, *, of_each: bool = False) -> float:
        """Predict the mean seconds of one firing of `node`: until its last engine is done, or averaged over the engines (`of_each`)."""
        rows = rows_drawn or setting.rows
        return _mean(self.cost_of(node), setting, self.lengths, self.choose_draws(rows) if self.varies(node) else 1, rows, of_each)

    def varies(self, node: str) -> bool:
        """Whether single firings of `node` differ."""
        cost = self.cost_of(node)
        return bool(cost.spread) or cost.by_length

    def choose_draws(self, rows: int) -> int:
        """Choose the number of steps for which a prediction draws lengths."""
        return max(min(DRAWN_STEPS, DRAWN_ROWS // max(rows, 1)), LEAST_STEPS)

    def source_at(self, node: str, setting: Setting) -> CostSource:
        """Name the source of the seconds of `node` at this setting: "scaled" if they were measured or given at another one."""
        if self.source in ("nominal", "roofline"):
            return self.source
        cost = self.cost_of(node)
        counts = [count for count, _ in cost.by_devices]
        elsewhere = cost.measured not in (None, setting) or (counts and setting.devices not in counts) or cost.computes_otherwise(setting)
        return "scaled" if elsewhere else self.source

    def sleep_source(self, model: str, setting: Setting) -> CostSource:
        """Name the source of the seconds in which a model wakes and sleeps at this setting."""
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
        Path(path).write_text(to_yaml(self), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path) -> "Costs":
        """Read the costs that `to_file` wrote. Raises PlanError for a missing file, or a file without costs."""
        found = read(path, _Written)
        return Costs(**{each.name: getattr(found, each.name) for each in fields(Costs)})


@dataclass(frozen=True)
class _Written(Costs):
    """Costs as in their file: seconds by device count are a NodeCost there, since msgspec accepts one mapping in a union."""

    nodes: Mapping[str, float | NodeCost]


@lru_cache(maxsize=4096)
def _mean(cost: NodeCost, setting: Setting, lengths: Lengths | None, steps: int, rows: int, of_each: bool) -> float:
    found = cost.each(setting, lengths, steps, rows)
    return float(found.mean() if of_each else found.max(axis=1).mean())


# Device-seconds of equally large models, by kind of work: a training token costs three forward ones (Kaplan et al., 2020,
# section 2.1), and decoding, bound by memory traffic, about twice a training pass over the same tokens.
NOMINAL: Mapping[Work, NodeCost] = {
    "generate": NodeCost(parallel_s=6.0),
    "train": NodeCost(parallel_s=3.0),
    "forward": NodeCost(parallel_s=1.0),
    "host": NodeCost(serial_s=0.01),
}


def nominal(graph: Graph) -> Costs:
    """Make placeholder costs, which only rank plans: every model has the same size, and the seconds belong to no machine."""
    nodes = {node.name: _nominal(node) for node in graph.nodes}
    return Costs(nodes, publish_s=0.02, receive_s=0.02, swap_s=0.01, source="nominal")


def _nominal(node: Node) -> NodeCost:
    cost = NOMINAL[node.traits.work]
    return replace(cost, parallel_s=cost.parallel_s * walks_of(node))


def epochs_of(node: Node) -> int:
    """Read the number of epochs of an update; 1 for other nodes."""
    return node.traits.epochs


def walks_of(node: Node) -> float:
    """Count the passes over its batch, in units of the node's kind: an update that scores rows first needs a third more for them.

    >>> import rlgraph as rg
    >>> policy = rg.Policy("tiny", pool=rg.Pool("train"))
    >>> pairs = rg.pairs([{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}], 8, policy)
    >>> round(walks_of(policy.update(pairs, loss=rg.losses.SimPO()).metrics.node), 3)
    1.333
    """
    return node.traits.epochs * (1.0 + node.traits.scored * FORWARD)


def check_costs(graph: Graph, costs: Costs | None) -> Costs:
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
            raise PlanError(
                f"costs lack node '{name}' of graph '{graph.name}'; give each node a cost, or pass no costs to use placeholders"
            )
    return costs


# Warn if plans are compared by plain numbers of seconds, which do not depend on devices or rows.

Compared = tuple[Graph, Costs, Mapping[str, Setting]]  # one of the compared plans


def warnings_of(compared: Iterable[Compared]) -> tuple[str, ...]:
    """Name the nodes whose plain number of seconds is used for several device counts, or for several row counts.

    Nodes on the host, which have no devices, and nodes that need no time are left out.
    """
    places: dict[str, set[tuple[int, int]]] = {}
    seconds: dict[str, float] = {}
    for graph, costs, split in compared:
        for node in graph.nodes:
            if node.pool is not None and costs.is_plain(node.name):
                places.setdefault(node.name, set()).add((split[node.name].devices, split[node.name].rows))
                seconds[node.name] = costs.mean(node.name, Setting())
    by_devices = {name: sorted({devices for devices, _ in seen}) for name, seen in places.items()}
    by_rows = {name: sorted({rows for _, rows in seen}) for name, seen in places.items()}
    found = []
    if apart := {name: counts for name, counts in by_devices.items() if len(counts) > 1}:
        first, counts = next(iter(apart.items()))
        example = ", ".join([f"{counts[0]}: {seconds[first]:.6g}", *(f"{count}: …" for count in counts[1:3])])
        found.append(
            f"the seconds of {_join_words(map(repr, apart))} are plain numbers, and are taken to be the same on "
            f"{_join_words(map(str, sorted({count for each in apart.values() for count in each})))} devices, which are compared; pass the "
            f"seconds on each count, e.g. '{first}': {{{example}}}"
        )
    if apart := {name: counts for name, counts in by_rows.items() if len(counts) > 1}:
        found.append(
            f"the seconds of {_join_words(map(repr, apart))} are plain numbers, and are taken to be the same for "
            f"{_join_words(map(str, sorted({count for each in apart.values() for count in each})))} rows, which are compared; give it as "
            "rg.planning.NodeCost, or costs that rg.planning.profile measured"
        )
    return tuple(found)


def _join_words(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
