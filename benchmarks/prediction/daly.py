"""The time that failures cost, by formula: Daly, 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps"."""

import math


def best_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Find the seconds of work between two checkpoints that lose the least time (Daly, 2006, equation 37).

    >>> round(best_interval_s(checkpoint_s=10, mtbf_s=20_000))  # Young's first estimate, the square root of 2 · 10 · 20,000, is 632
    626
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2 * mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s


def expected_s(work_s: float, interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Predict the seconds of a run with exponential failures, `interval_s` of work between checkpoints (Daly, 2006, equation 20).

    It assumes that a restart loses nothing beside its seconds and the work since the checkpoint: no pipeline that fills anew.

    >>> round(expected_s(100_000, interval_s=626, checkpoint_s=10, restart_s=60, mtbf_s=20_000))
    103540
    """
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s) * work_s / interval_s
