"""Continuous decoding: whether the next batch and new weights may join a batch that still decodes."""

from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Feedback
from rlgraph.nodes.prompts import Prompts
from rlgraph.values.sampling import BatchAdmission, Running


def admission_rule(node: str, weights: Feedback | None, interrupt: Running | None, continuous: bool, source: object) -> BatchAdmission:
    """Make the rule. Raises GraphError for a setting that has no effect, or that cannot keep the staleness bound."""
    if interrupt is not None and weights is None:
        raise GraphError(f"node '{node}' has interrupt={interrupt!r} but no weights that change; pass a feedback edge, or leave it out")
    if interrupt is not None and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has interrupt={interrupt!r}, but at depth=0 of feedback '{weights.name}' no version is published while "
            "responses decode: use depth>=1, or leave it out"
        )
    if continuous and weights is not None and weights.depth == 0:
        raise GraphError(
            f"node '{node}' has continuous=True at depth=0 of feedback '{weights.name}', where the next batch may only start on weights "
            "trained on this one: use depth>=1, or leave it out"
        )
    if continuous and source is not None and not isinstance(source, Prompts):
        raise GraphError(
            f"node '{node}' has continuous=True, so it looks up the next prompts while it decodes, which only rlgraph.prompts can tell, "
            "and of a data set with a length: pass its output, read a stream into rg.data.rows(list(...)), or leave continuous out"
        )
    return BatchAdmission(interrupt, continuous, weights.depth if weights is not None else None)
