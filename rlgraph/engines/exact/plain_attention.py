"""What exact attention asks of a model, on a CPU and on a GPU."""

from typing import Any

from rlgraph.errors import DataError


def check_plain(module: Any, *settings: Any) -> None:
    """Raise DataError for an attention module with a window, a soft cap or sinks: `settings` that are not None."""
    if any(setting is not None for setting in settings):
        raise DataError(f"{type(module).__name__} has a window, a soft cap or sinks, which exact=True does not support; leave it out")
