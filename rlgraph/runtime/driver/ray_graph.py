"""The forward graph of a plan as a Compiled Graph of Ray, for Ray's own tools: an edge for each channel.

A job does not run it: its workers fire in the plan's order over rlgraph's channels, and Ray carries the ticks alone.
"""

from collections.abc import Mapping
from typing import Any

from rlgraph.compiler.plan import Plan
from rlgraph.errors import PlanError
from rlgraph.runtime.worker.spec import writers_of


def ray_dag(plan: Plan, actors: Mapping[str, Any]) -> Any:
    """Bind each node of one step to the actors of its workers. Raises PlanError where a worker has no actor, or no method `fire`."""
    from ray.dag import InputNode, MultiOutputNode

    missing = [worker.name for worker in plan.workers if worker.name not in actors]
    if missing:
        raise PlanError(f"ray_dag(actors): workers {missing} have no actor; give one for each of {[w.name for w in plan.workers]}")
    unfit = [name for name, actor in actors.items() if not hasattr(actor, "fire")]
    if unfit:
        raise PlanError(f"ray_dag(actors): the actors of {unfit} have no method fire(node, step, *batches), which each node is bound to")
    fired: dict[tuple[str, str], Any] = {}  # by node and worker
    read: set[tuple[str, str]] = set()
    with InputNode() as step:
        for name in (node.name for node in plan.nodes):
            sources = [
                (channel.writer, worker)
                for channel in plan.channels
                if channel.kind == "batch" and name in channel.readers
                for worker in writers_of(plan, channel.writer)
            ]
            for worker in plan.node(name).workers:
                fired[name, worker] = actors[worker].fire.bind(name, step, *(fired[source] for source in sources))
            read.update(sources)
    return MultiOutputNode([node for firing, node in fired.items() if firing not in read])
