"""Which firings a cost is read off: not the rare ones in which the machine itself stood still."""

import numpy as np

from rlgraph.costs.lengths import Array

FAR = 8.0  # times the usual distance from the law
LEAST = 0.1  # of the law's seconds: nearer is no stall
RARE = 0.05  # of all firings: what happens more often is the node's own way


def steady(seconds: Array, fitted: Array | float = 0.0) -> Array:
    """Return which firings belong to the law, as booleans: all but rare ones that took far longer than the law says.

    A distance is far in terms of the median of all distances (median absolute deviation), which stalls do not move.
    """
    beyond = seconds - fitted
    beyond = beyond - np.median(beyond)
    far: Array = beyond > np.maximum(FAR * np.median(np.abs(beyond)), LEAST * (seconds - beyond))
    return ~far if far.mean() <= RARE else np.ones_like(far)


def mean(seconds: Array) -> float:
    """Return the mean of the firings that are no stalls."""
    return float(seconds[steady(seconds)].mean())
