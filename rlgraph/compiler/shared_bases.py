"""The frozen bases that trainers of adapters hold together: one copy on a host for all models of one folder that train there on cores."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlgraph.compiler.cluster import Cluster
from rlgraph.compiler.plan import PlannedWorker
from rlgraph.compiler.precision import itemsize_of, precision_of
from rlgraph.costs.adapters import adapter_size, frozen_bytes
from rlgraph.costs.model_shapes import Shapes
from rlgraph.graph.nodes import Graph, Model


@dataclass(frozen=True)
class PlannedBase:
    """The base of the model folder `path` in `dtype`, which the workers of `models` on a host hold together, in memory once."""

    path: str
    dtype: str
    host: int
    models: tuple[str, ...]

    @property
    def part(self) -> str:
        """Its name among the parts of the host's memory.

        >>> PlannedBase("tiny", "float32", 0, ("policy", "critic")).part
        'base of policy, critic'
        """
        return f"base of {', '.join(self.models)}"


def shared_bases(graph: Graph, cluster: Cluster, workers: Sequence[PlannedWorker]) -> tuple[PlannedBase, ...]:
    """Find the bases that at least two models of a host hold together.

    These train adapters of one folder in one dtype, each by one process on cores, with a trainer that `shares_base`. A base of 4 bits is
    a worker's own.
    """
    models = {node.name: node.model for node in graph.nodes}
    found: dict[tuple[str, str, int], list[str]] = {}
    for worker in workers:
        model = models.get(worker.nodes[0])
        if model is None or worker.model is None or worker.gpus or worker.world > 1:
            continue
        adapter, precision = model.traits.adapter, precision_of(model, cluster)
        if model.traits.shares_base and adapter is not None and adapter.base is None and precision is not None:
            found.setdefault((model.path, precision.dtype, worker.host), []).append(worker.model)
    return tuple(PlannedBase(*key, tuple(names)) for key, names in found.items() if len(names) > 1)


def base_bytes(model: Model, cluster: Cluster, shapes: Shapes) -> int:
    """Count the bytes of the base of a model that trains an adapter; 0 for one of unknown shape."""
    shape = shapes.get(model.path)
    size = adapter_size(model, shape)
    return 0 if shape is None or size is None else frozen_bytes(model, shape, size, itemsize_of(model, cluster))
