"""Checks of a model that is trained with moments of 8 bits."""

from typing import Any

from rlgraph.engines.low_bits import INSTALL, is_installed
from rlgraph.errors import GraphError


def check_eight_bits(model: Any) -> None:
    """Raise GraphError for settings that moments of 8 bits do not work with."""
    where = f"{type(model).__name__}(optimizer=rg.AdamW(moments='8bit')"
    if model.offload is not None:
        raise GraphError(f"{where}, offload='{model.offload}'): moments in host memory have 32 bits; leave out one")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices cut them within blocks of moments; use "
            "data_parallel or context_parallel, or leave out moments"
        )


def check_installed(model: Any) -> None:
    """Raise GraphError for a model that needs bitsandbytes where it is not installed."""
    if model.optimizer.moments == "8bit" and not is_installed():
        raise GraphError(
            f"{type(model).__name__}(optimizer=rg.AdamW(moments='8bit')): the package bitsandbytes is not installed: {INSTALL}"
        )
