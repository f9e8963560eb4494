"""Read the shapes of a graph's models from their config.json, so that a plan knows them before the models load."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from rlgraph.costs.model_shapes import ModelShape
from rlgraph.errors import DataError
from rlgraph.graph.nodes import Graph


def shapes_of(graph: Graph) -> Mapping[str, ModelShape]:
    """Read the shapes of the graph's models that have a config.json on this machine; no other file of a model is read."""
    paths = {node.model.path for node in graph.nodes if node.model is not None}
    found = {path: _shape(path) for path in paths}
    return {path: shape for path, shape in found.items() if shape is not None}


def _shape(path: str) -> ModelShape | None:
    file = Path(path) / "config.json"
    try:
        return _shape_by(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (ValueError, OSError) as broken:
        raise DataError(f"'{file}' is not JSON ({broken!s:.80}); write the model folder again") from None


@lru_cache(maxsize=64)  # by what the file holds, not by its path: a folder may be written again
def _shape_by(text: str) -> ModelShape | None:
    config = json.loads(text)
    return ModelShape.from_config(config) if isinstance(config, dict) else None  # what is no config is refused where it loads
