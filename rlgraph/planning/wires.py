"""How what a node writes travels to its readers, from where their workers run, and how many versions of weights wait on the way."""

from collections.abc import Mapping, Sequence

from rlgraph.graph import Feedback, Graph, Node
from rlgraph.planning.plan import PlannedWorker, Transport


def wire(crew: Sequence[PlannedWorker], writer: Node, *readers: Node) -> Transport:
    """Return shared memory where all workers of the nodes are on one host, else TCP."""
    return "shm" if len({worker.host for worker in _of(crew, writer, *readers)}) == 1 else "tcp"


def batch_wires(graph: Graph, crew: Sequence[PlannedWorker]) -> Mapping[Node, Mapping[Transport, Sequence[Node]]]:
    """Group the readers of each node by how its batch travels to them: a channel each, in the order in which the writer puts."""
    home = {name: worker.model or worker.name for worker in crew for name in worker.nodes}
    found: dict[Node, dict[Transport, list[Node]]] = {}
    for writer in graph.nodes:
        found[writer] = {}
        for reader in graph.forward.successors(writer):
            transport: Transport = "local" if home[reader.name] == home[writer.name] else wire(crew, writer, reader)
            found[writer].setdefault(transport, []).append(reader)
    return found


def weights_wire(crew: Sequence[PlannedWorker], writer: Node, readers: Sequence[Node], *, on_gpus: bool) -> Transport:
    """Return how weights travel: of GPUs, by memory that readers of the same host map, and by NCCL between hosts."""
    found = wire(crew, writer, *readers)
    if on_gpus and found == "shm":
        return "peer"
    return "nccl" if found == "tcp" and all(worker.gpus for worker in _of(crew, writer, *readers)) else found


def staged_versions(feedback: Feedback, *, on_gpus: bool) -> int:
    """Return how many versions of the weights are staged at once, at most.

    When the last step has been fired, `depth` versions and the newest are unread, and none may wait for room. On a GPU,
    where memory is scarce, a second buffer takes one of them.
    """
    return max(feedback.depth + 2 - feedback.buffers, 1) if on_gpus else feedback.depth + 1


def _of(crew: Sequence[PlannedWorker], *nodes: Node) -> list[PlannedWorker]:
    names = {node.name for node in nodes}
    return [worker for worker in crew if names & set(worker.nodes)]
