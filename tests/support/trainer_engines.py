"""Trainers made of a head and options: those of `TrainerSettings` and those of the place together."""

from typing import TYPE_CHECKING, Any

from rlgraph.engines.forward.head import Head
from rlgraph.engines.fsdp.engine import FsdpEngine
from rlgraph.values.trainer import TrainerSettings, setting_names

if TYPE_CHECKING:
    from rlgraph.engines.megatron.engine import MegatronEngine


def take_settings(options: dict[str, Any]) -> TrainerSettings:
    return TrainerSettings(**{name: options.pop(name) for name in setting_names() if name in options})


def fsdp_engine(head: Head, **options: Any) -> FsdpEngine:
    return FsdpEngine(head, take_settings(options), **options)


def megatron_engine(head: Head, **options: Any) -> "MegatronEngine":
    from rlgraph.engines.megatron.engine import MegatronEngine

    return MegatronEngine(head, take_settings(options), **options)
