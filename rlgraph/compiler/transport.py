"""Choose the transport from each node to its readers by where their workers run, and the number of weight versions that are staged."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlgraph.channels.factory import TRANSPORTS, Reach, first_choice
from rlgraph.compiler.plan import Plan, PlannedChannel, PlannedLoop, PlannedWorker
from rlgraph.errors import PlanError
from rlgraph.graph.nodes import Feedback, Graph, Node


def host_transport(workers: Sequence[PlannedWorker], writer: Node, *readers: Node) -> str:
    """Choose the transport for columns in host memory: one between hosts only if the nodes' workers are on several hosts."""
    return first_choice(_reach(workers, writer, *readers))


def _reach(workers: Sequence[PlannedWorker], *nodes: Node) -> Reach:
    return "host" if len({worker.host for worker in _of(workers, *nodes)}) == 1 else "hosts"


def batch_transports(graph: Graph, workers: Sequence[PlannedWorker]) -> Mapping[Node, Mapping[str, Sequence[Node]]]:
    """Group the readers of each node by transport: one channel for each, in the order in which the writer puts."""
    home = {name: worker.model or worker.name for worker in workers for name in worker.nodes}
    found: dict[Node, dict[str, list[Node]]] = {}
    for writer in graph.nodes:
        found[writer] = {}
        for reader in graph.forward.successors(writer):
            transport = first_choice("process") if home[reader.name] == home[writer.name] else host_transport(workers, writer, reader)
            found[writer].setdefault(transport, []).append(reader)
    return found


def weights_transport(workers: Sequence[PlannedWorker], writer: Node, readers: Sequence[Node], *, on_gpus: bool) -> str:
    """Choose the transport for weights: GPU memory if the writer has GPUs, and between hosts only if all readers have them too."""
    reach = _reach(workers, writer, *readers)
    all_on_gpus = reach == "host" or all(worker.gpus for worker in _of(workers, writer, *readers))
    return first_choice(reach, "gpu" if on_gpus and all_on_gpus else "host")


def with_transport(plan: Plan, asked: str) -> Plan:
    """Send all that crosses processes of one host by the transport that a launch asks for.

    Raises PlanError for an unknown transport, or one that this plan cannot use.
    """
    default = first_choice("host")
    offered = [name for name, found in TRANSPORTS.items() if (found.reach, found.writer_keeps, found.carrier) == ("host", "host", None)]
    if asked not in offered:
        raise PlanError(f"transport='{asked}': a launch chooses one of {offered}, between processes of one host; leave it out elsewhere")
    ends: tuple[PlannedChannel | PlannedLoop, ...] = (*plan.channels, *plan.loops)
    beyond = [end for end in ends if TRANSPORTS[end.transport].reach == "hosts"]
    on_gpus = [end for end in ends if TRANSPORTS[end.transport].writer_keeps == "gpu"]
    if asked != default and beyond:
        raise PlanError(
            f"transport='{asked}' and {plan.cluster.hosts} hosts: '{beyond[0].name}' goes from host to host, where a channel of "
            f"transport '{asked}' can hang; compile for one host, or leave transport out"
        )
    if asked != default and on_gpus:
        raise PlanError(
            f"transport='{asked}': '{on_gpus[0].name}' goes from GPU to GPU by transport '{on_gpus[0].transport}', and '{asked}' would "
            "take it through the host's memory; leave transport out"
        )
    if not any(end.transport == default for end in ends):
        raise PlanError(f"transport='{asked}' changes nothing: in this plan no channel leaves its process; leave transport out")

    return replace(
        plan,
        channels=tuple(replace(channel, transport=asked) if channel.transport == default else channel for channel in plan.channels),
        loops=tuple(replace(loop, transport=asked) if loop.transport == default else loop for loop in plan.loops),
    )


def lies_in_ray(plan: Plan) -> bool:
    """Tell whether messages of the plan lie in Ray's object store."""
    taken = {channel.transport for channel in plan.channels} | {loop.transport for loop in plan.loops}
    return any(TRANSPORTS[name].needs_ray for name in taken)


def staged_versions(feedback: Feedback, *, on_gpus: bool) -> int:
    """Count the weight versions that are staged at once, at most.

    After the last step `depth` versions and the newest are unread, and none may wait for room. On a GPU, where memory is
    scarce, a second buffer of the reader holds one of them.
    """
    return max(feedback.depth + 2 - feedback.buffers, 1) if on_gpus else feedback.depth + 1


def _of(workers: Sequence[PlannedWorker], *nodes: Node) -> list[PlannedWorker]:
    names = {node.name for node in nodes}
    return [worker for worker in workers if names & set(worker.nodes)]
