"""The trainer "fsdp" for the registry."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlgraph.engines.api import Place, TrainEngine
from rlgraph.engines.registry import TRAINER_SETTINGS, SavedShard, TrainerSpec, dtype_of
from rlgraph.errors import DataError

log = logging.getLogger("rlgraph.engines")


def load(model: Any, place: Place) -> TrainEngine:
    """Make one rank's engine, after the test that needs none of the weights; the ranks of one model meet at `place.rendezvous`."""
    import torch

    from rlgraph.engines.forward.head import PolicyHead, ValueHead
    from rlgraph.engines.fsdp.engine import FsdpEngine
    from rlgraph.engines.fsdp.sharding import meet_at

    sharing = model.ranks_per_pass > 1
    dtype, flat = getattr(torch, dtype_of(model, place)), place.device != "cpu" or bool(model.recompute) or sharing
    shared = True
    if model.self_test:
        from rlgraph.engines.forward.self_test import trainer_layout

        layout = trainer_layout(model.path, flat=flat, shared=not model.exact, device=place.device, dtype=dtype)
        if sharing and not layout.flat:
            raise DataError(f"{layout.note}; ranks can share only packed passes: use tensor_parallel=1 and context_parallel=1")
        flat, shared = layout.flat, layout.shared
        if layout.note and place.rank == 0:
            log.warning(layout.note)
    meet_at(place)
    return FsdpEngine(
        PolicyHead(model.path, fused=model.fuses_head) if model.scores == "log_probs" else ValueHead(model.path),
        model,
        rank=place.rank,
        world=place.world,
        device=place.device,
        dtype=dtype,
        flat=flat,
        shared=shared,
        shared_base=place.shared_base,
        on_progress=lambda done, total: place.report_progress(done, total, "micro-batches"),
    )


def saved_shards(folder: Path) -> Iterable[SavedShard]:
    """Find the weights in a state that the engine saved."""
    from rlgraph.engines.fsdp.distributed_checkpoint import weights_of

    return weights_of(folder)


TRAINER = TrainerSpec(
    name="fsdp",
    load=load,
    settings=tuple(name for name in TRAINER_SETTINGS if name not in ("pipeline_parallel", "max_context")),
    any_heads=True,
    shares_prompts=True,
    shares_base=True,
    reads_images=True,
    reads_shards=True,
    streams=True,
    saved_shards=saved_shards,
)
