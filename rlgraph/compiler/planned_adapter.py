"""The adapter that a feedback edge carries instead of a model's weights, as the plan names it."""

from dataclasses import dataclass

from rlgraph.costs.adapters import ALL_LINEAR, adapter_size
from rlgraph.costs.model_shapes import Shapes
from rlgraph.graph.nodes import Model


@dataclass(frozen=True)
class PlannedAdapter:
    """An adapter of this `rank`; a reader adds its product, times `scale`, to the base that it keeps, rounded as `base` says.

    It has these `targets`, and begins as it is in `folder`, or as nothing. `bytes` of a version, and the `matrices` that it changes as
    a count of their numbers, where known.
    """

    rank: int
    scale: float
    bytes: int | None
    base: str | None = None
    targets: str | tuple[str, ...] = ALL_LINEAR
    folder: str | None = None
    matrices: int | None = None

    @classmethod
    def of(cls, model: Model | None, shapes: Shapes) -> "PlannedAdapter | None":
        """Plan what a model publishes; None for whole weights."""
        adapter = model.traits.adapter if model is not None else None
        if model is None or adapter is None:
            return None
        size = adapter_size(model, shapes.get(model.path))
        own, changed = (None, None) if size is None else (size.bytes, size.matrices)
        return cls(adapter.rank, adapter.scale, own, adapter.base, adapter.targets, adapter.folder, changed)

    def merging_bytes(self, itemsize: int, versions: int) -> int | None:
        """The bytes that a reader keeps beside its weights: the base of the matrices that change, and `versions`; None if not known."""
        return None if self.bytes is None or self.matrices is None else itemsize * self.matrices + versions * self.bytes
