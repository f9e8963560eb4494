"""What predictions were worth: how far from the runs they were, whether they named the faster of two, and what their choice took."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Protocol


class Compared(Protocol):
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
    found: Sequence[Compared], pairs: Sequence[tuple[Compared, Compared]], works: Mapping[str, Sequence[Compared]]
) -> dict[str, Any]:
    """Return the figures of a file of results.

    `pairs` are a synchronous and an asynchronous way each to do the same work, `works` all ways to do one work: the measured step of
    the one predicted to be best is told over that of the best.
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


def _named(pair: tuple[Compared, Compared]) -> bool:
    """Whether the faster of two was predicted to be the faster one."""
    one, other = pair
    return (one.predicted_s > other.predicted_s) == (one.measured_s > other.measured_s)


def summary(told: Mapping[str, Any]) -> str:
    """Return the figures in words."""
    choices = told["predicted best over measured best"].items()
    return "\n".join(
        (
            f"{len(told['configurations'])} configurations: median error {told['median_error']:.1%}, worst {told['worst_error']:.1%}",
            f"device-seconds not explained: at most {told['worst_residual']:.3%}",
            *(f"{work}: the predicted best takes {ratio:.3f} of the best" for work, ratio in choices),
            f"the faster of sync and async named in {told['signs_right']} of {told['signs']} pairs, of those that async loses in "
            f"{told['signs_right_where_async_loses']} of {told['signs_where_async_loses']}",
        )
    )
