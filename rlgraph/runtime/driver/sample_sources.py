"""Find which node writes which columns of a rollout's responses, so that their rows can be recorded where they are written."""

from typing import Literal, TypeAlias

from rlgraph.graph.nodes import Graph, Node
from rlgraph.runtime.messages import SampleSource

Kind: TypeAlias = Literal["training", "evaluation"]


def sample_sources(graph: Graph) -> list[SampleSource]:
    """List the nodes whose columns belong to the responses of a rollout, or to the answers of an evaluation, upstream first."""
    rollouts = [node for node in graph.nodes if node.traits.work == "generate" and "response_mask" in node.writes]
    found = []
    for node in graph.nodes:
        for rollout in (rollout for rollout in rollouts if node.writes and (rollout.due is None) == (node.due is None)):
            if rollout in _rollouts(node, rollouts) and rollout.rows % node.rows == 0:
                kind: Kind = "training" if rollout.due is None else "evaluation"
                found.append(SampleSource(node.name, rollout.name, rollout.rows, rollout.rows // node.rows, node.writes, kind))
    return found


def _rollouts(node: Node, rollouts: list[Node]) -> list[Node]:
    """The rollouts whose responses a node's rows are about: those it reads responses of, or all that a source of prompts feeds."""
    if node in rollouts:
        return [node]
    above = [rollout for rollout in rollouts if node.needs(rollout)]
    if not above:
        return [rollout for rollout in rollouts if any(output.node is node for output in rollout.inputs)]
    read = [node.source_of(column) for column in ("responses", "response_mask") if column in node.reads]
    own = [rollout for rollout in above if rollout in read]
    return own or (above if len(above) == 1 else [])
