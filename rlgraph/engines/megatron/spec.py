"""The trainer "megatron" for the registry."""

import importlib.util
from typing import Any

from rlgraph.engines.api import Place, TrainEngine
from rlgraph.engines.fsdp.spec import saved_shards
from rlgraph.engines.registry import TrainerSpec, dtype_of
from rlgraph.errors import GraphError
from rlgraph.plan.estimates import model_parallel


def check(model: Any) -> None:
    """Raise GraphError for a model or an optimizer that Megatron-Core is not offered for, or where it is not installed."""
    from rlgraph.engines.megatron.modules import check_folder

    where = f"{type(model).__name__}(trainer='megatron'"
    if importlib.util.find_spec("megatron") is None:
        raise GraphError(f"{where}): megatron-core is not installed; pip install 'rlgraph-dataflow[megatron]', or leave out trainer")
    kind, moments = type(model.optimizer).__name__, model.optimizer.moments
    if kind != "AdamW" or moments != "32bit":
        given = f"rg.{kind}(moments={moments!r})" if kind == "AdamW" else f"rg.optim.{kind}()"
        raise GraphError(
            f"{where}, optimizer={given}): it only supports AdamW with float32 moments; write rg.AdamW(…), or leave out trainer"
        )
    shared = {how: getattr(model, f"{how}_parallel") for how in ("tensor", "context", "pipeline", "expert")}
    check_folder(type(model).__name__, model.path, **shared)


def load(model: Any, place: Place) -> TrainEngine:
    """Make one rank's engine; the ranks of one model meet at `place.rendezvous`."""
    import torch

    from rlgraph.engines.forward.head import PolicyHead, ValueHead
    from rlgraph.engines.fsdp.sharding import meet_at
    from rlgraph.engines.megatron.engine import MegatronEngine

    meet_at(place)
    return MegatronEngine(
        PolicyHead(model.path) if model.scores == "log_probs" else ValueHead(model.path),
        model,
        rank=place.rank,
        world=place.world,
        device=place.device,
        dtype=getattr(torch, dtype_of(model, place)),
        on_progress=lambda done, total: place.report_progress(done, total, "micro-batches"),
    )


TRAINER = TrainerSpec(
    name="megatron",
    load=load,
    settings=(
        "micro_batch_tokens",
        "recompute",
        "fused_head",
        "tensor_parallel",
        "context_parallel",
        "pipeline_parallel",
        "expert_parallel",
    ),
    check=check,
    whole_vocabulary=False,
    any_vocabulary=True,
    reads_shards=True,
    streams=True,
    in_each_group=True,
    gathers_shards=False,
    saved_shards=saved_shards,
    memory_estimate=model_parallel,
)
