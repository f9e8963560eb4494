"""The metrics of a batch whose node fired for each of its parts."""

from collections.abc import Mapping, Sequence
from statistics import fmean


def reduce_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a batch from those of its parts, which are of equal size: means, but of `…/max` and `…/min` the extremes."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _reduced(name, [part[name] for part in parts if name in part]) for name in names}


def _reduced(name: str, values: Sequence[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    return min(values) if name.endswith("/min") else fmean(values)
