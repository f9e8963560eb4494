"""Memory while models load: a trainer's ranks read their own shards; other engines read a whole model each, on the host at first."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.plan import PlannedWorker
from rlgraph.compiler.planned_memory import PlannedMemory
from rlgraph.compiler.precision import itemsize_of
from rlgraph.compiler.shared_bases import base_bytes, shared_bases
from rlgraph.costs.adapters import adapter_size, frozen_bytes
from rlgraph.costs.estimates import PIECE_BYTES, default_estimates
from rlgraph.costs.model_shapes import Shapes
from rlgraph.graph.nodes import Graph

Parts = dict[str, int]  # bytes by what they are


def loading(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker], shapes: Shapes) -> Iterator[PlannedMemory]:
    """Estimate the peak of each pool's GPUs and of the fullest host while all workers load their models at once.

    Pools and hosts with a model of unknown shape are left out, since their sum would be too small.
    """
    models = {node.name: node.model for node in graph.nodes if node.model is not None}
    ranks = Counter(worker.model for worker in workers)
    on_hosts: dict[int, Parts] = {}
    on_gpus: dict[str, dict[int, Parts]] = {}
    unknown = set[str | int]()
    shared = {(name, base.host): base for base in shared_bases(graph, cluster, workers) for name in base.models}
    for worker in workers:
        model = models.get(worker.nodes[0]) if worker.model is not None else None
        if model is None or worker.model is None:
            continue
        if model.path not in shapes:
            unknown |= {worker.host, model.pool.name}
            continue
        works = {node.traits.work for node in graph.nodes if node.model is model}
        estimates, shape = model.traits.estimates or default_estimates(works), shapes[model.path]
        adapter = adapter_size(model, shape)
        if adapter is None:
            size = estimates.loading_bytes(shape.parameters, itemsize_of(model, cluster))
        else:
            size = frozen_bytes(model, shape, adapter, itemsize_of(model, cluster)) + adapter.bytes
        whole, host = {f"whole weights of {worker.model}": size}, {f"whole weights of {worker.model}": size}
        if estimates.reads_shards:
            piece = {f"pieces of files of {worker.model}": PIECE_BYTES}
            share = -(-size // ranks[worker.model])
            if estimates.in_each_group:
                traits = model.traits
                own = shape.own_parameters(traits.tensor_parallel, traits.pipeline_parallel, traits.expert_parallel)
                share = size * own // shape.parameters
            whole = {f"weights of {worker.model}": share} | piece
            if base := shared.get((worker.model, worker.host)):
                frozen = base_bytes(model, cluster, shapes)
                whole[f"weights of {worker.model}"] -= frozen
                on_hosts.setdefault(worker.host, {})[base.part] = frozen
            host = piece if worker.gpus else whole
        elif "generate" in works and worker.gpus:  # what a GPU engine reads is mapped from its file
            host = {}
        for gpu in worker.gpus:  # an engine over several holds a shard on each
            held = on_gpus.setdefault(model.pool.name, {}).setdefault(gpu, {})
            _add(held, {what: part // len(worker.gpus) for what, part in whole.items()})
        if host:
            _add(on_hosts.setdefault(worker.host, {}), host)
    for pool, gpus in on_gpus.items():
        if pool not in unknown:
            yield _fullest(pool, gpus.values(), cluster.gpu_memory_bytes)
    if hosts := [parts for host, parts in on_hosts.items() if host not in unknown]:
        yield _fullest(None, hosts, cluster.host_memory_bytes)


def _add(held: Parts, more: Parts) -> None:
    for what, size in more.items():
        held[what] = held.get(what, 0) + size


def _fullest(pool: str | None, each: Iterable[Parts], limit: int | None) -> PlannedMemory:
    parts = max(each, key=lambda held: sum(held.values()))
    total = sum(parts.values())
    return PlannedMemory(pool, tuple(parts.items()), total, total, limit, loading=True)
