"""Checks of a model that is trained with moments of 8 bits, or with a frozen base of 4."""

from typing import Any

from rlgraph.engines.precision import INSTALL, is_installed
from rlgraph.errors import GraphError


def check_eight_bits(model: Any) -> None:
    """Raise GraphError for settings that moments of 8 bits do not work with."""
    where = f"{type(model).__name__}(optimizer=rg.AdamW(moments='8bit')"
    if model.offload == "moments":
        raise GraphError(f"{where}, offload='moments'): moments in host memory have 32 bits; leave out one")
    if model.tensor_parallel > 1:
        raise GraphError(
            f"{where}, tensor_parallel={model.tensor_parallel}): ranks that share matrices cut them within blocks of moments; use "
            "data_parallel or context_parallel, or leave out moments"
        )
    if model.expert_parallel > 1:
        raise GraphError(
            f"{where}, expert_parallel={model.expert_parallel}): ranks that share experts cut them unlike the blocks of moments; "
            "leave out one"
        )


def check_four_bits(model: Any) -> None:
    """Raise GraphError for settings that a base of 4 bits does not work with."""
    where = f"{type(model).__name__}(adapter=LoRA(base='{model.adapter.base}')"
    if model.compiled:
        raise GraphError(f"{where}, compiled=True): products with matrices of 4 bits are not compiled; leave out compiled")
    for name, ranks in (("data_parallel", model.data_parallel or 1), ("context_parallel", model.context_parallel)):
        if ranks > 1:
            raise GraphError(f"{where}, {name}={ranks}): a base of 4 bits is whole on one rank; leave out one")


def check_installed(model: Any) -> None:
    """Raise GraphError for a model that needs bitsandbytes where it is not installed."""
    eight, four = model.optimizer.moments == "8bit", model.adapter is not None and model.adapter.base is not None
    if (eight or four) and not is_installed():
        given = "optimizer=rg.AdamW(moments='8bit')" if eight else f"adapter=LoRA(base='{model.adapter.base}')"
        raise GraphError(f"{type(model).__name__}({given}): the package bitsandbytes is not installed: {INSTALL}")
