"""The engine "vllm" for the registry, and the trainer "vllm", which only scores."""

import os
from dataclasses import replace
from importlib import import_module
from typing import Any

from rlgraph.engines.api import GenerateEngine, Place, TrainEngine
from rlgraph.engines.registry import EngineSpec, TrainerSpec, dtype_of
from rlgraph.engines.vllm import arguments
from rlgraph.engines.vllm.arguments import check_arguments
from rlgraph.plan.estimates import compute_weights, paged_memory
from rlgraph.plan.model_shapes import Need, Workload

# What an engine of vLLM imports, for a process from which workers are forked.

MODULES = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "rlgraph.engines.vllm.engine",
)
ON_CPU = ("vllm.v1.worker.cpu_worker",)  # those of a GPU are imported by the worker, which may open it


def import_vllm() -> None:
    """Import vLLM, with the variables that it reads as it is imported; it opens no GPU."""
    gpu = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))  # to ask torch would open it
    for name, value in arguments.environment(gpu, os.environ).items():
        os.environ.setdefault(name, value)
    for module in (*MODULES, *(() if gpu else ON_CPU)):
        import_module(module)


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
        max_sequences=generator.max_sequences or arguments.most_sequences(place.device == "cpu", place.sequences),
        memory=generator.memory,
        engines=generator.engines_per_gpu,
        shared=place.shares_devices and place.device == "cuda",
        copies=place.copies,
        merging_bytes=place.merging_bytes,
        exact=place.exact,
        weights_dtype=generator.weights_dtype,
        drafts=generator.drafts,
        routes=generator.routes,
        images=generator.images,
        engine_args=generator.engine_args,
    )


ENGINE = EngineSpec(
    name="vllm",
    load=load,
    settings=("memory", "max_sequences", "engines_per_gpu", "engine_args", "weights_dtype", "drafts", "routes", "images", "min_p", "stop"),
    spans_devices=True,
    merges_adapters=True,
    samples_exactly=True,
    own_processor=True,
    fixed_rotation=True,
    check_arguments=check_arguments,
    shares=(arguments.MEMORY_ALONE, arguments.MEMORY_SHARED),
    prepare=import_vllm,
    host_heads=arguments.HOST_HEADS,
    renews=True,
)


# The trainer "vllm": it only scores.

LONGEST = 32_768.0


def load_scorer(model: Any, place: Place) -> TrainEngine:
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


def scorer_memory(work: Workload) -> Need:
    """Estimate the memory as of an engine that generates. Where nothing bounds a row, it counts keys and values of one of 32,768 tokens."""
    return paged_memory(replace(work, longest=min(work.longest, LONGEST), usual=min(work.usual, LONGEST)))


TRAINER = TrainerSpec(
    name="vllm",
    load=load_scorer,
    settings=("max_context",),
    only_scores=True,
    gathers_shards=False,
    sleep_bytes=compute_weights,
    loading_bytes=compute_weights,
    memory_estimate=scorer_memory,
    shares=(arguments.MEMORY_ALONE, arguments.MEMORY_SHARED),
    prepare=import_vllm,
    host_heads=arguments.HOST_HEADS,
)
