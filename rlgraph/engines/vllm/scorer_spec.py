"""The trainer "vllm" for the registry: it only scores."""

from typing import Any

from rlgraph.engines.api import TrainEngine
from rlgraph.engines.load import Place, dtype_of
from rlgraph.engines.registry import TrainerSpec


def load(model: Any, place: Place) -> TrainEngine:
    """Make the engine of a teacher or a reference."""
    from rlgraph.engines.vllm.scorer import VllmScorer

    return VllmScorer(
        model.path,
        dtype=dtype_of(model, place),
        threads=place.threads,
        shared=place.shared and place.device == "cuda",
        on_progress=lambda done, total: place.report_progress(done, total, "rows"),
    )


SPEC = TrainerSpec(name="vllm", load=load, only_scores=True)
