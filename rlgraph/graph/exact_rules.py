"""The rules of graphs whose policy computes the log-probs of its engine to the bit, `Policy(exact=True)`."""

from typing import TYPE_CHECKING

from rlgraph.errors import GraphError

if TYPE_CHECKING:
    from rlgraph.graph.nodes import Feedback, Graph, Model, Node

EXACT_DTYPES = {"float32": "cores", "bfloat16": "GPUs"}  # what a policy may compute in, and where


def check_exact(graph: "Graph") -> None:
    """Refuse what is not proven to be exact: other engines, other folders, dtypes but float32, a part of the vocabulary, depth."""
    followed = {feedback.source.node.model for feedback in graph.feedbacks if feedback.source is not None}
    for node in graph.nodes:
        if node.model is not None and node.model.traits.exact and node.model not in followed:
            raise GraphError(
                f"graph '{graph.name}': the model of node '{node.name}' has exact=True, and no generator follows its weights; close a "
                "feedback edge with them, or leave out exact"
            )
    for feedback in graph.feedbacks:
        source = feedback.source.node.model if feedback.source is not None else None
        if source is None or not source.traits.exact:
            continue
        for node in graph.nodes:
            if node.feedback is feedback and node.model is not None:
                _check_reader(graph, feedback, source, node, node.model)


def exact_models(graph: "Graph") -> "set[Model]":
    """The exact policies of a graph, and the generators that follow them."""
    found = {node.model for node in graph.nodes if node.model is not None and node.model.traits.exact}
    for node in graph.nodes:
        source = node.feedback.source if node.feedback is not None else None
        if node.model is not None and source is not None and source.node.model in found:
            found.add(node.model)
    return found


def _check_reader(graph: "Graph", feedback: "Feedback", source: "Model", node: "Node", model: "Model") -> None:
    where = f"graph '{graph.name}': node '{node.name}' follows feedback '{feedback.name}' of a policy with exact=True"
    sampling = node.traits.sampling
    if feedback.depth > 0:
        raise GraphError(
            f"{where}, at depth={feedback.depth}: responses of older weights have other log-probs; use depth=0, or leave out exact"
        )
    if not model.traits.samples_exactly:
        raise GraphError(f"{where}, but its engine has other kernels than the trainer; use engine='vllm', or leave out exact")
    if model.path != source.path:
        raise GraphError(f"{where} of '{source.path}', and its own model is '{model.path}'; give the same path, or leave out exact")
    if model.traits.dtype != source.traits.dtype:
        raise GraphError(
            f"{where} and dtype='{source.traits.dtype}', and has dtype='{model.traits.dtype}'; use "
            f"rg.Generator(…, dtype='{source.traits.dtype}')"
        )
    if model.traits.tensor_parallel > 1 or model.group > 1:
        raise GraphError(f"{where}, and an engine spans {model.group} GPUs, which add up in another order; use tensor_parallel=1")
    own = [name for name, given in (("weights_dtype", model.traits.weights_dtype), ("drafts", model.traits.drafts)) if given is not None]
    if own:
        raise GraphError(f"{where}, and its engine has {own[0]}=, which computes in another way; leave out {own[0]}, or exact")
    if sampling is not None and not sampling.whole:
        raise GraphError(
            f"{where}, and samples with top_p={sampling.top_p}, top_k={sampling.top_k} and temperature={sampling.temperature}: the "
            "trainer's log-probs are those of all tokens; use top_p=1, top_k=0 and a temperature above 0"
        )
