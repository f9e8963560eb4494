"""Explain measured seconds with the fewest numbers: least squares with coefficients of at least 0, and only those that help."""

from collections.abc import Mapping
from itertools import combinations

import numpy as np

from rlgraph.costs import outliers
from rlgraph.costs.lengths import Array

KEPT_SPREAD = 40  # single firings kept in the costs of a node
HARDLY = 0.1  # of the mean firing: shorter firings say nothing of the spread
STEADY = 0.02  # a quantity that varies by less, relative to its mean, explains nothing


def told_apart(columns: Mapping[str, Array]) -> dict[str, Array]:
    """Keep the columns that are not zero and not nearly a multiple of an earlier column.

    Which of two such columns fits better would be noise, so the first one stands for both.
    """
    kept: dict[str, Array] = {}
    for name, column in columns.items():
        if column.any() and all(varies(column / np.maximum(other, 1e-30)) for other in kept.values()):
            kept[name] = column
    return kept


def varies(values: Array) -> bool:
    """Tell whether a quantity varies enough to explain anything."""
    return bool(values.std() > STEADY * values.mean())


def fewest(columns: Mapping[str, Array], seconds: Array) -> dict[str, float]:
    """Fit coefficients of at least 0 for the subset of columns that the firings support, without outliers."""
    kept = np.ones(len(seconds), dtype=bool)
    while True:
        found = _least_squares({name: column[kept] for name, column in columns.items()}, seconds[kept])
        steady = kept & outliers.steady(seconds, explained(columns, found))
        if steady.sum() == kept.sum():
            return found
        kept = steady


def explained(columns: Mapping[str, Array], coefficients: Mapping[str, float]) -> Array:
    """Predict the seconds of each firing from fitted coefficients."""
    return np.sum([coefficients.get(name, 0.0) * column for name, column in columns.items()], axis=0)  # type: ignore[no-any-return]


def _least_squares(columns: Mapping[str, Array], seconds: Array) -> dict[str, float]:
    """Fit coefficients of at least 0 by least squares, for the subset of columns that the data support.

    The Bayesian information criterion (Schwarz, 1978) sets what a further number must explain; with as many firings as
    numbers nothing is explained, so a subset is smaller than that.
    """
    best, least = dict[str, float](), float("inf")
    count, floor = len(seconds), 1e-12 * float((seconds**2).sum()) + 1e-30
    for size in range(1, min(len(columns), max(count - 1, 1)) + 1):
        for names in combinations(columns, size):
            table = np.stack([columns[name] for name in names], axis=1)
            scale = np.maximum(table.max(axis=0), 1e-30)
            found, _, rank, _ = np.linalg.lstsq(table / scale, seconds, rcond=1e-6)
            if rank < size or (found < 0).any():
                continue
            left = float(((seconds - (table / scale) @ found) ** 2).sum()) + floor
            score = count * np.log(left / count) + size * np.log(max(count, 2))
            if score < least - 1e-9:
                best, least = dict(zip(names, (found / scale).tolist(), strict=True)), score
    return best


def spread(seconds: Array, fitted: Array | float) -> tuple[float, ...]:
    """Divide single firings by their fitted seconds, and reduce many of them to quantiles.

    Firings with hardly any fitted time are left out: their responses ended while another batch decoded, and the fit says nothing
    about them."""
    by_law = np.broadcast_to(np.asarray(fitted, dtype=float), seconds.shape)
    told = by_law > HARDLY * by_law.mean()
    ratios = seconds[told] / by_law[told] if told.any() else np.ones(1)
    if len(ratios) > KEPT_SPREAD:
        ratios = np.quantile(ratios, (np.arange(KEPT_SPREAD) + 0.5) / KEPT_SPREAD)
    return tuple(float(f"{ratio:.6g}") for ratio in ratios)
