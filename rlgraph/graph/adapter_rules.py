"""The rules of feedback edges that carry an adapter: each reader merges it into the same base."""

from typing import TYPE_CHECKING

from rlgraph.errors import GraphError

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Graph


def check_adapters(graph: "Graph") -> None:
    """Refuse readers of an adapter that do not generate, whose engine merges none, that read another folder, or that span devices."""
    for feedback in graph.feedbacks:
        source = feedback.source.node.model if feedback.source is not None else None
        if source is None or source.traits.adapter is None:
            continue
        for node in graph.nodes:
            if node.feedback is not feedback or node.model is None:
                continue
            where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}', which carries an adapter"
            if node.traits.work != "generate":
                raise GraphError(f"{where}; only a generator merges one: use policy.log_probs(rollout), or leave out adapter=")
            if not node.model.traits.merges_adapters:
                raise GraphError(
                    f"{where}, but its engine is not tested with adapters: use engine='transformers' or 'vllm', or leave out adapter="
                )
            if node.model.path != source.path:
                raise GraphError(
                    f"{where} of '{source.path}', and its own model is '{node.model.path}'; both start from one folder, since only the "
                    "adapter is sent: give the same path"
                )
            if node.model.group > 1:
                raise GraphError(
                    f"{where}, but its engine spans {node.model.group} devices, which share weights that arrive whole: use "
                    "tensor_parallel=1, or leave out adapter="
                )
