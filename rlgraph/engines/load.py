"""From a declared model to its engine, in the worker that will run it."""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from rlgraph.engines.base import GenerateEngine, TrainEngine
from rlgraph.engines.precision import device_precision
from rlgraph.planning.precision import AUTO

log = logging.getLogger("rlgraph.engines")


class Place(Protocol):
    """Where an engine runs: its rank among the workers of its model, its cores, and how many versions of the weights lie on its
    device."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def rendezvous(self) -> str: ...

    @property
    def meeting(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def shared(self) -> bool: ...

    @property
    def copies(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    @property
    def counted(self) -> Callable[[int, int, str], None]: ...


def generate_engine(model: Any, place: Place) -> GenerateEngine:
    """Return the engine of a `Generator`."""
    import torch

    if model.engine == "transformers":
        from rlgraph.engines.self_test import check_generator
        from rlgraph.engines.transformers import TransformersEngine

        if model.self_test:
            check_generator(model.path, device=place.device)
        return TransformersEngine(
            model.path, device=place.device, dtype=getattr(torch, dtype_of(model, place)), max_context=model.max_context
        )
    from rlgraph.engines import vllm_arguments
    from rlgraph.engines.vllm import VllmEngine

    return VllmEngine(
        model.path,
        max_model_len=model.max_context,
        dtype=dtype_of(model, place),
        seed=model.seed,
        threads=place.threads,
        tensor_parallel=model.tensor_parallel,
        max_sequences=model.max_sequences or vllm_arguments.most_sequences(place.device == "cpu", place.sequences),
        memory=model.memory,
        engines=model.engines_per_gpu,
        shared=place.shared and place.device == "cuda",
        copies=place.copies,
    )


def policy_engine(model: Any, place: Place) -> TrainEngine:
    """Return this rank's engine of a `Policy` or `Reference`, whose scores are log-probs."""
    from rlgraph.engines.heads import PolicyHead

    return _train_engine(PolicyHead, model, place)


def critic_engine(model: Any, place: Place) -> TrainEngine:
    """Return this rank's engine of a `Critic`, whose scores are values."""
    from rlgraph.engines.heads import ValueHead

    return _train_engine(ValueHead, model, place)


def score_engine(model: Any, place: Place) -> Any:
    """Return the engine of a `RewardModel`."""
    import torch

    from rlgraph.engines.scorer import ScoreEngine

    dtype = getattr(torch, dtype_of(model, place))
    return ScoreEngine(model.path, device=place.device, dtype=dtype, label=model.label, batch_tokens=model.batch_tokens)


def dtype_of(model: Any, place: Place) -> str:
    """The dtype that a model computes in: its own, or for "auto" what the device here computes in."""
    return device_precision(place.device).dtype if model.dtype == AUTO else str(model.dtype)


def _train_engine(head: Callable[[str], Any], model: Any, place: Place) -> TrainEngine:
    """Make one rank's engine, after the test that needs none of the weights; the ranks of one model meet at `place.rendezvous`."""
    import torch

    from rlgraph.engines.fsdp import FsdpEngine
    from rlgraph.engines.meeting import meet

    dtype, flat = getattr(torch, dtype_of(model, place)), place.device != "cpu" or model.recompute
    shared = True
    if model.self_test:
        from rlgraph.engines.self_test import trainer_layout

        layout = trainer_layout(model.path, flat=flat, device=place.device, dtype=dtype)
        flat, shared = layout.flat, layout.shared
        if layout.note and place.rank == 0:
            log.warning(layout.note)
    if place.world > 1:
        meet(place.rendezvous, place.rank, place.world, place.meeting)
    return FsdpEngine(
        head(model.path),
        optimizer=model.optimizer,
        rank=place.rank,
        world=place.world,
        device=place.device,
        dtype=dtype,
        micro_batch_tokens=model.micro_batch_tokens,
        recompute=model.recompute,
        compiled=model.compiled,
        flat=flat,
        shared=shared,
        passed=lambda done, total: place.counted(done, total, "micro-batches"),
    )
