"""The size of an adapter, by the shape of its model."""

from dataclasses import dataclass
from typing import Literal

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.graph.nodes import Model

FLOAT32 = 4
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterSize:
    """The numbers of an adapter: its own `parameters`, and those of the `matrices` of the model that it changes.

    >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> AdapterSize.of(shape, 4, ("q_proj", "down_proj"))
    AdapterSize(parameters=320, matrices=384)
    """

    parameters: int
    matrices: int

    @classmethod
    def of(cls, shape: ModelShape, rank: int, targets: Literal["all-linear"] | tuple[str, ...]) -> "AdapterSize":
        """Count the numbers of an adapter of this rank; a projection that is no known one counts nothing."""
        found = [size for name, size in projections(shape).items() if targets == ALL_LINEAR or name in targets]
        return cls(shape.layers * sum(rank * (into + out) for into, out in found), shape.layers * sum(into * out for into, out in found))


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The projections of a dense layer: numbers that go in and come out."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (shape.hidden, queries),
        "k_proj": (shape.hidden, keys),
        "v_proj": (shape.hidden, keys),
        "o_proj": (queries, shape.hidden),
        "gate_proj": (shape.hidden, shape.intermediate),
        "up_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }


def adapter_size(model: Model | None, shape: ModelShape | None) -> AdapterSize | None:
    """Count the numbers of a model's adapter; None for a model without one, or of unknown shape."""
    adapter = model.traits.adapter if model is not None else None
    return None if adapter is None or shape is None else AdapterSize.of(shape, adapter.rank, adapter.targets)
