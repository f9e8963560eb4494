"""The engine "sglang" for the registry."""

from typing import Any

from rlgraph.engines.api import GenerateEngine, Place
from rlgraph.engines.registry import EngineSpec, dtype_of
from rlgraph.engines.sglang import start


def load(generator: Any, place: Place) -> GenerateEngine:
    """Make the engine of a `Generator`."""
    dtype = dtype_of(generator, place)  # before SGLang is imported, which looks at the CPU
    from rlgraph.engines.sglang.engine import SglangEngine

    return SglangEngine(
        generator.path,
        max_context=generator.max_context,
        dtype=dtype,
        seed=generator.seed,
        threads=place.threads,
        max_sequences=generator.max_sequences or place.sequences or None,
        memory=generator.memory,
        shared=place.shares_devices and place.device == "cuda",
        copies=place.copies,
    )


ENGINE = EngineSpec(
    name="sglang",
    load=load,
    settings=("memory", "max_sequences", "min_p", "stop"),
    shares=(start.MEMORY_ALONE, start.MEMORY_SHARED),
)
