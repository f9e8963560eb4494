"""Take measured costs of trainers to other settings of `recompute`: by the operations of a token, and what the host launches."""

from collections.abc import Mapping
from dataclasses import replace

from rlgraph.costs import host_times
from rlgraph.costs.adapters import adapter_size
from rlgraph.costs.costs import Costs
from rlgraph.costs.functions import NodeCost, Setting
from rlgraph.costs.model_shapes import Shapes
from rlgraph.costs.roofline import operations
from rlgraph.graph.nodes import Graph, Node


def with_recompute(graph: Graph, costs: Costs, shapes: Shapes) -> Costs:
    """Scale the seconds of updates that were measured with another `recompute` than the graph's, where that and the shape are known.

    Tokens take longer by the operations that are computed again. A pass takes the host longer as `host_times.launch_s` says; where ranks
    gather shards that was not seen.
    """
    nodes = dict(costs.nodes)
    for node in graph.nodes:
        cost, model = costs.nodes.get(node.name), node.model
        shape = shapes.get(model.path) if model is not None else None
        if model is None or shape is None or costs.lengths is None or not isinstance(cost, NodeCost) or not _otherwise(node, cost):
            continue
        then = replace(model.traits, recompute=cost.measured.passes.recompute)  # type: ignore[union-attr,arg-type]  # as `_otherwise` says
        adapter = adapter_size(model, shape)
        now_and_then = [operations(traits, shape, costs.lengths, adapter, trains=True) for traits in (model.traits, then)]
        launches = [host_times.launch_s(shape, traits) for traits in (model.traits, then)]
        nodes[node.name] = replace(
            cost,
            token_s=cost.token_s * now_and_then[0] / now_and_then[1],
            pass_s=cost.pass_s * launches[0] / launches[1],
        )
    return replace(costs, nodes=nodes)


def _otherwise(node: Node, cost: NodeCost) -> bool:
    if node.traits.work != "train" or node.model is None or cost.measured is None or cost.measured.passes is None:
        return False
    return cost.measured.passes.recompute not in (None, node.model.traits.recompute)


def assumed_recompute(graph: Graph, settings: Mapping[str, Setting], costs: Costs) -> tuple[str, ...]:
    """Name the updates that were measured with another `recompute`."""
    found = []
    for node in graph.nodes:
        cost = costs.nodes.get(node.name)
        if isinstance(cost, NodeCost) and cost.token_s and _otherwise(node, cost) and cost.recomputes_otherwise(settings[node.name]):
            then = cost.measured.passes.recompute  # type: ignore[union-attr]  # as `_otherwise` says
            found.append(
                f"'{node.name}' was measured with recompute={then!r}: its seconds are scaled by the operations of the model's shape"
            )
    return tuple(found)
