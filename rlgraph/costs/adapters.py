"""The size of an adapter, by the shape of its model."""

from dataclasses import dataclass
from typing import Literal

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.graph.nodes import Model

FLOAT32 = 4
NF4 = 1 / 2 + 4 / 64  # bytes of a number in 4 bits, with its part of the scale of 64
ALL_LINEAR = "all-linear"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a dense layer


@dataclass(frozen=True)
class AdapterSize:
    """The numbers of an adapter: its own `parameters`, and those of the `matrices` of the model that it changes.

    >>> shape = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocab=10)
    >>> AdapterSize.of(shape, 4, ("q_proj", "down_proj"))
    AdapterSize(parameters=320, matrices=384)
    """

    parameters: int
    matrices: int

    @property
    def bytes(self) -> int:
        """The bytes of the adapter as it is trained and published."""
        return self.parameters * FLOAT32

    @classmethod
    def of(cls, shape: ModelShape, rank: int, targets: Literal["all-linear"] | tuple[str, ...]) -> "AdapterSize":
        """Count the numbers of an adapter of this rank; a projection that is no known one counts nothing."""
        found = [size for name, size in projections(shape).items() if targets == ALL_LINEAR or name in targets]
        return cls(shape.layers * sum(rank * (into + out) for into, out in found), shape.layers * sum(into * out for into, out in found))


def projections(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """The projections of a dense layer: numbers that go in and come out."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    into_and_out = (
        (shape.hidden, queries),
        (shape.hidden, keys),
        (shape.hidden, keys),
        (queries, shape.hidden),
        (shape.hidden, shape.intermediate),
        (shape.hidden, shape.intermediate),
        (shape.intermediate, shape.hidden),
    )
    return dict(zip(PROJECTIONS, into_and_out, strict=True))


def frozen_bytes(model: Model, shape: ModelShape, size: AdapterSize, itemsize: int) -> int:
    """Count the bytes of the model beside an adapter: in the dtype of passes, or in 4 bits where adapters change it."""
    in_four_bits = size.matrices if model.traits.adapter is not None and model.traits.adapter.base is not None else 0
    return int((shape.parameters - in_four_bits) * itemsize + in_four_bits * NF4)


def adapter_size(model: Model | None, shape: ModelShape | None) -> AdapterSize | None:
    """Count the numbers of a model's adapter; None for a model without one, or of unknown shape."""
    adapter = model.traits.adapter if model is not None else None
    return None if adapter is None or shape is None else AdapterSize.of(shape, adapter.rank, adapter.targets)
