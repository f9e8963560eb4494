"""Memory while models load: each rank reads a whole model in float32, on its host and then on its GPU, before the ranks shard it."""

from collections.abc import Iterable, Iterator, Sequence

from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.plan import PlannedMemory, PlannedWorker
from rlgraph.compiler.precision import itemsize_of
from rlgraph.costs.estimates import default_estimates
from rlgraph.costs.model_shapes import Shapes
from rlgraph.graph.nodes import Graph


def loading(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker], shapes: Shapes) -> Iterator[PlannedMemory]:
    """Estimate the peak of each pool's GPUs and of the fullest host while all workers load their models at once.

    Pools and hosts with a model of unknown shape are left out, since their sum would be too small.
    """
    models = {node.name: node.model for node in graph.nodes if node.model is not None}
    on_hosts: dict[int, dict[str, int]] = {}
    on_gpus: dict[str, dict[int, dict[str, int]]] = {}
    unknown = set[str | int]()
    for worker in workers:
        model = models.get(worker.nodes[0]) if worker.model is not None else None
        if model is None or worker.model is None:
            continue
        if model.path not in shapes:
            unknown |= {worker.host, model.pool.name}
            continue
        works = {node.traits.work for node in graph.nodes if node.model is model}
        estimates = model.traits.estimates or default_estimates(works)
        size = estimates.loading_bytes(shapes[model.path].parameters, itemsize_of(model, cluster))
        for gpu in worker.gpus:  # an engine over several holds a shard on each
            held = on_gpus.setdefault(model.pool.name, {}).setdefault(gpu, {})
            held[worker.model] = held.get(worker.model, 0) + size // len(worker.gpus)
        if "generate" not in works or not worker.gpus:  # what a GPU engine reads is mapped from its file
            held = on_hosts.setdefault(worker.host, {})
            held[worker.model] = held.get(worker.model, 0) + size
    for pool, gpus in on_gpus.items():
        if pool not in unknown:
            yield _fullest(pool, gpus.values(), cluster.gpu_memory_bytes)
    if hosts := [parts for host, parts in on_hosts.items() if host not in unknown]:
        yield _fullest(None, hosts, cluster.host_memory_bytes)


def _fullest(pool: str | None, each: Iterable[dict[str, int]], limit: int | None) -> PlannedMemory:
    parts = max(each, key=lambda held: sum(held.values()))
    total, whole = sum(parts.values()), tuple((f"whole weights of {model}", size) for model, size in parts.items())
    return PlannedMemory(pool, whole, total, total, limit, loading=True)
