"""The place in which an engine is loaded: the worker that will run it, its device and its precision."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.plan.cluster import AUTO

if TYPE_CHECKING:
    from rlgraph.engines.lora.shared_base import SharedBase


class Place(Protocol):
    """The place of an engine: its rank among the workers of its model, its device and cores, the number of weight versions on
    that device, what merging adapters takes of it instead, whether a trainer computes its log-probs to the bit, and the frozen
    weights that it holds together with other models, if there are such."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def rendezvous(self) -> str: ...

    @property
    def listen_fd(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def shared(self) -> bool: ...

    @property
    def copies(self) -> int: ...

    @property
    def merging_bytes(self) -> int | None: ...

    @property
    def sequences(self) -> int: ...

    @property
    def exact(self) -> bool: ...

    @property
    def shared_base(self) -> "SharedBase | None": ...

    @property
    def report_progress(self) -> Callable[[int, int, str], None]: ...


def score_engine(model: Any, place: Place) -> Any:
    """Load a `RewardModel`; its ranks meet at `place.rendezvous`."""
    import torch

    from rlgraph.engines.fsdp.sharding import add_up, meet_at
    from rlgraph.engines.transformers.engine import ScoreEngine

    meet_at(place)
    return ScoreEngine(
        model.path,
        device=place.device,
        dtype=getattr(torch, dtype_of(model, place)),
        label=model.label,
        batch_tokens=model.batch_tokens,
        rank=place.rank,
        world=place.world,
        add_up=add_up,
    )


def dtype_of(model: Any, place: Place) -> str:
    """The dtype that a model computes in: its own, or for "auto" that of the device. Every engine asks for it before it computes."""
    leave_out_broken_amx()
    return device_precision(place.device).dtype if model.dtype == AUTO else str(model.dtype)
