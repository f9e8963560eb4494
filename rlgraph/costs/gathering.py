"""What a pass of sharded ranks costs a GPU beside its products: shards are gathered, and gradients reduced to shards.

FSDP2 gathers the parameters of a unit in the dtype of passes, forward and again backward (layers that compute again do so with those
gathered for the backward pass), and reduces gradients in float32. Beside what passes the link each collective copies: shards are cast and
put side by side, gathered ones are taken apart, gradients are cast and put in the order of ranks, and added up.

Nothing of it counts as hidden. Most of it runs beside products, but takes memory traffic and processors from them. In a profile of
4B on two H200s ranks waited for collectives for 4.5 % of an update only, and the update took 0.41 s longer than half of one rank's. This
counts 0.37 s.
"""

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.costs.adapters import adapter_size
from rlgraph.costs.costs import Costs, epochs_of
from rlgraph.costs.estimates import DECODING, Device, default_estimates
from rlgraph.costs.functions import NodeCost, Setting, Shards
from rlgraph.costs.model_shapes import ModelShape, Shapes
from rlgraph.costs.sharing import ITEMSIZE, LINKED
from rlgraph.costs.update_memory import GRADIENT, MASTER
from rlgraph.graph.nodes import Graph, Node

# Bytes of memory traffic for each parameter, read and written. Of all that is gathered: taken apart.
APART = 2 * ITEMSIZE
# Of a rank's own shard at a gather: cast to the dtype of passes, then copied to its place among the others.
PLACED = MASTER + ITEMSIZE + 2 * ITEMSIZE
# Of all gradients: read in the dtype of passes, and written in float32 in the order of ranks. Of a rank's own: added to those of passes.
ORDERED, ADDED = ITEMSIZE + GRADIENT, 3 * GRADIENT


def shards_of(node: Node, shape: ModelShape, device: Device, *, idle_alone: bool = False) -> tuple[Shards, ...]:
    """Estimate the seconds of a node's passes in which ranks gather and reduce shards: those of experts, and those of the rest.

    Ranks that share matrices or experts have no shards of each other's. With `idle_alone` only the experts that a token does not take
    count. Nothing where the engine `gathers_shards` of none.
    """
    model = node.model
    if model is None or not gathers(node):
        return ()
    tensor, expert = model.traits.tensor_parallel, model.traits.expert_parallel
    experts, rest = shape.expert_parameters, shape.parameters - shape.expert_parameters
    if idle_alone:
        experts, rest = experts * (shape.experts - shape.experts_used) // shape.experts, 0
    adapter = adapter_size(model, shape)
    learnt = 1.0 if adapter is None else adapter.parameters / shape.parameters
    parts = ((rest / tensor, tensor), (experts / expert, expert))  # ranks that share matrices cut no expert
    return tuple(_shards(node, parameters, learnt, device, apart) for parameters, apart in parts if parameters)


def gathers(node: Node) -> bool:
    """Whether ranks of a node's model gather its shards in each pass."""
    estimates = node.model.traits.estimates if node.model is not None else None
    return (estimates or default_estimates({node.traits.work})).gathers_shards


def with_shards(graph: Graph, costs: Costs, device: Device | None, shapes: Shapes) -> Costs:
    """Add what gathering takes to costs that a run showed, so that they hold for other numbers of ranks that share the model."""
    nodes = dict(costs.nodes)
    for node in graph.nodes:
        cost, shape = costs.nodes.get(node.name), shapes.get(node.model.path) if node.model is not None else None
        if device is not None and shape is not None and isinstance(cost, NodeCost) and cost.token_s and cost.measured is not None:
            nodes[node.name] = replace(cost, shards=shards_of(node, shape, device))
    return replace(costs, nodes=nodes)


def assumed_shards(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> tuple[str, ...]:
    """Name the nodes whose ranks share shards, and were measured in another number."""
    found = []
    for node in graph.nodes:
        cost = costs.nodes.get(node.name)
        if isinstance(cost, NodeCost) and cost.measured is not None and cost.gathering_s(settings[node.name]):
            ranks, measured = settings[node.name].engines, cost.measured.engines
            found.append(
                f"'{node.name}' was measured on {measured} {'rank' if measured == 1 else 'ranks'} and is predicted on {ranks}: gathering "
                "shards and reducing gradients are taken from the model's shape, the memory and the link of a GPU"
            )
    return tuple(found)


def _shards(node: Node, parameters: float, learnt: float, device: Device, apart: int) -> Shards:
    """Sum the gathers of a pass forwards and backwards and the reduction, or the gather of a pass that only scores."""
    trains = node.traits.work == "train"
    gathers = epochs_of(node) * ((2 if trains else 1) + node.traits.scored)
    reduces = epochs_of(node) * learnt * trains
    read, link = device.bandwidth * DECODING / parameters, device.peer_link * LINKED / parameters
    return Shards(
        whole_s=(gathers * APART + reduces * ORDERED) / read,
        own_s=(gathers * PLACED + reduces * ADDED) / read,
        sent_s=(gathers * ITEMSIZE + reduces * GRADIENT) / link,
        apart=apart,
    )
