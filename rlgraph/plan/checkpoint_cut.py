"""The cut of a checkpoint through a plan: how far each worker is ahead of the trained weights, and which batches are open.

A checkpoint after `step` steps cuts every worker at a firing that the plan defines, whatever the clock says. Workers that train have fired
`step` times; a rollout of depth d has fired d more times, with versions that exist by then. Batches written before the cut and
read after it are open, and are saved with it. So no worker waits for another, no old version is kept, and rollout `step + d`
resumes with version `step`, as in a run without a checkpoint (a consistent cut: Chandy and Lamport, 1985).
"""

from collections.abc import Mapping

from rlgraph.errors import PlanError
from rlgraph.plan.plan import Plan, PlannedChannel, PlannedWorker


def lookaheads(plan: Plan) -> dict[str, int]:
    """Count for each worker, by name, by how many firings a checkpoint cuts it ahead of the trained weights.

    Raises PlanError for a rollout that depends on weights of its own step: its lookahead would need old versions.
    """
    depth = {reader: loop.depth for loop in plan.loops for reader in loop.readers}
    trained = {node.model for node in plan.nodes if node.work == "train"}
    most = max(depth.values(), default=0)
    home = {name: worker.model or worker.name for worker in plan.workers for name in worker.nodes}
    found = dict.fromkeys(home.values(), most)
    for node in plan.nodes:
        bound = 0 if node.model in trained else depth.get(node.name, most)
        found[home[node.name]] = min(found[home[node.name]], bound)
    settled = False
    while not settled:  # a reader is never ahead of what it reads
        settled = True
        for channel in plan.channels:
            for reader in channel.readers:
                bound = found[home[channel.writer]] - -channel.credits // channel.chunks
                if found[home[reader]] > bound:
                    found[home[reader]], settled = bound, False
    for name, wanted in depth.items():
        if found[home[name]] < wanted:
            raise PlanError(
                f"node '{name}' runs {wanted} steps ahead of the weights it gets, but reads what is made from weights of its own step; "
                "such a graph cannot be cut for a checkpoint: launch it without checkpoint="
            )
    return {worker.name: found[worker.model or worker.name] for worker in plan.workers}


def open_nodes(plan: Plan, lookahead: Mapping[str, int], worker: PlannedWorker) -> tuple[str, ...]:
    """List the nodes of a worker whose batches are open at a cut, because a reader is less far ahead."""
    return tuple(
        dict.fromkeys(
            channel.writer
            for channel in plan.channels
            if channel.kind != "order" and channel.writer in worker.nodes
            for reader in channel.readers
            if _read(plan, lookahead, channel, reader) < lookahead[worker.name]
        )
    )


def count_steps_before_cut(plan: Plan, lookahead: Mapping[str, int], worker: PlannedWorker) -> int:
    """Count the steps before the cut whose batches of this worker are still unread by nodes that get columns of earlier steps."""
    channels = [channel for channel in plan.channels if channel.kind == "earlier" and channel.writer in worker.nodes]
    return max((-_read(plan, lookahead, channel, reader) for channel in channels for reader in channel.readers), default=0)


def _read(plan: Plan, lookahead: Mapping[str, int], channel: PlannedChannel, reader: str) -> int:
    """Count the batches of the writer that the reader has read at a cut, from the cut's step on; negative for batches of earlier steps."""
    return min(lookahead[home] for home in plan.node(reader).workers) - channel.credits // channel.chunks
