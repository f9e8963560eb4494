"""The accuracy of predictions: their error, how often they name the faster of two configurations, and the cost of following them."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol


class PredictedRun(Protocol):
    """A configuration that was predicted and then run."""

    @property
    def predicted_s(self) -> float: ...

    @property
    def measured_s(self) -> float: ...

    @property
    def error(self) -> float: ...

    @property
    def residual(self) -> float:
        """The share of device-seconds that nothing explains."""


def accuracy(
    found: Sequence[PredictedRun], pairs: Sequence[tuple[PredictedRun, PredictedRun]], works: Mapping[str, Sequence[PredictedRun]]
) -> dict[str, Any]:
    """Compute the figures of a file of results.

    Each of `pairs` is a synchronous and an asynchronous configuration for the same work. `works` lists all configurations for each work;
    the figure is the measured step of the one that was predicted fastest, over the fastest measured step.
    """
    errors = [abs(one.error) for one in found]
    losing = [(a, b) for a, b in pairs if a.measured_s < b.measured_s]
    return {
        "median_error": median(errors),
        "worst_error": max(errors),
        "signs_right": sum(map(_named, pairs)),
        "signs": len(pairs),
        "signs_right_where_async_loses": sum(map(_named, losing)),
        "signs_where_async_loses": len(losing),
        "worst_residual": max(one.residual for one in found),
        "predicted best over measured best": {
            work: min(ways, key=lambda one: one.predicted_s).measured_s / min(one.measured_s for one in ways)
            for work, ways in works.items()
            if len(ways) > 1
        },
    }


def _named(pair: tuple[PredictedRun, PredictedRun]) -> bool:
    """True if the faster of two configurations was also predicted to be the faster."""
    one, other = pair
    return (one.predicted_s > other.predicted_s) == (one.measured_s > other.measured_s)


def summary(found: Mapping[str, Any]) -> str:
    """Write the figures as text."""
    choices = found["predicted best over measured best"].items()
    return "\n".join(
        (
            f"{len(found['configurations'])} configurations: median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}",
            f"device-seconds not explained: at most {found['worst_residual']:.3%}",
            *(f"{work}: the predicted best takes {ratio:.3f} of the best" for work, ratio in choices),
            f"the faster of sync and async named in {found['signs_right']} of {found['signs']} pairs, of those that async loses in "
            f"{found['signs_right_where_async_loses']} of {found['signs_where_async_loses']}",
        )
    )
