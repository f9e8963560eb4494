"""The trainer "vllm" for the registry: it only scores."""

from dataclasses import replace
from typing import Any

from rlgraph.engines.api import Place, TrainEngine
from rlgraph.engines.registry import TrainerSpec, dtype_of
from rlgraph.engines.vllm import arguments
from rlgraph.engines.vllm.spec import import_vllm
from rlgraph.plan.estimates import compute_weights, paged_memory
from rlgraph.plan.model_shapes import Need, Workload

LONGEST = 32_768.0


def load(model: Any, place: Place) -> TrainEngine:
    """Make the engine of a teacher or a reference."""
    from rlgraph.engines.vllm.scorer import VllmScorer

    return VllmScorer(
        model.path,
        dtype=dtype_of(model, place),
        threads=place.threads,
        context=model.max_context,
        shared=place.shares_devices and place.device == "cuda",
        on_progress=lambda done, total: place.report_progress(done, total, "rows"),
    )


def memory(work: Workload) -> Need:
    """Estimate the memory as of an engine that generates. Where nothing bounds a row, it counts keys and values of one of 32,768 tokens."""
    return paged_memory(replace(work, longest=min(work.longest, LONGEST), usual=min(work.usual, LONGEST)))


SPEC = TrainerSpec(
    name="vllm",
    load=load,
    settings=("max_context",),
    only_scores=True,
    gathers_shards=False,
    sleep_bytes=compute_weights,
    loading_bytes=compute_weights,
    memory_estimate=memory,
    shares=(arguments.MEMORY_ALONE, arguments.MEMORY_SHARED),
    prepare=import_vllm,
    host_heads=arguments.HOST_HEADS,
)
