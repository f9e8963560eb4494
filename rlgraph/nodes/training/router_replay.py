"""A policy that computes with the experts that the engine chose: what its settings may be, and the columns that its nodes read."""

from collections.abc import Sequence
from typing import Any

from rlgraph.errors import GraphError
from rlgraph.graph.nodes import Output
from rlgraph.nodes.base import carried
from rlgraph.nodes.rollout.routes import ROUTES, check_routes


def check_replay(model: Any) -> None:
    """Raise GraphError for settings with which routers cannot be told what to choose."""
    if not model.router_replay:
        return
    given = {"compiled": (model.compiled, False), "tensor_parallel": (model.tensor_parallel, 1)}
    given |= {"context_parallel": (model.context_parallel, 1)}
    for name, (value, plain) in given.items():
        if value != plain:
            raise GraphError(
                f"{type(model).__name__}(router_replay=True, {name}={value!r}): routers of layers that are compiled, or that ranks share, "
                f"are not told what to choose; leave out {name}, or router_replay"
            )


def check_replay_folder(model: Any) -> None:
    """Raise GraphError for a model without experts."""
    if model.router_replay:
        check_routes(f"{type(model).__name__}(router_replay=True)", model.path)


def routes_read(name: str, model: Any, inputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns of routes that a node of a policy reads. Raises GraphError for a batch without them, which nothing could be replayed of.

    Batches of examples have none: of a policy that replays, only a rollout's batch is checked.
    """
    if not model.router_replay:
        return ()
    if not set(ROUTES) <= set(carried(inputs)):
        sampled = next((o.node.name for o in inputs if isinstance(o, Output) and o.node.traits.work == "generate"), None)
        fix = f"make the generator of '{sampled}' with routes=True" if sampled else "pass it a rollout of rg.Generator(…, routes=True)"
        raise GraphError(
            f"node '{name}' is of a policy with router_replay=True, and its inputs do not carry the experts that the engine chose; {fix}, "
            "or leave out router_replay"
        )
    return ROUTES
