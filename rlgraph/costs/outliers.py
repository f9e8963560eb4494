"""Leave out of a fit the rare firings in which the machine stalled."""

import numpy as np

from rlgraph.costs.lengths import Array

FAR = 8.0  # times the usual distance from the fit
LEAST = 0.1  # of the fitted seconds: a nearer firing is no outlier
RARE = 0.05  # of all firings: more frequent ones are no outliers
FEW = 5  # firings of which one may be an outlier, as the second update of a trainer often is


def steady(seconds: Array, fitted: Array | float = 0.0) -> Array:
    """Mark, as booleans, the firings to keep: all but the rare ones that took far longer than the fit.

    The unit of distance is the median of all distances (median absolute deviation), which outliers do not change.
    """
    beyond = seconds - fitted
    beyond = beyond - np.median(beyond)
    far: Array = beyond > np.maximum(FAR * np.median(np.abs(beyond)), LEAST * (seconds - beyond))
    most = max(RARE * far.size, 1.0 if far.size >= FEW else 0.0)
    return ~far if far.sum() <= most else np.ones_like(far)


def mean(seconds: Array) -> float:
    """Average the firings that are no outliers."""
    return float(seconds[steady(seconds)].mean())
