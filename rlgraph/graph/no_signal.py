"""Find graphs that keep the rules and still give no learning signal. The compiler warns of them, and makes the plan."""

from rlgraph.graph.nodes import Graph, Node


def no_signal_warnings(graph: Graph) -> tuple[str, ...]:
    """Warn of advantages that compare responses which cannot differ: groups of one, or greedy responses.

    A group of one has its reward, or 0, as its advantage; all responses of a greedy rollout to one prompt are the same.
    """
    found = []
    for node in graph.nodes:
        name, rollout = node.traits.compares, _rollout(node)
        if not name or rollout is None:
            continue
        sampling = rollout.traits.sampling
        if rollout.traits.group_size == 1:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples one per prompt "
                "(group_size=1), which leaves no baseline; sample several, or use an estimator without groups"
            )
        elif sampling is not None and sampling.temperature == 0:
            found.append(
                f"node '{node.name}' compares the responses of a group by {name}, but '{rollout.name}' samples at temperature=0, so that "
                "all responses of a group are the same and every advantage is 0; use a temperature above 0"
            )
    return tuple(found)


def _rollout(node: Node) -> Node | None:
    """The rollout whose groups a node compares, if there is one."""
    return node.source_of("group_ids") if "group_ids" in node.reads else None
