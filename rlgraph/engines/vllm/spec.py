"""The engine "vllm" for the registry."""

from typing import Any

from rlgraph.engines.api import GenerateEngine
from rlgraph.engines.load import Place, dtype_of
from rlgraph.engines.registry import EngineSpec
from rlgraph.engines.vllm import engine_arguments
from rlgraph.engines.vllm.imports import import_vllm
from rlgraph.engines.vllm.user_arguments import check_arguments


def load(generator: Any, place: Place) -> GenerateEngine:
    """Make the engine of a `Generator`."""
    from rlgraph.engines.vllm.engine import VllmEngine

    return VllmEngine(
        generator.path,
        max_model_len=generator.max_context,
        dtype=dtype_of(generator, place),
        seed=generator.seed,
        threads=place.threads,
        tensor_parallel=generator.tensor_parallel,
        max_sequences=generator.max_sequences or engine_arguments.most_sequences(place.device == "cpu", place.sequences),
        memory=generator.memory,
        engines=generator.engines_per_gpu,
        shared=place.shared and place.device == "cuda",
        copies=place.copies,
        merging_bytes=place.merging_bytes,
        exact=place.exact,
        weights_dtype=generator.weights_dtype,
        drafts=generator.drafts,
        routes=generator.routes,
        engine_args=generator.engine_args,
    )


SPEC = EngineSpec(
    name="vllm",
    load=load,
    settings=("memory", "max_sequences", "engines_per_gpu", "engine_args", "weights_dtype", "drafts", "routes"),
    spans_devices=True,
    merges_adapters=True,
    samples_exactly=True,
    fixed_rotation=True,
    check_arguments=check_arguments,
    shares=(engine_arguments.MEMORY_ALONE, engine_arguments.MEMORY_SHARED),
    prepare=import_vllm,
    host_heads=engine_arguments.HOST_HEADS,
    renews=True,
)
