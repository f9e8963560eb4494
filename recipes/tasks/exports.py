"""Where a recipe leaves its weights."""

from pathlib import Path

import rlgraph as rg


def new_folder(path: str) -> str:
    """Check, before a run, that nothing lies where its weights will go. Raises ExportError if something does."""
    if Path(path).exists():
        raise rg.errors.ExportError(
            f"'{path}' holds the weights of an earlier run, and an export replaces nothing: give another out=, or remove it"
        )
    return path
