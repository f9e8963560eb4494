"""Metrics of a batch whose node fired for each of its chunks."""

from collections.abc import Mapping, Sequence
from statistics import fmean


def reduce_metrics(chunks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of equally large chunks into those of the batch: by the mean, `…/max` and `…/min` by the extreme."""
    names = dict.fromkeys(name for chunk in chunks for name in chunk)
    return {name: _reduced(name, [chunk[name] for chunk in chunks if name in chunk]) for name in names}


def _reduced(name: str, values: Sequence[float]) -> float:
    if name.endswith("/max"):
        return max(values)
    return min(values) if name.endswith("/min") else fmean(values)
