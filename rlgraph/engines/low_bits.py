"""bitsandbytes, which computes with moments of 8 bits and weights of 4: whether it is there, and its import."""

import importlib
import importlib.util
import logging
import sys
from typing import Any

INSTALL = "pip install 'rlgraph-dataflow[lowbit]'"
NAME = "bitsandbytes"


def is_installed() -> bool:
    """Whether the package is there, without importing it."""
    return importlib.util.find_spec(NAME) is not None


def bitsandbytes() -> Any:
    """Import the package.

    On some CPUs it asks the package `kernels` for a faster product, which downloads code, and warns where it gets none. Nothing here calls
    that product, and rlgraph downloads no code: the package is hidden while it is imported.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    before = {"kernels": sys.modules["kernels"]} if "kernels" in sys.modules else {}
    sys.modules["kernels"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(NAME)
    finally:
        del sys.modules["kernels"]
        sys.modules |= before
