"""The facts of a run that the model card of an export tells, beside its plan."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlgraph.analysis.run import Settings


@dataclass(frozen=True)
class CardFacts:
    """The exported model and its run: the model's name in the plan, its `base` (a hub id or a folder), the steps that the weights have
    seen, the settings of the graph, and the metrics of the run's first and last step."""

    model: str
    base: str
    step: int
    dtype: str
    settings: Settings
    first: Mapping[str, float]
    last: Mapping[str, float]
