"""Random training graphs with costs: critics, references, host nodes beside the loop, chunks, streamed updates, pools shared and apart."""

import random
from dataclasses import dataclass
from typing import Any

from rlgraph.errors import GraphError
from rlgraph.graph.graph import Graph
from rlgraph.graph.nodes import Model, Operation, Output, declare, feedback
from rlgraph.graph.traits import NodeTraits, Work
from rlgraph.plan.cluster import Cluster
from rlgraph.plan.cost_functions import SleepCost
from rlgraph.plan.costs import Costs
from rlgraph.plan.placement import model_names
from rlgraph.values.pool import Pool


@dataclass(frozen=True)
class Nothing(Operation):
    """Work that a plan times and nobody runs."""

    work: Work = "host"
    by_group: bool = False

    @property
    def traits(self) -> NodeTraits:
        return NodeTraits(work=self.work, by_group=self.by_group)

    def start(self, context: Any) -> Any:
        raise AssertionError("never run")


@dataclass(frozen=True)
class Case:
    """A graph, what its nodes take, in seconds, and where it runs: on GPUs the models of one pool time-share it and sleep in between."""

    graph: Graph
    costs: Costs
    cluster: Cluster


def random_case(seed: int) -> Case:
    """Draw a graph of 3 to 12 nodes, the same for the same seed. A graph that the rules refuse is drawn again."""
    chance = random.Random(seed)
    while True:
        try:
            graph = _drawn(chance)
        except GraphError:
            continue
        names = [node.name for node in graph.nodes]

        def seconds() -> float:
            return chance.choice([0.0, chance.randint(1, 20) / 10])

        costs = {name: chance.randint(0, 20) / 10 for name in names}
        gpus = chance.choice([0, len(graph.pools)])
        sleep = {name: SleepCost(wake_s=seconds(), sleep_s=seconds()) for name in model_names(graph)} if gpus else {}
        priced = Costs(costs, publish_s=seconds(), receive_s=seconds(), swap_s=seconds(), sleep=sleep)
        return Case(graph, priced, Cluster(gpus=gpus, cpus=16))


def _drawn(chance: random.Random) -> Graph:
    depth = chance.randint(0, 3)
    buffers = chance.randint(1, 2) if depth else 1
    chunks = chance.choice([1, 1, 2, 4])
    pools = [Pool(f"pool {index}") for index in range(chance.randint(1, 4))]
    generator, policy = Model("generator", pool=pools[0]), Model("policy", pool=chance.choice(pools))
    others = [Model(f"model {index}", pool=chance.choice(pools)) for index in range(2)]
    weights = feedback("weights", depth=depth, buffers=buffers)
    source = Output(declare("prompts", Nothing(), (), reads=(), writes=("prompts",), rows=8))
    rollout = declare(
        "rollout", Nothing("generate"), (source,), reads=("prompts",), writes=("c0",), model=generator, feedback=weights, chunks=chunks
    )
    made = [Output(rollout)]
    for index in range(1, chance.randint(0, 5) + 1):
        inputs = chance.sample(made, chance.randint(1, min(3, len(made))))
        reads = tuple(output.columns[0] for output in inputs)
        model = chance.choice([None, generator, policy, *others])
        work: Work = "host" if model is None else "forward"
        free = model in others and not any(output.node.feedback for output in made if output.node.model is model)  # one edge a model
        given = feedback(f"old {index}", depth=chance.randint(0, depth)) if chance.random() < 0.1 and free else None
        operation = Nothing(work, by_group=chance.random() < 0.6)
        made.append(Output(declare(f"node {index}", operation, inputs, reads=reads, writes=(f"c{index}",), model=model, feedback=given)))
    trained = made if chance.random() < 0.5 else [made[0], *chance.sample(made[1:], len(made) // 2)]
    critic_first = chance.random() < 0.5
    critics = [_critic(chance, made, pools, index) for index in range(chance.choice([0, 0, 1, 2]))] if critic_first else []
    reads = tuple(output.columns[0] for output in trained)
    update = declare("update", Nothing("train", by_group=chance.random() < 0.4), trained, reads=reads, writes=(), model=policy)
    if not critic_first:
        critics = [_critic(chance, made, pools, index) for index in range(chance.choice([0, 1, 1, 2]))]
    for edge in {output.node.feedback for output in made} - {None}:
        edge.close(Output(update, "weights"))  # type: ignore[union-attr]
    unread = [o for o in made if not any(o in node.inputs for node in [update, *(c.node for c in critics), *(m.node for m in made)])]
    return Graph("random", Output(update, "metrics"), *critics, *unread)


def _critic(chance: random.Random, made: list[Output], pools: list[Pool], index: int) -> Output:
    """A model of its own that trains on what some of the nodes wrote, the rollout always; nobody waits for it."""
    model = Model(f"critic {index}", pool=chance.choice(pools))
    inputs = [made[0], *chance.sample(made[1:], min(len(made) - 1, 2))]
    reads = tuple(output.columns[0] for output in inputs)
    return Output(
        declare(f"critic update {index}", Nothing("train", by_group=chance.random() < 0.4), inputs, reads=reads, writes=(), model=model),
        "metrics",
    )
