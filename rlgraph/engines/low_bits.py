"""bitsandbytes, which computes with moments of 8 bits and weights of 4: whether it is there, and its import."""

import importlib.util
import logging
from typing import Any

INSTALL = "pip install 'rlgraph-dataflow[lowbit]'"


def is_installed() -> bool:
    """Whether the package is there, without importing it."""
    return importlib.util.find_spec("bitsandbytes") is not None


def bitsandbytes() -> Any:
    """Import the package. It warns of a faster kernel for decoding on CPUs, of another package, which nothing here calls."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes
