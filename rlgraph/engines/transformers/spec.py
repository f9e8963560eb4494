"""The engine "transformers" for the registry."""

from typing import Any

import torch

from rlgraph.engines.api import GenerateEngine, Place
from rlgraph.engines.registry import EngineSpec, dtype_of
from rlgraph.plan.estimates import stays_awake


def load(generator: Any, place: Place) -> GenerateEngine:
    """Make the engine of a `Generator`, after the test that it decodes as the model's own forward computes."""
    from rlgraph.engines.forward.self_test import check_generator
    from rlgraph.engines.transformers.engine import TransformersEngine

    if generator.self_test:
        check_generator(generator.path, device=place.device)
    dtype = getattr(torch, dtype_of(generator, place))
    more = {"max_context": generator.max_context, "routes": generator.routes, "images": generator.images is not None}
    return TransformersEngine(generator.path, device=place.device, dtype=dtype, **more)


ENGINE = EngineSpec(
    name="transformers",
    load=load,
    settings=("engines_per_gpu", "self_test", "routes", "images", "min_p", "stop"),
    shares_steps=False,
    merges_adapters=True,
    sleep_bytes=stays_awake,
)
