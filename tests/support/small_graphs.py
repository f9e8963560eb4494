"""All training graphs of up to five nodes: every shape, every place of the rollout, every depth and number of buffers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from rlgraph.errors import GraphError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Operation, Output, declare, feedback
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.compile import place_and_schedule
from rlgraph.plan.costs import nominal
from rlgraph.plan.placement import splits
from rlgraph.plan.schedule import Schedule
from rlgraph.values.pool import Pool

Edges = tuple[tuple[int, int], ...]
LOOPS = ((0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2))  # depth and buffers; two buffers need a depth
SHARED = ("host", "train", "judge")
HOMES = ("host", "rollout", "train")


@dataclass(frozen=True)
class Nothing(Operation):
    def start(self, context: Any) -> Any:
        raise AssertionError("never run")


@dataclass(frozen=True)
class Small:
    """Nodes 0 to n - 1, declared in that order; the last is the update, `rollout` another one; `homes` are those between."""

    nodes: int
    edges: Edges
    rollout: int
    homes: tuple[str, ...]
    depth: int
    buffers: int
    shared: bool = False  # the update has the rollout's pool

    def graph(self) -> Graph:
        pools = {"rollout": Pool("rollout"), "train": Pool("train")}
        models = {name: Model(name, pool=pools["rollout" if self.shared else name]) for name in pools}
        models["judge"] = Model("judge", pool=pools["rollout"])
        weights = feedback("weights", depth=self.depth, buffers=self.buffers)
        homes, made = iter(self.homes), list[Output]()
        for index in range(self.nodes):
            inputs = [made[a] for a, b in self.edges if b == index]
            last, first = index == self.nodes - 1, index == self.rollout
            home = "train" if last else "rollout" if first else next(homes)
            node = declare(
                name_of(index),
                Nothing(),
                inputs,
                reads=tuple(output.columns[0] for output in inputs),
                writes=() if last else (f"c{index}",),
                rows=None if inputs else 1,
                model=models.get(home),
                feedback=weights if first else None,
            )
            made.append(Output(node))
        weights.close(Output(made[-1].node, "weights"))
        return Graph("small", Output(made[-1].node, "metrics"))

    def schedule(self) -> tuple[Graph, Schedule]:
        graph, cluster = self.graph(), Cluster(cpus=4)
        return graph, place_and_schedule(graph, cluster, next(iter(splits(graph, cluster))), nominal(graph))[2]


def shared_graphs(nodes: int) -> Iterator[Small]:
    """Yield the graphs of that many nodes in one pool, stale ones that overlap something included, also three steps deep."""
    for edges in shapes(nodes):
        for rollout in range(nodes - 1):
            for homes in product(SHARED, repeat=nodes - 2):
                for depth, buffers in LOOPS:
                    small = Small(nodes, edges, rollout, homes, depth, buffers, shared=True)
                    try:
                        small.graph()
                    except GraphError:
                        continue
                    yield small


def name_of(index: int) -> str:
    return f"n{index}"


def shapes(nodes: int) -> Iterator[Edges]:
    """Yield every set of edges in which each node but the last leads on, so that the update depends on all."""
    possible = list(combinations(range(nodes), 2))
    for chosen in product((False, True), repeat=len(possible)):
        edges = tuple(edge for edge, kept in zip(possible, chosen, strict=True) if kept)
        if {a for a, _ in edges} == set(range(nodes - 1)):
            yield edges


def small_graphs(nodes: int, *, every_home: bool = True) -> Iterator[Small]:
    """Yield every graph of that many nodes; without `every_home` the nodes between are on the host."""
    for edges in shapes(nodes):
        for rollout in range(nodes - 1):
            for homes in product(HOMES, repeat=nodes - 2) if every_home else [("host",) * (nodes - 2)]:
                for depth, buffers in LOOPS:
                    yield Small(nodes, edges, rollout, homes, depth, buffers)
