"""What a graph may be by its rules and still teaches nothing: said when it is compiled, and the plan is made all the same."""

from rlgraph.graph.nodes import Graph, Node


def no_signal_warnings(graph: Graph) -> tuple[str, ...]:
    """Say which advantages compare responses that cannot differ: groups of one, or greedy ones.

    A group of one keeps its reward as it is, or 0; the responses of a greedy rollout to one prompt are all the same.
    """
    found = []
    for node in graph.nodes:
        name, rollout = node.traits.compares, _rollout(node)
        if not name or rollout is None:
            continue
        sampling = rollout.traits.sampling
        if rollout.traits.group_size == 1:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples one to a prompt "
                "(group_size=1), which leaves no baseline; sample several, or use an estimator without groups"
            )
        elif sampling is not None and sampling.temperature == 0:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples at temperature=0, so that "
                "all of a group are the same and every advantage is 0; use a temperature above 0"
            )
    return tuple(found)


def _rollout(node: Node) -> Node | None:
    """The rollout whose groups a node compares."""
    return node.source_of("group_ids") if "group_ids" in node.reads else None
