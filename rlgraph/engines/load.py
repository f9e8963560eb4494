"""Load the engine of a model in its place: a scorer, and the dtype in which an engine computes there."""

from typing import Any

from rlgraph.engines.api import Place
from rlgraph.engines.precision import device_precision, leave_out_broken_amx
from rlgraph.plan.cluster import AUTO


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
