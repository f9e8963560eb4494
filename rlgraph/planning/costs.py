"""What each node costs: given, measured, or nominal where nobody knows yet."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlgraph.errors import PlanError
from rlgraph.graph import Graph, Work
from rlgraph.planning.plan import CostSource


@dataclass(frozen=True)
class NodeCost:
    """Seconds of one firing: `serial_s` whatever the devices, plus `parallel_s` device-seconds shared by them."""

    serial_s: float = 0.0
    parallel_s: float = 0.0

    def seconds(self, devices: int) -> float:
        return self.serial_s + self.parallel_s / max(devices, 1)


@dataclass(frozen=True)
class Costs:
    """Seconds of each node by name (a number means: whatever the devices), and of moving weights.

    `publish_s` stages a version on the trainer, `receive_s` brings it to a generator, `swap_s` puts it into the engine.
    Raises PlanError for a cost that is negative or no number.
    """

    nodes: Mapping[str, float | NodeCost]
    publish_s: float = 0.0
    receive_s: float = 0.0
    swap_s: float = 0.0
    source: CostSource = field(default="given")

    def __post_init__(self) -> None:
        moving = {"publish_s": self.publish_s, "receive_s": self.receive_s, "swap_s": self.swap_s}
        for name, cost in {**self.nodes, **moving}.items():
            parts = (cost.serial_s, cost.parallel_s) if isinstance(cost, NodeCost) else (cost,)
            for part in parts:
                if isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < float("inf"):
                    raise PlanError(f"the cost of '{name}' is {cost!r}; a cost is a number of seconds of at least 0")

    def of(self, node: str, devices: int) -> float:
        """Return the seconds of one firing of `node` on that many devices."""
        cost = self.nodes[node]
        return cost.seconds(devices) if isinstance(cost, NodeCost) else float(cost)


# Device-seconds of equally large models, by kind of work: a training token costs three forward ones (Kaplan et al., 2020,
# section 2.1), and decoding, bound by memory traffic, about twice a training pass over the same tokens.
NOMINAL: Mapping[Work, NodeCost] = {
    "generate": NodeCost(parallel_s=6.0),
    "train": NodeCost(parallel_s=3.0),
    "forward": NodeCost(parallel_s=1.0),
    "host": NodeCost(serial_s=0.01),
}


def nominal(graph: Graph) -> Costs:
    """Return costs that only rank: every model the same size, seconds without a machine behind them."""
    nodes = {node.name: NOMINAL[node.operation.work] for node in graph.nodes}
    return Costs(nodes, publish_s=0.02, receive_s=0.02, swap_s=0.01, source="nominal")


def checked(graph: Graph, costs: Costs | None) -> Costs:
    """Return costs that name exactly the graph's nodes. Raises PlanError for an unknown or a missing node."""
    if costs is None:
        return nominal(graph)
    names = [node.name for node in graph.nodes]
    for name in costs.nodes:
        if name not in names:
            raise PlanError(f"costs name a node '{name}' that graph '{graph.name}' lacks; its nodes are {names}")
    for name in names:
        if name not in costs.nodes:
            raise PlanError(f"costs lack node '{name}' of graph '{graph.name}'; give each node a cost, or none at all for nominal ones")
    return costs
